"""KVQuant-like: non-uniform levels, keys per channel before rotation, values per token, outliers and a sink exact.

After Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization" (2024): keys
are coded pre-RoPE per channel, values per token over all KV heads of a layer, by levels of each layer (nuq), with 1 %
of each vector exact in sparse form (an index and a float16), and the first token exact. Two things differ, which is why
it is "like": levels and key ranges are found on the sequence itself instead of on calibration data, so nothing has to
be prepared, and they are charged to the sequence; and an outlier is far from the median of its vector, not beyond
calibrated thresholds, so that each vector has the same count and needs no row pointers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from kvslim.baselines.base import BaselineCache
from kvslim.caching.block import Block, CodedBlock
from kvslim.caching.cells import Cell
from kvslim.errors import ConfigError
from kvslim.quantizing import non_uniform
from kvslim.quantizing.non_uniform import NonUniformCodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class NonUniformBlock(CodedBlock):
    """Keys or values of one layer; the channels of all its KV heads lie side by side."""

    stored: NonUniformCodes
    kv_heads: int

    @property
    def tokens(self) -> int:
        return self.stored.tokens

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        rows = non_uniform.decode(self.stored, start, stop)
        return rows.view(-1, self.kv_heads, self.stored.channels // self.kv_heads).transpose(0, 1)

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, stored=self.stored.crop(tokens))


def encode(x: Tensor, bits: int, *, per_channel: bool, share: float) -> NonUniformBlock:
    """Code ``x`` ``(kv_heads, tokens, head_dim)`` float32; see :func:`kvslim.quantizing.non_uniform.encode`."""
    flat = x.transpose(0, 1).flatten(1)
    return NonUniformBlock(non_uniform.encode(flat, bits, per_channel=per_channel, share=share), x.shape[0])


class KvquantCache(BaselineCache):
    """KVQuant-like codes at ``bits`` bits; see the module.

    Args:
        model: a transformers model of a supported family.
        bits: code width, 2 to 8; the paper has 2, 3 and 4.
        outliers: share of each vector's numbers that is kept exact, 0 to 0.5; the paper has 0.01.
        sinks: first tokens kept exact; the paper keeps one.
        window: last prefilled tokens kept exact.
        seal: so many later tokens are coded together; None keeps them exact.
        pre_rope: code keys before rotation, as the paper does.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches.

    Raises:
        ConfigError: a setting is out of range.
        UnsupportedModelError: no row for this model, or with ``pre_rope`` its rotation changes with the length.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bits: int,
        *,
        outliers: float = 0.01,
        sinks: int = 1,
        window: int = 0,
        seal: int | None = None,
        pre_rope: bool = True,
        attention_mask: Tensor | None = None,
    ) -> None:
        if bits not in range(2, 9):
            raise ConfigError(f"bits is a width from 2 to 8, not {bits}.")
        if not 0 <= outliers <= 0.5:
            raise ConfigError(f"outliers is the share of numbers kept exact, 0 to 0.5, not {outliers}.")
        super().__init__(
            model, sinks=sinks, window=window, seal=seal, pre_rope=pre_rope, attention_mask=attention_mask
        )  # fmt: skip
        self.bits = bits
        self.outliers = outliers

    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        per_channel = cell.kind == 0
        block = encode(x, self.bits, per_channel=per_channel, share=self.outliers)
        kept = block.stored.places.shape[1]
        return block, f"{self.bits} bit nuq per {'channel' if per_channel else 'token'}, {kept} exact each"
