"""Latents of one layer as packed low-bit codes, with sinks and a recent window exact (Palu, Sec. 3.4).

A token is coded once, when it is neither among the first ``sinks`` tokens nor among the last ``window`` ones, and never
again. Attention sees a coded token as all later tokens will see it, also in the forward pass that brings it in. So
without a window it makes no difference whether tokens come at once, in chunks or one by one; with one, the more tokens
come at once, the more of them are coded when they first attend to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvslim.caching.block import iter_tensors, map_tensors
from kvslim.caching.latent_layer import LatentLayer, check_rank, owned
from kvslim.config import is_count
from kvslim.errors import CacheStateError, ConfigError
from kvslim.quantizing import grouped
from kvslim.quantizing.grouped import GroupedCodes

CODE_BITS = (2, 3, 4, 8)
"""Widths that latents can be coded at."""


@dataclass(frozen=True)
class LatentCodes:
    """How a model's latents are coded.

    Attributes:
        bits: code width, one of :data:`CODE_BITS`.
        sinks: tokens at the start of the cache that stay exact: columns of the batch, so in a left-padded row they
            are padding first.
        window: most recent tokens that stay exact until as many newer ones have come.
        key_ranks: per layer, the rank of each group of KV heads.
        value_ranks: the same for values.
        fitted: at few bits, fit the range of each token to its values, for latents that a rotation has spread evenly;
            without one keep the full range (see :mod:`kvslim.quantizing.ranges`).

    Raises:
        ConfigError: a number is out of range, or the layers of keys and values differ.
    """

    bits: int
    sinks: int
    window: int
    key_ranks: tuple[tuple[int, ...], ...]
    value_ranks: tuple[tuple[int, ...], ...]
    fitted: bool = True

    def __post_init__(self) -> None:
        check_code_settings(self.bits, self.sinks, self.window)
        if len(self.key_ranks) != len(self.value_ranks):
            raise ConfigError(f"Ranks for {len(self.key_ranks)} layers of keys, {len(self.value_ranks)} of values.")


def check_code_settings(bits: Any, sinks: Any, window: Any) -> None:
    """Check a code width and the numbers of exact tokens.

    Raises:
        ConfigError: one is out of range.
    """
    if not is_count(bits) or bits not in CODE_BITS:
        raise ConfigError(f"Latents are coded at {', '.join(map(str, CODE_BITS))} bits, not {bits!r}.")
    for name, value in (("sinks", sinks), ("window", window)):
        if not is_count(value, 0):
            raise ConfigError(f"{name} is a number of exact tokens, at least 0, not {value!r}.")


@dataclass(frozen=True)
class _Stored:
    """Keys or values of the held tokens, in order: exact sinks, codes, exact recent tokens."""

    sinks: Tensor
    codes: GroupedCodes
    recent: Tensor

    @property
    def lengths(self) -> tuple[int, int, int]:
        return int(self.sinks.shape[1]), int(self.codes.codes.shape[1]), int(self.recent.shape[1])

    def keep(self, start: int, stop: int) -> _Stored:
        """Tokens ``start`` to ``stop``."""
        parts, offset = [], 0
        for part, length in zip((self.sinks, self.codes, self.recent), self.lengths, strict=True):
            first, last = (min(max(end - offset, 0), length) for end in (start, stop))
            parts.append(map_tensors(part, lambda x, first=first, last=last: x[:, first:last]))  # type: ignore[misc]
            offset += length
        return _Stored(*parts)  # type: ignore[arg-type]


class CodedLatentLayer(LatentLayer):
    """Latents of one layer, coded but for sinks and recent tokens.

    Args:
        codes: how the model's latents are coded.
        layer: which of its layers this is.
        sliding_window: the attention window in tokens, or ``None``.
    """

    def __init__(self, codes: LatentCodes, layer: int, sliding_window: int | None = None) -> None:
        super().__init__(sliding_window)
        self.codes = codes
        self.ranks = (codes.key_ranks[layer], codes.value_ranks[layer])
        self._stored: tuple[_Stored, ...] = ()  # of keys, of values

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
        keys, values = map(self._decoded, self._stored, self.ranks)
        return keys, values

    def tensors(self) -> list[Tensor]:
        return list(iter_tensors(self._stored))

    def round_exact(self, dtype: torch.dtype) -> None:
        """Round sinks and recent tokens; codes, steps and minima stay."""
        self._stored = tuple(_Stored(x.sinks.to(dtype), x.codes, x.recent.to(dtype)) for x in self._stored)

    def _decoded(self, stored: _Stored, ranks: Sequence[int]) -> Tensor:
        sinks, coded, recent = stored.lengths
        parts = [stored.sinks] if sinks else []
        if coded or not (sinks or recent):
            parts.append(grouped.decode(stored.codes, ranks, self.codes.bits).to(self.dtype))
        if recent:
            parts.append(stored.recent)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        pairs = list(zip((keys, values), self.ranks, strict=True))
        for latents, ranks in pairs:
            check_rank(sum(ranks), latents)
        held = self._stored or [self._empty(latents, ranks) for latents, ranks in pairs]
        grown = [self._grown(stored, *pair) for stored, pair in zip(held, pairs, strict=True)]
        self._stored = tuple(map_tensors(stored, owned) for stored in grown)

    def _empty(self, latents: Tensor, ranks: Sequence[int]) -> _Stored:
        none = latents[:, :0]
        return _Stored(none, self._encoded(none, ranks), none)

    def _grown(self, stored: _Stored, latents: Tensor, ranks: Sequence[int]) -> _Stored:
        """``stored`` and the new latents behind it; whatever has left the recent window is coded."""
        new_sinks = min(max(self.codes.sinks - self.seen, 0), latents.shape[1])
        sinks = torch.cat([stored.sinks, latents[:, :new_sinks]], dim=1) if new_sinks else stored.sinks
        recent = torch.cat([stored.recent, latents[:, new_sinks:]], dim=1)
        leaving = max(recent.shape[1] - self.codes.window, 0)
        codes = stored.codes
        if leaving:
            codes = grouped.join(codes, self._encoded(recent[:, :leaving], ranks))
        return _Stored(sinks, codes, recent[:, leaving:])

    def _encoded(self, latents: Tensor, ranks: Sequence[int]) -> GroupedCodes:
        return grouped.encode(latents, ranks, self.codes.bits, fitted=self.codes.fitted)

    def _keep(self, start: int, stop: int) -> None:
        self._stored = tuple(map_tensors(stored.keep(start, stop), owned) for stored in self._stored)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._stored = map_tensors(self._stored, lambda x: owned(change(x)))

    def _clear(self) -> None:
        self._stored = ()
