"""Per-token quantizers: asymmetric integers (Atom-like), and rotation with Lloyd-Max levels (TurboQuant-like)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvslim.baselines.base import BaselineCache
from kvslim.caching.block import Block
from kvslim.caching.cells import Cell
from kvslim.caching.token_codes import IntegerBlock, RotatedBlock
from kvslim.errors import ConfigError
from kvslim.quantizing import integer, rotated

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PerTokenCache(BaselineCache):
    """A cache whose every token is coded on its own at a fixed width, post-RoPE, no exact tokens unless asked for.

    Args:
        model: a transformers model of a supported family.
        bits: code width, 1 to 8.
        sinks: first tokens kept exact.
        window: last prefilled tokens kept exact.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bits: int,
        *,
        sinks: int = 0,
        window: int = 0,
        attention_mask: Tensor | None = None,
    ) -> None:
        if bits not in range(1, 9):
            raise ConfigError(f"bits is a width from 1 to 8, not {bits}.")
        super().__init__(model, sinks=sinks, window=window, attention_mask=attention_mask)
        self.bits = bits


class IntegerCache(PerTokenCache):
    """Asymmetric integers with a float16 step and minimum per token and head: int8, int4 as people use them."""

    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        return IntegerBlock(integer.encode(x, self.bits)), f"{self.bits} bit"


class RotatedCache(PerTokenCache):
    """Signed Hadamard rotation and Lloyd-Max levels with a float16 scale per token and head."""

    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        return RotatedBlock(rotated.encode(x, self.bits)), f"{self.bits} bit"
