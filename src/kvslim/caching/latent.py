"""A transformers cache that holds Palu latents and nothing else.

Per layer and token it keeps the latent of the key (before rotation) and of the value, in the model's dtype or as packed
codes; keys are rebuilt and rotated when they are attended to, so the cache also keeps each token's position, once for
all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvslim.caching.block import storage_bytes
from kvslim.caching.latent_codes import LatentCodes
from kvslim.caching.latent_graded import GradedLatentCodes, GradedLatentLayer
from kvslim.caching.latent_layer import ExactLatentLayer, LatentLayer, tokens_to_crop
from kvslim.caching.latent_positions import TokenPositions
from kvslim.errors import CacheStateError, NonFiniteError
from kvslim.types import KVShape


@dataclass(frozen=True)
class LatentLayout:
    """What a latent cache must know of its model.

    Attributes:
        shape: the dense cache's shape, for comparison.
        windows: per layer the attention window in tokens, ``None`` where a layer sees everything.
        rotary: keys are rotated, so that the position of every token has to be kept.
        codes: how latents are coded; ``None`` keeps them in the model's dtype.
    """

    shape: KVShape
    windows: tuple[int | None, ...]
    rotary: bool = True
    codes: LatentCodes | GradedLatentCodes | None = None

    def new_layers(self) -> list[LatentLayer]:
        """An empty cache layer for each layer of the model."""
        codes = self.codes
        if codes is None:
            return [ExactLatentLayer(window) for window in self.windows]
        return [codes.new_layer(layer, window) for layer, window in enumerate(self.windows)]


@dataclass(frozen=True)
class LatentReport:
    """Measured state of a latent cache; bytes come from the storages that are alive.

    Attributes:
        rows: batch rows.
        tokens: cached tokens per row.
        nbytes: bytes of all latents (packed codes, steps, minima and exact tokens) and positions.
        dense_nbytes: bytes of the same tokens in an uncompressed bf16 cache.
        bits: code width, of graded latents their mean, or ``None`` where latents are kept in the model's dtype.
        outlying: tokens of graded latents, each layer's keys and values apart, that came out far worse than
            calibration predicts (:data:`kvslim.quantizing.gained.OUTLYING` times), those cropped since included.
    """

    rows: int
    tokens: int
    nbytes: int
    dense_nbytes: int
    bits: float | None = None
    outlying: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Measured bytes per token of a row, all layers together; 0 for an empty cache."""
        count = self.rows * self.tokens
        return self.nbytes / count if count else 0.0

    @property
    def ratio(self) -> float:
        """Uncompressed bf16 bytes over measured bytes."""
        return self.dense_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        width = "" if self.bits is None else f" at {self.bits:.3g} bits"
        return (
            f"latent cache{width}: {self.rows} x {self.tokens} tokens, "
            f"{self.nbytes} bytes measured ({self.bytes_per_token:.0f} per token), "
            f"{self.dense_nbytes} uncompressed in bf16, ratio {self.ratio:.2f}"
            f"{f', {self.outlying} outliers' if self.outlying else ''}"
        )


