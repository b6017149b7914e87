"""Token windows to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvslim.errors import ConfigError


def evenly_spaced_windows(ids: Sequence[int] | Tensor, count: int, length: int, bos_id: int | None = None) -> Tensor:
    """Cut ``count`` windows that do not overlap and are spread evenly from the first token to the last.

    Args:
        ids: token ids of the text, one dimension.
        count: number of windows, ≥ 1.
        length: tokens per window, ``bos_id`` included.
        bos_id: token put in front of each window, for models trained so.

    Returns:
        ``(count, length)`` int64 token ids.

    Raises:
        ConfigError: a number is out of range, or the text is too short; the message gives the counts.
    """
    flat = torch.as_tensor(ids, dtype=torch.long).flatten()
    body = length - (bos_id is not None)
    if count < 1 or body < 1:
        raise ConfigError(f"Windows need a count and a length of at least 1, not {count} and {length}.")
    available = int(flat.shape[0])
    if available < count * body:
        raise ConfigError(
            f"The text has {available} tokens, but {count} windows of {body} need {count * body}. Use a longer text, "
            f"fewer windows (at most {available // body}) or shorter ones."
        )
    starts = [index * (available - body) // max(count - 1, 1) for index in range(count)]
    rows = torch.stack([flat[start : start + body] for start in starts])
    return rows if bos_id is None else torch.nn.functional.pad(rows, (1, 0), value=bos_id)


def bos_token(tokenizer: Any) -> int:
    """The id of the tokenizer's beginning-of-text token.

    Raises:
        ConfigError: it has none.
    """
    if tokenizer.bos_token_id is None:
        raise ConfigError("The tokenizer has no beginning-of-text token: leave bos out.")
    return int(tokenizer.bos_token_id)
