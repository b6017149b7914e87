"""Latents of one layer coded token by token, with sinks and a recent window exact.

A token is coded once, when it is neither among the first ``sinks`` tokens nor among the last ``window`` ones, and never
again. Attention sees a coded token as all later tokens will see it, also in the forward pass that brings it in. So
without a window it makes no difference whether tokens come at once, in chunks or one by one; with one, the more tokens
come at once, the more of them are coded when they first attend to each other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvslim.caching.block import iter_tensors, map_tensors
from kvslim.caching.latent_layer import LatentLayer, check_rank, owned
from kvslim.errors import CacheStateError


class TokenCodes(Protocol):
    """A dataclass of tensors ``(batch, tokens, ...)``; one of them are the codes."""

    @property
    def codes(self) -> Tensor: ...


Codes = TypeVar("Codes", bound=TokenCodes)


@dataclass(frozen=True)
class _Stored(Generic[Codes]):
    """Keys or values of the held tokens, in order: exact sinks, codes, exact recent tokens."""

    sinks: Tensor
    codes: Codes
    recent: Tensor

    @property
    def lengths(self) -> tuple[int, int, int]:
        return int(self.sinks.shape[1]), int(self.codes.codes.shape[1]), int(self.recent.shape[1])

    def keep(self, start: int, stop: int) -> _Stored[Codes]:
        """Tokens ``start`` to ``stop``."""
        parts, offset = [], 0
        for part, length in zip((self.sinks, self.codes, self.recent), self.lengths, strict=True):
            first, last = (min(max(end - offset, 0), length) for end in (start, stop))
            parts.append(map_tensors(part, lambda x, first=first, last=last: x[:, first:last]))  # type: ignore[misc]
            offset += length
        return _Stored(*parts)  # type: ignore[arg-type]


class TokenwiseLatentLayer(LatentLayer, Generic[Codes]):
    """What does not depend on how a token is coded.

    Args:
        sinks: tokens at the start of the cache that stay exact.
        window: most recent tokens that stay exact.
        channels: latent channels of the keys and of the values.
        sliding_window: the attention window in tokens, or ``None``.
    """

    def __init__(self, sinks: int, window: int, channels: tuple[int, int], sliding_window: int | None = None) -> None:
        super().__init__(sliding_window)
        self.sinks, self.window, self.channels = sinks, window, channels
        self._stored: tuple[_Stored[Codes], ...] = ()  # of keys, of values

    @abstractmethod
    def _encode(self, latents: Tensor, kind: int) -> Codes:
        """Code latents ``(batch, tokens, channels)`` of keys (0) or values (1); there may be no tokens."""

    @abstractmethod
    def _decode(self, stored: Codes, kind: int) -> Tensor:
        """Undo :meth:`_encode`, float32."""

    @abstractmethod
    def _join(self, first: Codes, second: Codes) -> Codes:
        """The tokens of both, one behind the other."""

    @property
    def held(self) -> int:
        return sum(self._stored[0].lengths) if self._stored else 0

    @property
    def coded(self) -> int:
        """Held tokens that are coded; the others are exact."""
        return self._stored[0].lengths[1] if self._stored else 0

    def dense(self) -> tuple[Tensor, Tensor]:
        """Exact tokens as they are, coded ones decoded, in the model's dtype."""
        if not self._stored:
            raise CacheStateError("The cache is empty.")
        keys, values = (self._decoded(stored, kind) for kind, stored in enumerate(self._stored))
        return keys, values

    def tensors(self) -> list[Tensor]:
        return list(iter_tensors(self._stored))

    def round_exact(self, dtype: torch.dtype) -> None:
        """Round sinks and recent tokens; what belongs to the codes stays."""
        self._stored = tuple(_Stored(x.sinks.to(dtype), x.codes, x.recent.to(dtype)) for x in self._stored)

    def _decoded(self, stored: _Stored[Codes], kind: int) -> Tensor:
        sinks, coded, recent = stored.lengths
        parts = [stored.sinks] if sinks else []
        if coded or not (sinks or recent):
            parts.append(self._decode(stored.codes, kind).to(self.dtype))
        if recent:
            parts.append(stored.recent)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        for channels, latents in zip(self.channels, (keys, values), strict=True):
            check_rank(channels, latents)
        new = (keys, values)
        held = self._stored or tuple(self._empty(latents, kind) for kind, latents in enumerate(new))
        grown = [self._grown(held[kind], latents, kind) for kind, latents in enumerate(new)]
        self._stored = tuple(map_tensors(stored, owned) for stored in grown)

    def _empty(self, latents: Tensor, kind: int) -> _Stored[Codes]:
        none = latents[:, :0]
        return _Stored(none, self._encode(none, kind), none)

    def _grown(self, stored: _Stored[Codes], latents: Tensor, kind: int) -> _Stored[Codes]:
        """``stored`` and the new latents behind it; whatever has left the recent window is coded."""
        new_sinks = min(max(self.sinks - self.seen, 0), latents.shape[1])
        sinks = torch.cat([stored.sinks, latents[:, :new_sinks]], dim=1) if new_sinks else stored.sinks
        recent = torch.cat([stored.recent, latents[:, new_sinks:]], dim=1)
        leaving = max(recent.shape[1] - self.window, 0)
        codes = stored.codes
        if leaving:
            codes = self._join(codes, self._encode(recent[:, :leaving], kind))
        return _Stored(sinks, codes, recent[:, leaving:])

    def _keep(self, start: int, stop: int) -> None:
        self._stored = tuple(map_tensors(stored.keep(start, stop), owned) for stored in self._stored)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._stored = map_tensors(self._stored, lambda x: owned(change(x)))

    def _clear(self) -> None:
        self._stored = ()
