"""KIVI: integers per channel for keys, per token for values (Liu et al., 2024).

Keys, rotated, are coded per channel in groups of 32 tokens, values per token in groups of 32 channels; each group has a
float16 step and a float16 minimum, which is one bit per number. The paper keeps the last 128 tokens exact (its residual
length R) and codes later tokens 128 at a time: that is ``window=128, seal=128``. Here both are off by default, so that
measured bytes are those of the codes alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from kvslim.baselines.base import BaselineCache
from kvslim.caching.block import Block, CodedBlock, map_tensors
from kvslim.caching.cells import Cell
from kvslim.errors import ConfigError
from kvslim.quantizing import grouped, token_groups
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.grouped import GroupedCodes
from kvslim.quantizing.token_groups import TokenGroups

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP = 32
"""Numbers that share a step and a minimum, in the paper and here."""


@dataclass(frozen=True)
class ChannelBlock(CodedBlock):
    """Keys of one layer, coded per channel."""

    stored: TokenGroups

    @property
    def tokens(self) -> int:
        return self.stored.tokens

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        return token_groups.decode(self.stored, start, stop)

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, stored=self.stored.crop(tokens))


@dataclass(frozen=True)
class TokenBlock(CodedBlock):
    """Values of one layer, coded per token and group of channels.

    Attributes:
        stored: rows are ``(kv_heads, tokens)``.
        sizes: channels per group; the last one may be shorter.
        bits: code width.
        gain: a power of two that was taken off, so that steps and minima fit float16.
    """

    stored: GroupedCodes
    sizes: tuple[int, ...]
    bits: int
    gain: float

    @property
    def tokens(self) -> int:
        return int(self.stored.codes.shape[1])

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        part = map_tensors(self.stored, lambda kept: kept[:, start:stop])
        return grouped.decode(part, self.sizes, self.bits) * self.gain

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, stored=map_tensors(self.stored, lambda kept: kept[:, :tokens].clone()))


def encode_keys(x: Tensor, bits: int, group: int = GROUP) -> ChannelBlock:
    """Code ``x`` ``(kv_heads, tokens, head_dim)`` float32 per channel in groups of ``group`` tokens."""
    return ChannelBlock(token_groups.encode(x, bits, group))


def encode_values(x: Tensor, bits: int, group: int = GROUP) -> TokenBlock:
    """Code ``x`` ``(kv_heads, tokens, head_dim)`` float32 per token in groups of ``group`` channels."""
    gain = power_of_two_gain(x)
    sizes = tuple(min(group, x.shape[-1] - first) for first in range(0, x.shape[-1], group))
    return TokenBlock(grouped.encode(x / gain, sizes, bits, fitted=False), sizes, bits, gain)


class KiviCache(BaselineCache):
    """KIVI at ``bits`` bits; see the module.

    Args:
        model: a transformers model of a supported family.
        bits: code width, 2 to 8; the paper has 2 and 4.
        group: numbers that share a step and a minimum, at least 2.
        sinks: first tokens kept exact; the paper keeps none.
        window: last prefilled tokens kept exact; the paper keeps up to 128.
        seal: so many later tokens are coded together; None keeps them exact.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches.

    Raises:
        ConfigError: a setting is out of range.
        UnsupportedModelError: no row for this model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bits: int,
        *,
        group: int = GROUP,
        sinks: int = 0,
        window: int = 0,
        seal: int | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        if bits not in range(2, 9):
            raise ConfigError(f"bits is a width from 2 to 8, not {bits}.")
        if group < 2:
            raise ConfigError(f"group is a number of values ≥ 2 that share a step, not {group}.")
        super().__init__(model, sinks=sinks, window=window, seal=seal, attention_mask=attention_mask)
        self.bits = bits
        self.group = group

    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        if cell.kind == 0:
            return encode_keys(x, self.bits, self.group), f"{self.bits} bit per channel, {self.group} tokens"
        return encode_values(x, self.bits, self.group), f"{self.bits} bit per token, {self.group} channels"
