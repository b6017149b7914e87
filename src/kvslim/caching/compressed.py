"""The transformers cache around a compressed prefix: fill exactly, compress once, append exactly.

While a prompt is prefilled, in one piece or in chunks, the layers keep what they are given.
:meth:`CompressedCache.compress` turns all of it into a :class:`~kvslim.caching.prefix.Prefix`; it happens by itself
when the first single token after a prefill arrives. New tokens go to an exact tail. Attention sees dense keys and
values that are rebuilt one layer at a time and not kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvslim.caching.block import Block, iter_tensors, storage_bytes
from kvslim.caching.layer import CompressedLayer
from kvslim.caching.prefix import CompressedRow, EmptyBlock, PlacedBlock, Prefix
from kvslim.caching.report import CacheReport, CellReport
from kvslim.errors import CacheStateError, ConfigError, NonFiniteError
from kvslim.types import KVShape, Rope

KINDS = ("keys", "values")
_UNTOUCHED = "nothing compressed yet: the prefill is still exact"
_VERIFIED_AT_ONCE = 32  # candidate tokens of assisted decoding and prompt lookup stay below this


@dataclass(frozen=True)
class Middle:
    """The tokens of one batch row that get compressed: columns ``start`` to ``stop``, the row begins at ``first``."""

    row: int
    first: int
    start: int
    stop: int
    end: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def row_tokens(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Cell:
    """What is encoded together: the keys or values of some layers (slots), for one row's middle tokens."""

    middle: Middle
    layers: tuple[int, ...]
    kind: int  # index into KINDS


