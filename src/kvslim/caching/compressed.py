"""The transformers cache around a compressed prefix: what ``generate`` and the user ask of it.

Filling and compressing are in :mod:`kvslim.caching.compressing`. Attention sees dense keys and values that are rebuilt
one layer at a time and not kept.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torch import Tensor

from kvslim.caching.block import storage_bytes
from kvslim.caching.cells import reports_after_crop, reports_after_select
from kvslim.caching.compressing import UNTOUCHED, CompressingCache
from kvslim.caching.report import CacheReport
from kvslim.errors import CacheStateError


class CompressedCache(CompressingCache):
    """Base of the run-time caches. Subclasses say how cells are planned and encoded.

    Arguments and hooks: see :class:`~kvslim.caching.compressing.CompressingCache`.
    """

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; a positive number is the length to keep (legacy form).

        Cropping into the compressed prefix slices its token factors and codes.
        """
        length = self.get_seq_length(self._model_layers()[0])
        remove = max(0, length - tokens_to_remove) if tokens_to_remove > 0 else min(length, -tokens_to_remove)
        tail = self.tail_tokens
        for layer in self.layers:
            full = getattr(layer, "sliding_window", None)
            if remove and full is not None and layer.get_seq_length() >= full and not layer.record_past:
                raise CacheStateError(
                    "A sliding-window layer has dropped tokens that a crop would need. Call "
                    "cache.activate_past_recording() before the tokens that may be cropped."
                )
        self._rolled_back = True
        super().crop(-remove)
        if self.prefix is not None and remove > tail:
            kept = self.prefix.columns - (remove - tail)
            self._share(self.prefix.crop(kept) if kept > 0 else None)
            self.cells = reports_after_crop(self.cells, self.prefix, self._model_layers())
        if remove == length:
            self._start_anew()

    def _start_anew(self) -> None:
        self._share(None)
        self._decoding = self._rolled_back = False
        self.attention_mask = None
        self._arriving = None
        self.cells = []
        self.note = UNTOUCHED

    def reset(self) -> None:
        """Forget everything, the attention mask included; the cache can be filled anew."""
        super().reset()
        for layer in self.layers:  # transformers zeroes a sliding layer but keeps its shape
            layer.keys = layer.values = None
            layer.is_initialized = False
        self._start_anew()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the batch rows ``indices`` (integers or a boolean mask)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist())
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(max(0, self.compressible[0].batch_size)) for _ in range(repeats)])
        super().batch_repeat_interleave(repeats)

    def _select(self, indices: list[int]) -> None:
        """Carry over what is kept per row beside the layers; called while these still have the old rows."""
        rows = self.compressible[0].batch_size
        if self.attention_mask is not None and rows > 0 and rows % self.attention_mask.shape[0] == 0:
            mask = self.attention_mask.repeat_interleave(rows // self.attention_mask.shape[0], dim=0)
            self.attention_mask = mask[indices]
        if self.prefix is not None:
            selected = self.prefix.select(indices)
            self.cells = reports_after_select(self.cells, self.prefix, selected)
            self._share(selected)

    # ---- places --------------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Self:
        """Move everything to ``device``, in place, and return the cache."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys.to(device), layer.values.to(device)
                layer.device = layer.keys.device
        if self.prefix is not None:
            self._share(self.prefix.map(lambda tensor: tensor.to(device)))
        return self

    def offload_prefix(self, device: torch.device | str = "cpu") -> Self:
        """Keep the compressed prefix on ``device``; each layer's part travels compressed when attention needs it.

        Sinks, window and tail are few tokens: the tail stays where the model computes. :meth:`to` brings all back.

        Raises:
            CacheStateError: nothing is compressed yet.
        """
        if self.prefix is None:
            raise CacheStateError("There is no compressed prefix to offload. Prefill and compress() first.")
        moved = self.prefix.map(lambda tensor: tensor.to(device))
        self._share(dataclasses.replace(moved, like=self.prefix.like))
        return self

    # ---- bytes ---------------------------------------------------------------------------------------------------

    @property
    def prefix_nbytes(self) -> int:
        """Bytes of the storages that the compressed prefix keeps: codes, scales, factors, sinks, window."""
        return self.prefix.nbytes if self.prefix is not None else 0

    @property
    def tail_nbytes(self) -> int:
        """Bytes of the exact tensors: tail, or everything while nothing is compressed, and sliding-window layers."""
        return storage_bytes(self._exact_tensors())

    def _exact_tensors(self) -> list[Tensor]:
        return [t for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        """Bytes of every storage this cache keeps alive."""
        return self.prefix_nbytes + self.tail_nbytes

    def report(self) -> CacheReport:
        """Measured bytes and errors of the cache as it is now. Cell errors are those found when it was compressed."""
        rows = {id(row): row for row in self.prefix.rows} if self.prefix is not None else {}
        tokens = sum(row.length for row in rows.values())
        return CacheReport(
            method=type(self).__name__,
            rows=max(0, self.compressible[0].batch_size),
            prefix_tokens=tokens,
            prefix_nbytes=self.prefix_nbytes,
            dense_nbytes=self.shape.dense_bytes(tokens),
            exact_dense_nbytes=2 * sum(t.numel() for t in self._exact_tensors()),
            tail_tokens=self.tail_tokens,
            tail_nbytes=self.tail_nbytes,
            note=self.note,
            cells=tuple(sorted(self.cells, key=lambda cell: (cell.row, cell.start, cell.layers, cell.kind))),
        )
