"""Everything that a run-time cache holds, taken out of it and put back: what a session on disk has to carry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvslim.caching.compressing import CompressingCache
from kvslim.caching.prefix import Prefix
from kvslim.caching.report import CellReport
from kvslim.errors import CacheStateError


@dataclass(frozen=True)
class SlidingState:
    """One sliding-window layer.

    Attributes:
        keys, values: ``(batch, kv_heads, held, head_dim)``, the last tokens that the layer holds.
        seen: tokens that the layer was given in all.
        record_past: it keeps tokens beyond its window until the next crop.
    """

    keys: Tensor
    values: Tensor
    seen: int
    record_past: bool


@dataclass(frozen=True)
class Snapshot:
    """The state of a cache. Tensors are those of the cache, not copies.

    Attributes:
        prefix: the compressed prefix, or None while nothing is compressed.
        reports: one entry per cell of the prefix.
        tail: per compressed layer exact keys and values ``(batch, kv_heads, tokens, head_dim)`` behind the prefix.
        sliding: the sliding-window layers in model order.
        attention_mask: ``(batch, columns)`` of a prompt that is not compressed yet, or None.
        note: what stays exact and why.
        decoding: the prompt has ended; later tokens do not make the cache compress it.
        rolled_back: the cache was cropped (assisted decoding).
    """

    prefix: Prefix | None
    reports: tuple[CellReport, ...]
    tail: tuple[tuple[Tensor, Tensor], ...]
    sliding: tuple[SlidingState, ...]
    attention_mask: Tensor | None
    note: str
    decoding: bool
    rolled_back: bool

    @property
    def dtype(self) -> torch.dtype:
        return self.tail[0][0].dtype

    @property
    def batch(self) -> int:
        return int(self.tail[0][0].shape[0])

    @property
    def columns(self) -> int:
        """Positions cached, padding included."""
        return int(self.tail[0][0].shape[2]) + (self.prefix.columns if self.prefix is not None else 0)


def take(cache: CompressingCache) -> Snapshot:
    """The state of ``cache``, whole and between two forward passes.

    Raises:
        CacheStateError: nothing is cached, or a forward pass is under way.
    """
    layers = cache.compressible
    if not all(layer.is_initialized for layer in layers) or not layers[0].get_seq_length():
        raise CacheStateError("Nothing is cached yet. Run the prefill first.")
    sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    lengths = {layer.get_seq_length() for layer in (*layers, *sliding)}
    if len(lengths) > 1 or cache._arriving is not None:
        raise CacheStateError("The layers hold different lengths: wait until the forward pass has ended.")
    return Snapshot(
        prefix=cache.prefix,
        reports=tuple(cache.cells),
        tail=tuple((layer.keys, layer.values) for layer in layers),
        sliding=tuple(
            SlidingState(layer.keys, layer.values, int(layer.cumulative_length), bool(layer.record_past))
            for layer in sliding
        ),
        attention_mask=cache.attention_mask,
        note=cache.note,
        decoding=cache._decoding,
        rolled_back=cache._rolled_back,
    )


def restore(cache: CompressingCache, state: Snapshot) -> None:
    """Put ``state`` into a new cache of the same model and settings. The tensors are kept, not copied."""
    for layer, (keys, values) in zip(cache.compressible, state.tail, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    sliding = [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    for layer, held in zip(sliding, state.sliding, strict=True):
        layer.lazy_initialization(held.keys, held.values)
        layer.keys, layer.values = held.keys, held.values
        layer.cumulative_length, layer.record_past = held.seen, held.record_past
    cache.cells, cache.note, cache.attention_mask = list(state.reports), state.note, state.attention_mask
    cache._decoding, cache._rolled_back = state.decoding, state.rolled_back
    cache._share(state.prefix)


def crop_to(cache: CompressingCache, columns: int) -> None:
    """Keep the first ``columns`` positions, for a prompt that goes another way from there."""
    if (surplus := cache.get_seq_length(cache._model_layers()[0]) - columns) > 0:
        cache.crop(-surplus)
        cache._rolled_back = False  # these were no candidates of assisted decoding


def layer_groups(cache: CompressingCache) -> list[tuple[int, ...]]:
    """Slots of the layers that are coded together."""
    return cache._groups()