class LatentCache(Cache):  # type: ignore[misc,unused-ignore]
    """The cache of a Palu-compressed model; ``generate`` makes one by itself.

    Args:
        layout: the model's, as in ``model.palu_layout``.
        offloading: keep all layers but the working one on the CPU (CUDA only).
    """

    positions: TokenPositions
    layout: LatentLayout

    def __init__(self, layout: LatentLayout, offloading: bool = False) -> None:
        super().__init__(layers=layout.new_layers(), offloading=offloading)
        self.layout = layout
        self.positions = TokenPositions()

    @classmethod
    def adopt(cls, cache: Any, layout: LatentLayout) -> Self:
        """Return ``cache`` if it is a latent cache; turn an empty ``DynamicCache`` into one, in place.

        ``model(...)`` without a cache makes a ``DynamicCache`` before any layer can say what it needs.

        Raises:
            CacheStateError: it is another kind of cache, already holds uncompressed keys, or codes latents otherwise
                than this model.
        """
        if isinstance(cache, cls):
            if cache.layout.codes != layout.codes:
                raise CacheStateError(
                    "The cache codes latents with other bits, ranks or exact tokens than this model. A cache belongs "
                    "to the model that made it: leave it unset, or pass LatentCache(model.palu_layout)."
                )
            return cache
        if type(cache) is not DynamicCache or cache.get_seq_length() > 0:
            filled = "a filled" if type(cache) is DynamicCache else "a"
            raise CacheStateError(
                f"A Palu-compressed model keeps latents and cannot use {filled} {type(cache).__name__}. Leave the "
                f"cache and cache_implementation unset, or pass a LatentCache(model.palu_layout)."
            )
        recorded = any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.__class__ = cls
        cache.layers = layout.new_layers()
        cache.layer_class_to_replicate = None
        cache.layout, cache.positions = layout, TokenPositions()
        if recorded:
            cache.activate_past_recording()
        adopted: Self = cache
        return adopted

    def append(
        self, key_latents: Tensor, value_latents: Tensor, layer_idx: int, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add one layer's latents of ``n`` new tokens.

        Args:
            key_latents: ``(batch, n, key rank)``, before rotation.
            value_latents: ``(batch, n, value rank)``.
            layer_idx: the layer.
            position_ids: ``(batch or 1, n)`` token positions; ``None`` counts on from the tokens seen.

        Returns:
            Key latents, value latents and int32 positions ``(batch, t)`` of all tokens that the new ones may attend to;
            ``None`` instead of positions for a model that does not rotate its keys.

        Raises:
            CacheStateError: the latents do not fit the cached ones.
            NonFiniteError: latents of several tokens that are to be coded hold NaN or Inf.
        """
        batch, count = key_latents.shape[:2]
        if self.layout.codes is not None and count > 1:
            # A single token is not checked: that would wait for the GPU in every layer of every step. Its NaN and Inf
            # are kept as NaN, and show in the logits.
            for kind, latents in (("key", key_latents), ("value", value_latents)):
                if not bool(torch.isfinite(latents).all()):
                    raise NonFiniteError(f"The {kind} latents of layer {layer_idx} hold NaN or Inf: nothing to code.")
        start = self.layers[layer_idx].get_seq_length()
        if not self.layout.rotary:
            return (*super().update(key_latents, value_latents, layer_idx), None)
        if position_ids is None:
            position_ids = torch.arange(start, start + count, device=key_latents.device)[None]
        self.positions.append(start, position_ids.expand(batch, count))
        keys, values = super().update(key_latents, value_latents, layer_idx)
        positions = self.positions.last(keys.shape[1])
        if layer_idx == len(self.layers) - 1:
            self._trim_positions()
        return keys, values, positions

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse keys and values from a model that is not compressed."""
        raise CacheStateError(
            "A LatentCache serves only the Palu-compressed model that made it. Use a DynamicCache with other models."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the storages of all latents and positions, each storage counted once."""
        positions = [] if self.positions.ids is None else [self.positions.ids]
        return storage_bytes([*positions, *(tensor for layer in self.layers for tensor in layer.tensors())])

    def report(self) -> LatentReport:
        """Measured bytes beside those of the same tokens uncompressed."""
        rows = next((int(tensor.shape[0]) for layer in self.layers for tensor in layer.tensors()), 0)
        one = KVShape(1, self.layout.shape.kv_heads, self.layout.shape.head_dim)
        dense = sum(one.dense_bytes(rows * layer.held) for layer in self.layers)
        bits = None if self.layout.codes is None else self.layout.codes.bits
        graded = [layer for layer in self.layers if isinstance(layer, GradedLatentLayer)]
        outlying = sum(int(layer.outlying) for layer in graded if layer.outlying is not None)
        return LatentReport(rows, self.get_seq_length(), self.nbytes, dense, bits, outlying)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive number is the length to keep; 0 removes none.

        Raises:
            CacheStateError: a sliding-window layer cannot go back; nothing is changed then.
        """
        removed = tokens_to_crop(tokens_to_remove, self.get_seq_length())
        for layer in self.layers:
            layer.check_crop(removed)
        super().crop(-removed)
        self.positions.drop(removed)
        self._trim_positions()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.positions = TokenPositions()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``."""
        super().reorder_cache(beam_idx)
        if self.positions.ids is not None:
            self.positions.ids = self.positions.ids.index_select(0, beam_idx.to(self.positions.ids.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self.positions.ids is not None:
            self.positions.ids = self.positions.ids.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (numbers or a boolean mask)."""
        super().batch_select_indices(indices)
        if self.positions.ids is not None:
            self.positions.ids = self.positions.ids[indices.to(self.positions.ids.device)]

    def _trim_positions(self) -> None:
        self.positions.trim(max(layer.held for layer in self.layers))


def layout_of(
    shape: KVShape,
    windows: Sequence[int | None],
    codes: LatentCodes | GradedLatentCodes | None = None,
    *,
    rotary: bool = True,
) -> LatentLayout:
    """Build a :class:`LatentLayout`, one window per layer.

    Raises:
        CacheStateError: the windows or the coded ranks are for another number of layers.
    """
    if len(windows) != shape.layers:
        raise CacheStateError(f"{shape.layers} layers need as many windows, not {len(windows)}.")
    if codes is not None and len(codes.key_ranks) != shape.layers:
        raise CacheStateError(f"{shape.layers} layers need as many ranks, not {len(codes.key_ranks)}.")
    return LatentLayout(shape=shape, windows=tuple(windows), rotary=rotary, codes=codes)
