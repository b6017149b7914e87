"""What the run-time baselines share: every cell is coded at once, by settings that nothing has to be planned for."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.attending.families import rope_of, text_config
from kvslim.attending.layout import compressible_layers
from kvslim.caching.block import Block
from kvslim.caching.cells import Cell, Coded, measured, take_off
from kvslim.caching.compressed import CompressedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BaselineCache(CompressedCache):
    """A cache that codes each cell by fixed settings; no token is exact unless asked for.

    Args:
        model: a transformers model of a supported family.
        sinks: first tokens kept exact.
        window: last prefilled tokens kept exact.
        seal: so many later tokens are coded together; None keeps them exact.
        pre_rope: code keys before rotation.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches: padding is then not stored.

    Raises:
        ConfigError: a setting is out of range.
        UnsupportedModelError: no row for this model, or with ``pre_rope`` its rotation changes with the length.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sinks: int = 0,
        window: int = 0,
        seal: int | None = None,
        pre_rope: bool = False,
        attention_mask: Tensor | None = None,
    ) -> None:
        super().__init__(
            *compressible_layers(model),
            sinks=sinks,
            window=window,
            seal=seal,
            rope=rope_of(model) if pre_rope else None,
            attention_mask=attention_mask,
        )
        self.read_by(text_config(model))

    @abstractmethod
    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        """Code ``(layers · kv_heads, tokens, head_dim)`` float32; the block, and how it is coded in words."""

    def _plan(self, cells: list[Cell]) -> dict[Cell, Any]:
        """There is nothing to choose."""
        return dict.fromkeys(cells)

    def _encode_cell(self, cell: Cell, raw: Tensor, plan: Any) -> Coded:
        x = take_off(raw, cell, self.rope).to(torch.float32)
        return measured(cell, x, *self._block(x, cell, plan))
