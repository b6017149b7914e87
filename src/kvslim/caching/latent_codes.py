"""Latents of one layer as packed low-bit integers, one width and one range per group of channels (Palu, Sec. 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvslim.caching.latent_tokens import TokenwiseLatentLayer
from kvslim.config import is_count
from kvslim.errors import ConfigError
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

    def new_layer(self, layer: int, sliding_window: int | None) -> CodedLatentLayer:
        """An empty cache layer."""
        return CodedLatentLayer(self, layer, sliding_window)


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


class CodedLatentLayer(TokenwiseLatentLayer[GroupedCodes]):
    """Latents of one layer as integers, but for sinks and recent tokens.

    Args:
        codes: how the model's latents are coded.
        layer: which of its layers this is.
        sliding_window: the attention window in tokens, or ``None``.
    """

    def __init__(self, codes: LatentCodes, layer: int, sliding_window: int | None = None) -> None:
        self.codes = codes
        self.ranks = (codes.key_ranks[layer], codes.value_ranks[layer])
        super().__init__(codes.sinks, codes.window, (sum(self.ranks[0]), sum(self.ranks[1])), sliding_window)

    def _encode(self, latents: Tensor, kind: int) -> GroupedCodes:
        return grouped.encode(latents, self.ranks[kind], self.codes.bits, fitted=self.codes.fitted)

    def _decode(self, stored: GroupedCodes, kind: int) -> Tensor:
        return grouped.decode(stored, self.ranks[kind], self.codes.bits)

    def _join(self, first: GroupedCodes, second: GroupedCodes) -> GroupedCodes:
        return grouped.join(first, second)
