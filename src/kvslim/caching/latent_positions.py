"""Where each cached token stands in its text: what rotation needs when keys are rebuilt later."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.errors import CacheStateError


class TokenPositions:
    """The position of every cached token, ``(batch, tokens)`` int32, shared by the layers.

    Attributes:
        ids: the last positions seen, or ``None``.
        seen: how many tokens were appended in all, trimmed ones included.
    """

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.seen = 0

    def append(self, start: int, ids: Tensor) -> None:
        """Add the positions of the tokens from ``start`` on; every layer may call it, the first one counts.

        Raises:
            CacheStateError: the layers disagree about how many tokens there are, or the batch size changed.
        """
        held = self.ids
        if held is not None and held.shape[0] != ids.shape[0]:
            raise CacheStateError(
                f"The cache holds {held.shape[0]} rows and the input has {ids.shape[0]}. Use batch_repeat_interleave "
                f"or batch_select_indices, or start a new cache."
            )
        if self.seen == start + ids.shape[1]:
            return
        if self.seen != start:
            raise CacheStateError("The layers of this cache hold different tokens. Start a new cache.")
        ids = ids.to(torch.int32)
        self.ids = ids.clone() if held is None else torch.cat([held, ids.to(held.device)], dim=1)
        self.seen += ids.shape[1]

    def last(self, count: int) -> Tensor:
        """The positions of the last ``count`` tokens."""
        if self.ids is None:
            raise CacheStateError("The cache is empty.")
        return self.ids[:, self.ids.shape[1] - count :]

    def drop(self, removed: int) -> None:
        """Forget the last ``removed`` tokens."""
        self.seen -= removed
        if self.ids is not None and removed:
            self.ids = self.ids[:, : max(self.ids.shape[1] - removed, 0)].clone()

    def trim(self, keep: int) -> None:
        """Keep only the last ``keep`` positions."""
        if self.ids is not None and self.ids.shape[1] > keep:
            self.ids = self.last(keep).clone()