class CompressedCache(Cache):
    """Base of the run-time caches. Subclasses say how rows are encoded; this class keeps, places and reports them.

    Args:
        shape: layers, KV heads and head dim of the layers to compress.
        layer_slots: per model layer its slot among the compressed layers, or the sliding window of a layer that stays
            exact, as ``(slot, None)`` or ``(None, window)``.
        sinks: first tokens kept exact.
        window: last prefilled tokens kept exact.
        rope: rotation to take off the middle keys before they are encoded (pre-RoPE), or None.
        attention_mask: ``(batch, columns)`` of the prompt, 1 for real tokens; padding is then neither compressed nor
            stored. Without it padding columns count as tokens.
    """

    def __init__(
        self,
        shape: KVShape,
        layer_slots: Sequence[tuple[int | None, int | None]],
        *,
        sinks: int,
        window: int,
        rope: Rope | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        if sinks < 0 or window < 0:
            raise ConfigError(f"sinks and window are token counts ≥ 0, not {sinks} and {window}.")
        layers = [
            CompressedLayer(slot) if slot is not None else DynamicSlidingWindowLayer(sliding or 0)
            for slot, sliding in layer_slots
        ]
        super().__init__(layers=layers)
        self.shape = shape
        self.n_sinks = sinks
        self.n_window = window
        self.rope = rope
        self.attention_mask = attention_mask
        self.prefix: Prefix | None = None
        self.cells: list[CellReport] = []
        self.note = _UNTOUCHED
        self._decoding = self._rolled_back = False

    # ---- what subclasses provide -------------------------------------------------------------------------------

    @abstractmethod
    def _encode(self, middles: list[Middle]) -> list[list[tuple[Cell, Block, str]]]:
        """Encode the middle of every row: per row its cells with their block and the plan in words.

        Called with every layer still exact; must leave the layers alone, so that a failure changes nothing.
        """

    def _cell_tensor(self, cell: Cell) -> Tensor:
        """``(layers · kv_heads, tokens, head_dim)`` float32 of a cell; keys un-rotated if the cache has a ``rope``.

        The rotation goes by a key's place in its row. Places and true positions differ by a constant per row, which
        turns all keys of a head alike and changes no spectrum; and what is taken off here is put back exactly.
        """
        middle, chosen = cell.middle, self.compressible
        parts = [(chosen[slot].keys, chosen[slot].values)[cell.kind] for slot in cell.layers]
        x = torch.cat([part[middle.row, :, middle.start : middle.stop] for part in parts]).to(torch.float32)
        if cell.kind == 0 and self.rope is not None:
            places = torch.arange(middle.start - middle.first, middle.stop - middle.first, device=x.device)
            x = self.rope.rotate(x, places, inverse=True)
        return x

    # ---- filling and compressing -------------------------------------------------------------------------------

    @property
    def compressible(self) -> list[CompressedLayer]:
        """The layers that get compressed, by slot."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to layer ``layer_idx``. The first token after a prefill compresses the prefill first."""
        if self.prefix is None and layer_idx == self._model_layer(0) and self.get_seq_length(layer_idx) > 0:
            self._before_append(key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]

    def _before_append(self, new_tokens: int) -> None:
        """Compress if decoding starts: one token arrives, or after a rollback (assisted decoding) a few of them."""
        if new_tokens == 1 or (self._rolled_back and new_tokens <= _VERIFIED_AT_ONCE):
            if not self._decoding:
                self.compress()
        else:
            self._decoding = False  # more of the prompt, or another turn

    def _why_exact(self, tokens: int) -> str | None:
        """Why a row of ``tokens`` tokens stays exact, in words, or None if it is compressed."""
        if tokens <= self.n_sinks + self.n_window:
            return f"{tokens} tokens are not more than {self.n_sinks} sinks + {self.n_window} recent tokens"
        return None

    @torch.no_grad()
    def compress(self) -> None:
        """Compress everything cached so far. Rows too short to gain stay exact, and the report says so.

        A second call does nothing: tokens after the prefix stay in the exact tail. Equal rows (beams of one prompt) are
        encoded once and share their storage.

        Raises:
            CacheStateError: nothing is cached, or the layers hold different lengths or lie on several devices.
            NonFiniteError: a layer holds NaN or Inf; it is named, and the cache is left as it was.
            BudgetError: the budget is below the fixed cost; the cache is left as it was.
        """
        if self.prefix is not None:
            return
        columns = self._filled_columns()
        spans = self._spans(columns)
        reasons = [self._why_exact(end - start) for start, end in spans]
        self.note = "; ".join(f"row {row} stays exact: {why}" for row, why in enumerate(reasons) if why)
        if all(reasons):
            self._decoding = True
            return
        self._check_finite(spans)
        twins = [self._first_equal(row, spans) for row in range(len(spans))]
        middles = [self._middle(row, *spans[row], whole=bool(reasons[row])) for row in sorted(set(twins))]
        encoded = self._encode(middles)
        cells = [self._measure(*cell) for row in encoded for cell in row]
        rows = {middle.row: self._assemble(middle, row) for middle, row in zip(middles, encoded, strict=True)}
        self.cells, self.attention_mask, self._decoding = cells, None, True
        self._share(Prefix(tuple(rows[first] for first in twins), columns))
        for layer in self.layers:
            if isinstance(layer, CompressedLayer):
                layer.clear_tail()
            else:  # a sliding layer is a view that keeps the whole prefill alive
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()

    def _first_equal(self, row: int, spans: list[tuple[int, int]]) -> int:
        """The first row that holds the same tokens as ``row``, itself if none does."""
        span = slice(*spans[row])
        for other in range(row):
            if spans[other] == spans[row] and all(
                torch.equal(dense[other, :, span], dense[row, :, span])
                for layer in self.compressible
                for dense in (layer.keys, layer.values)
            ):
                return other
        return row

    def _filled_columns(self) -> int:
        lengths = {layer.get_seq_length() for layer in self.compressible}
        if lengths == {0}:
            raise CacheStateError("compress() was called on an empty cache. Run the prefill first.")
        if len(lengths) > 1:
            raise CacheStateError("The layers hold different lengths: compress() must not be called inside a forward.")
        devices = {str(layer.keys.device) for layer in self.compressible}
        if len(devices) > 1:
            raise CacheStateError(
                f"The layers lie on several devices ({', '.join(sorted(devices))}), which this cache does not support. "
                "Load the model on one device."
            )
        return lengths.pop()

    def _spans(self, columns: int) -> list[tuple[int, int]]:
        """Column range of the real tokens of every row."""
        batch = self.compressible[0].batch_size
        if self.attention_mask is None:
            return [(0, columns)] * batch
        mask = self.attention_mask.to("cpu").bool()
        if mask.dim() != 2 or batch % mask.shape[0] or mask.shape[1] > columns:
            raise CacheStateError(
                f"attention_mask of shape {tuple(mask.shape)} does not fit a cache of {batch} rows and {columns} "
                "columns. Pass the mask of the prompt that was prefilled."
            )
        mask = mask.repeat_interleave(batch // mask.shape[0], dim=0)
        mask = torch.nn.functional.pad(mask, (0, columns - mask.shape[1]), value=True)
        spans = []
        for index, row in enumerate(mask):
            real = row.nonzero().flatten()
            if not len(real):
                raise CacheStateError(f"attention_mask has no real token in row {index}.")
            spans.append((int(real[0]), int(real[-1]) + 1))
        return spans

    def _middle(self, row: int, first: int, end: int, *, whole: bool) -> Middle:
        """What of a row is compressed; nothing if the ``whole`` row stays exact."""
        start = end if whole else min(first + self.n_sinks, end)
        return Middle(row, first, start, max(start, end - self.n_window), end)

    def _assemble(self, middle: Middle, encoded: list[tuple[Cell, Block, str]]) -> CompressedRow:
        """Put one row together: exact sinks, its blocks by layer, exact window."""
        empty = PlacedBlock(EmptyBlock(self.shape.kv_heads, self.shape.head_dim), 0)
        placed = {(slot, kind): empty for slot in range(self.shape.layers) for kind in range(2)}
        for cell, block, _ in encoded:
            for place, slot in enumerate(cell.layers):
                placed[slot, cell.kind] = PlacedBlock(block, place)
        keys, values = ([placed[slot, kind] for slot in range(self.shape.layers)] for kind in range(2))
        return CompressedRow(
            middle.first,
            self._exact(middle.row, middle.first, middle.start),
            self._exact(middle.row, middle.stop, middle.end),
            tuple(keys),
            tuple(values),
            self.rope,
        )

    def _exact(self, row: int, start: int, stop: int) -> Tensor:
        layers = self.compressible
        return torch.stack(
            [
                torch.stack([(layer.keys, layer.values)[kind][row, :, start:stop] for layer in layers])
                for kind in range(2)
            ]
        )

    def _measure(self, cell: Cell, block: Block, plan: str) -> CellReport:
        x = self._cell_tensor(cell)
        decoded = torch.cat([block.decode(place) for place in range(len(cell.layers))]).to(x.device)
        energy = float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
        lost = float(torch.linalg.vector_norm(decoded - x, dtype=torch.float64)) ** 2
        return CellReport(
            row=cell.middle.row,
            layers=tuple(self._model_layer(slot) for slot in cell.layers),
            kind=KINDS[cell.kind],
            plan=plan,
            nbytes=storage_bytes(iter_tensors(block)),
            error=(lost / energy) ** 0.5 if energy else 0.0,
            energy=energy,
        )

    def _model_layer(self, slot: int) -> int:
        return int(self.layers.index(self.compressible[slot]))

    def _check_finite(self, spans: list[tuple[int, int]]) -> None:
        for index, layer in enumerate(self.layers):
            if isinstance(layer, CompressedLayer):
                for name, dense in (("keys", layer.keys), ("values", layer.values)):
                    for row, (start, end) in enumerate(spans):
                        if not torch.isfinite(dense[row, :, start:end]).all():
                            raise NonFiniteError(
                                f"The {name} of layer {index}, batch row {row}, hold NaN or Inf. Check the model's "
                                "dtype and input; nothing was compressed."
                            )

    # ---- what transformers asks of a cache ---------------------------------------------------------------------

    def _share(self, prefix: Prefix | None) -> None:
        self.prefix = prefix
        for layer in self.compressible:
            layer.prefix = prefix

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; a positive number is the length to keep (legacy form).

        Cropping into the compressed prefix slices its token factors and codes.
        """
        length = self.get_seq_length(self._model_layer(0))
        remove = max(0, length - tokens_to_remove) if tokens_to_remove > 0 else min(length, -tokens_to_remove)
        tail = self.compressible[0].keys.shape[-2] if self.is_initialized else 0
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
        if remove == length:
            self._start_anew()

    def _start_anew(self) -> None:
        self._share(None)
        self._decoding = self._rolled_back = False
        self.attention_mask = None
        self.cells = []
        self.note = _UNTOUCHED

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
            self._share(self.prefix.select(indices))

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
        first = self.compressible[0]
        return CacheReport(
            method=type(self).__name__,
            rows=max(0, first.batch_size),
            prefix_tokens=tokens,
            prefix_nbytes=self.prefix_nbytes,
            dense_nbytes=self.shape.dense_bytes(tokens),
            exact_dense_nbytes=2 * sum(t.numel() for t in self._exact_tensors()),
            tail_tokens=first.keys.shape[-2] if first.is_initialized else 0,
            tail_nbytes=self.tail_nbytes,
            note=self.note,
            cells=tuple(self.cells),
        )
