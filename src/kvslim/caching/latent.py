"""A transformers cache that holds Palu latents and nothing else.

Per layer and token it keeps the latent of the key (before rotation) and of the value; keys are rebuilt and rotated when
they are attended to, so the cache also keeps each token's position, once for all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from kvslim.caching.block import storage_bytes
from kvslim.errors import CacheStateError
from kvslim.types import KVShape


@dataclass(frozen=True)
class LatentLayout:
    """What a latent cache must know of its model.

    Attributes:
        shape: the dense cache's shape, for comparison.
        windows: per layer the attention window in tokens, ``None`` where a layer sees everything.
        rotary: keys are rotated, so that the position of every token has to be kept.
    """

    shape: KVShape
    windows: tuple[int | None, ...]
    rotary: bool = True


@dataclass(frozen=True)
class LatentReport:
    """Measured state of a latent cache; bytes come from the storages that are alive.

    Attributes:
        rows: batch rows.
        tokens: cached tokens per row.
        nbytes: bytes of all latents and positions.
        dense_nbytes: bytes of the same tokens in an uncompressed bf16 cache.
    """

    rows: int
    tokens: int
    nbytes: int
    dense_nbytes: int

    @property
    def ratio(self) -> float:
        """Uncompressed bf16 bytes over measured bytes."""
        return self.dense_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        return (
            f"latent cache: {self.rows} x {self.tokens} tokens, {self.nbytes} bytes measured, "
            f"{self.dense_nbytes} uncompressed in bf16, ratio {self.ratio:.2f}"
        )


class TokenPositions:
    """The position of every cached token, ``(batch, tokens)`` int32, shared by the layers.

    Attributes:
        ids: the last positions seen, or ``None``.
        seen: how many tokens were appended in all, trimmed ones included.
    """

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.seen = 0

    def append(self, start: int, ids: Tensor) -> None:
        """Add the positions of the tokens from ``start`` on; every layer may call it, the first one counts.

        Raises:
            CacheStateError: the layers disagree about how many tokens there are, or the batch size changed.
        """
        held = self.ids
        if held is not None and held.shape[0] != ids.shape[0]:
            raise CacheStateError(
                f"The cache holds {held.shape[0]} rows and the input has {ids.shape[0]}. Use batch_repeat_interleave "
                f"or batch_select_indices, or start a new cache."
            )
        if self.seen == start + ids.shape[1]:
            return
        if self.seen != start:
            raise CacheStateError("The layers of this cache hold different tokens. Start a new cache.")
        ids = ids.to(torch.int32)
        self.ids = ids.clone() if held is None else torch.cat([held, ids.to(held.device)], dim=1)
        self.seen += ids.shape[1]

    def last(self, count: int) -> Tensor:
        """The positions of the last ``count`` tokens."""
        if self.ids is None:
            raise CacheStateError("The cache is empty.")
        return self.ids[:, self.ids.shape[1] - count :]

    def drop(self, removed: int) -> None:
        """Forget the last ``removed`` tokens."""
        self.seen -= removed
        if self.ids is not None and removed:
            self.ids = self.ids[:, : max(self.ids.shape[1] - removed, 0)].clone()

    def trim(self, keep: int) -> None:
        """Keep only the last ``keep`` positions."""
        if self.ids is not None and self.ids.shape[1] > keep:
            self.ids = self.last(keep).clone()


class LatentLayer(CacheLayerMixin):  # type: ignore[misc,unused-ignore]  # transformers is not analysed in every set-up
    """Latents of one layer: ``keys`` and ``values`` are ``(batch, tokens, summed ranks)``, keys before rotation.

    A layer with a sliding window keeps the last ``window - 1`` tokens, all that the next query can see.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.seen = 0

    @property
    def held(self) -> int:
        """Tokens kept now, at most those seen."""
        return 0 if self.keys is None else int(self.keys.shape[1])

    def activate_past_recording(self) -> None:
        """Keep tokens that left the window until the next :meth:`crop`, so that it can bring them back."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; storage grows with the tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append latents of ``n`` tokens and return those that these tokens may attend to, themselves last.

        Raises:
            CacheStateError: the latents have another rank than the cached ones.
        """
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            keys, values = key_states, value_states
        else:
            for held, new in ((self.keys, key_states), (self.values, value_states)):
                if held.shape[-1] != new.shape[-1]:
                    raise CacheStateError(
                        f"The cache holds latents of rank {held.shape[-1]}, the model makes rank {new.shape[-1]}. "
                        f"A cache belongs to the model that filled it."
                    )
            keys = torch.cat([self.keys, key_states], dim=1)
            values = torch.cat([self.values, value_states], dim=1)
        self.seen += key_states.shape[1]
        visible = keys.shape[1]
        if self.sliding_window is not None:
            visible = min(visible, self.sliding_window - 1 + key_states.shape[1])
        self.keys, self.values = _owned(keys), _owned(values)
        if not self.record_past:
            self._shrink_to_window()
        return keys[:, keys.shape[1] - visible :], values[:, values.shape[1] - visible :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what ``query_length`` new tokens will see."""
        if self.sliding_window is None:
            return self.seen + query_length, 0
        past = min(self.seen, self.sliding_window - 1)
        return past + query_length, self.seen - past

    def get_seq_length(self) -> int:
        """Tokens seen, those that left the window included."""
        return self.seen

    def get_max_length(self) -> int:
        """The window, or -1 for no limit."""
        return -1 if self.sliding_window is None else self.sliding_window

    def offload(self) -> None:
        """Move the latents to the CPU."""
        self._map(lambda latents: latents.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the latents back to where they came from."""
        self._map(lambda latents: latents.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self.seen = 0

    def check_crop(self, removed: int) -> None:
        """Raise :class:`CacheStateError` if the last ``removed`` tokens cannot be taken back."""
        left_window = self.sliding_window is not None and self.seen >= self.sliding_window
        if removed and left_window and not self.record_past:
            raise CacheStateError(
                "A sliding-window layer has already dropped the tokens that cropping would bring back. Call "
                "cache.activate_past_recording() before the tokens that may be cropped."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive number is the length to keep; 0 removes none."""
        removed = tokens_to_crop(tokens_to_remove, self.seen)
        self.check_crop(removed)
        self.seen -= removed
        if removed:
            self._map(lambda latents: latents[:, : max(latents.shape[1] - removed, 0)])
        self._shrink_to_window()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``."""
        self._map(lambda latents: latents.index_select(0, beam_idx.to(latents.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self._map(lambda latents: latents.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (numbers or a boolean mask)."""
        self._map(lambda latents: latents[indices.to(latents.device)])

    def _shrink_to_window(self) -> None:
        window = self.sliding_window
        if window is not None and self.held > window - 1:
            self._map(lambda latents: latents[:, latents.shape[1] - (window - 1) :])

    def _map(self, change: Any) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _owned(change(self.keys)), _owned(change(self.values))


class LatentCache(Cache):  # type: ignore[misc,unused-ignore]
    """The cache of a Palu-compressed model; ``generate`` makes one by itself.

    Args:
        layout: the model's, as in ``model.palu_layout``.
        offloading: keep all layers but the working one on the CPU (CUDA only).
    """

    positions: TokenPositions
    layout: LatentLayout

    def __init__(self, layout: LatentLayout, offloading: bool = False) -> None:
        layers = [LatentLayer(window) for window in layout.windows]
        super().__init__(layers=layers, offloading=offloading)
        self.layout = layout
        self.positions = TokenPositions()

    @classmethod
    def adopt(cls, cache: Any, layout: LatentLayout) -> Self:
        """Return ``cache`` if it is a latent cache; turn an empty ``DynamicCache`` into one, in place.

        ``model(...)`` without a cache makes a ``DynamicCache`` before any layer can say what it needs.

        Raises:
            CacheStateError: it is another kind of cache, or already holds uncompressed keys.
        """
        if isinstance(cache, cls):
            return cache
        if type(cache) is not DynamicCache or cache.get_seq_length() > 0:
            filled = "a filled" if type(cache) is DynamicCache else "a"
            raise CacheStateError(
                f"A Palu-compressed model keeps latents and cannot use {filled} {type(cache).__name__}. Leave the "
                f"cache and cache_implementation unset, or pass a LatentCache(model.palu_layout)."
            )
        recorded = any(getattr(layer, "record_past", False) for layer in cache.layers)
        cache.__class__ = cls
        cache.layers = [LatentLayer(window) for window in layout.windows]
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
        """
        batch, count = key_latents.shape[:2]
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
        held: Iterable[Tensor | None] = [self.positions.ids, *(t for x in self.layers for t in (x.keys, x.values))]
        return storage_bytes(tensor for tensor in held if tensor is not None)

    def report(self) -> LatentReport:
        """Measured bytes beside those of the same tokens uncompressed."""
        rows = next((int(layer.keys.shape[0]) for layer in self.layers if layer.keys is not None), 0)
        one = KVShape(1, self.layout.shape.kv_heads, self.layout.shape.head_dim)
        dense = sum(one.dense_bytes(rows * layer.held) for layer in self.layers)
        return LatentReport(rows=rows, tokens=self.get_seq_length(), nbytes=self.nbytes, dense_nbytes=dense)

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


def tokens_to_crop(request: int, length: int) -> int:
    """How many tokens ``crop(request)`` removes from ``length``: negative removes, positive keeps, both at most all."""
    return min(-request, length) if request <= 0 else max(length - request, 0)


def layout_of(shape: KVShape, windows: Sequence[int | None], *, rotary: bool = True) -> LatentLayout:
    """Build a :class:`LatentLayout`, one window per layer."""
    if len(windows) != shape.layers:
        raise CacheStateError(f"{shape.layers} layers need as many windows, not {len(windows)}.")
    return LatentLayout(shape=shape, windows=tuple(windows), rotary=rotary)


def _owned(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a copy if it is a view that would keep a larger storage alive."""
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if exact else tensor.clone(memory_format=torch.contiguous_format)
