"""One layer of a compressed cache: an exact tail behind a compressed prefix that all layers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvslim.caching.handles import LayerView, Reader
from kvslim.caching.prefix import Prefix


class CompressedLayer(CacheLayerMixin):
    """One layer: an exact tail ``(batch, kv_heads, tokens, head_dim)`` behind a prefix that all layers share."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, slot: int) -> None:
        super().__init__()
        self.slot = slot
        self.prefix: Prefix | None = None
        self.reader: Reader | None = None
        """Who attends to this layer, if known; decides whether :meth:`update` gives handles or dense tensors."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states.new_zeros(*key_states.shape[:2], 0, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], 0, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append to the tail; return keys and values of everything cached.

        Behind a prefix these are handles for attention that reads them, and for everything else dense tensors,
        rebuilt for this call only. A compiled model gets dense tensors: it cannot trace handles.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat((self.keys, key_states), dim=-2)
        self.values = torch.cat((self.values, value_states), dim=-2)
        handles = self.reader is None or self.reader.reads_handles
        if self.prefix is None or not handles or torch.compiler.is_compiling():
            return self.dense()
        return LayerView(self.prefix, self.slot, (self.keys, self.values)).handles()

    def dense(self) -> tuple[Tensor, Tensor]:
        """All cached keys and values, rebuilt: ``(batch, kv_heads, seq_length, head_dim)`` each."""
        if self.prefix is None:
            return self.keys, self.values
        dense: tuple[Tensor, Tensor] = LayerView(self.prefix, self.slot, (self.keys, self.values)).rebuild()
        return dense

    def clear_tail(self, tokens: int | None = None) -> None:
        """Drop the oldest ``tokens`` tokens of the tail, all by default."""
        start = self.keys.shape[-2] if tokens is None else tokens
        self.keys, self.values = self.keys[:, :, start:].clone(), self.values[:, :, start:].clone()

    def get_seq_length(self) -> int:
        tail = self.keys.shape[-2] if self.is_initialized else 0
        return tail + (self.prefix.columns if self.prefix is not None else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.keys.shape[0] if self.is_initialized else -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of the tail; the cache crops the prefix."""
        if tokens_to_remove and self.is_initialized:
            keep = max(0, self.keys.shape[-2] - abs(tokens_to_remove))
            self.keys, self.values = self.keys[:, :, :keep].clone(), self.values[:, :, :keep].clone()

    def reset(self) -> None:
        self.prefix = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, dim=0)
            self.values = self.values.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys = self.keys[indices.to(self.keys.device)]
            self.values = self.values[indices.to(self.values.device)]
