"""Filling, compressing and sealing: how exact keys and values become a compressed prefix.

While a prompt is prefilled, in one piece or in chunks, the layers keep what they are given. Then either everything is
planned at once and coded layer group by layer group (:meth:`CompressingCache.compress`), or, when a price is known
from an earlier prompt, each group is coded as it arrives. Tokens that come later stay exact until there are enough of
them to be sealed as another stretch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from kvslim.caching.build import PrefixBuild
from kvslim.caching.cells import Cell, Coded, Span, coded_stretch, gather, reports_of, row_extents
from kvslim.caching.handles import Reader
from kvslim.caching.layer import CompressedLayer
from kvslim.caching.prefix import Prefix
from kvslim.caching.report import CellReport
from kvslim.errors import BudgetError, CacheStateError, ConfigError, NonFiniteError
from kvslim.types import KVShape, Rope

_HALF_RANGE = 3e4
UNTOUCHED = "nothing compressed yet: the prefill is still exact"
VERIFIED_AT_ONCE = 32
"""Candidate tokens of assisted decoding and prompt lookup stay below this; so many recent tokens are never sealed."""


class CompressingCache(Cache):
    """The part of a run-time cache that compresses. Subclasses plan and encode cells.

    Args:
        shape: layers, KV heads and head dim of the layers to compress.
        layer_slots: per model layer its slot among the compressed layers, or the sliding window of a layer that stays
            exact, as ``(slot, None)`` or ``(None, window)``.
        sinks: first tokens kept exact.
        window: last prefilled tokens kept exact.
        seal: tokens after the prefill that are compressed together, or None to keep them exact.
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
        seal: int | None = None,
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
        self.n_seal = seal
        self.rope = rope
        self.attention_mask = attention_mask
        self.prefix: Prefix | None = None
        self.cells: list[CellReport] = []
        self.note = UNTOUCHED
        self._decoding = self._rolled_back = False
        self._arriving: PrefixBuild | None = None
        self._fits_half = False  # whether what was last looked at is far inside the range of float16

    # ---- what subclasses provide -------------------------------------------------------------------------------

    @abstractmethod
    def _plan(self, cells: list[Cell]) -> dict[Cell, Hashable]:
        """Choose a plan for every cell of a prefill, before any is coded; may refuse."""

    def _plan_seal(self, cells: list[Cell]) -> dict[Cell, Hashable]:
        """Choose a plan for every cell of later tokens. The rows of ``self.prefix`` are what lies before them."""
        return self._plan(cells)

    def _plan_arrived(self, cells: list[Cell], group: int) -> dict[Cell, Hashable]:
        """Choose a plan for the cells of one layer group while the later groups are still to come."""
        raise NotImplementedError

    @abstractmethod
    def _encode_cell(self, cell: Cell, raw: Tensor, plan: Any) -> Coded:
        """Carry a plan out on the cell ``raw`` as the model made it."""

    def _groups(self) -> list[tuple[int, ...]]:
        """Slots of the layers that are coded together."""
        return [(slot,) for slot in range(self.shape.layers)]

    def _why_exact(self, tokens: int) -> str | None:
        """Why a row of ``tokens`` tokens stays exact, in words, or None if it is compressed."""
        if tokens <= self.n_sinks + self.n_window:
            return f"{tokens} tokens are not more than {self.n_sinks} sinks + {self.n_window} recent tokens"
        return None

    def _compresses_on_arrival(self) -> bool:
        """Whether each layer group is coded as soon as it arrives."""
        return False

    # ---- filling -----------------------------------------------------------------------------------------------

    @property
    def compressible(self) -> list[CompressedLayer]:
        """The layers that get compressed, by slot."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def tail_tokens(self) -> int:
        """Exact tokens behind the prefix."""
        first = self.compressible[0]
        return int(first.keys.shape[-2]) if first.is_initialized else 0

    def read_by(self, config: Any) -> None:
        """Say whose attention reads this cache: the live configuration of the model's decoder."""
        for layer in self.compressible:
            layer.reader = Reader(config)

    def _model_layers(self) -> list[int]:
        return [index for index, layer in enumerate(self.layers) if isinstance(layer, CompressedLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to layer ``layer_idx``. The first token after a prefill compresses the prefill first."""
        layer = self.layers[layer_idx]
        if isinstance(layer, CompressedLayer) and layer.slot == 0:
            self._before_append(key_states)
        seen: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._arriving is not None and isinstance(layer, CompressedLayer):
            self._arrived(self._arriving, layer.slot)
        return seen

    @torch.no_grad()
    def _before_append(self, keys: Tensor) -> None:
        """Compress if decoding starts: one token arrives, or after a rollback (assisted decoding) a few of them."""
        if self._arriving is not None:
            self.reset()
            raise CacheStateError("A prefill ended in the middle of its layers. The cache was emptied; prefill again.")
        tokens, filled = keys.shape[-2], self.get_seq_length(self._model_layers()[0])
        if self.prefix is not None:
            self._trim_sliding()
            self._seal_when_full()
        elif filled == 0:
            if self._compresses_on_arrival() and tokens > VERIFIED_AT_ONCE:
                self._arriving = self._begin(keys.shape[0], tokens)
        elif tokens == 1 or (self._rolled_back and tokens <= VERIFIED_AT_ONCE):
            if not self._decoding:
                self.compress()
        else:
            self._decoding = False  # more of the prompt, or another turn

    # ---- compressing a prefill -----------------------------------------------------------------------------------

    @torch.no_grad()
    def compress(self) -> None:
        """Compress everything cached so far. Rows too short to gain stay exact, and the report says so.

        Layer group by layer group, so that at most one group is in memory twice. A second call seals the tokens that
        came since. Equal rows (beams of one prompt) are encoded once and share their storage.

        Raises:
            CacheStateError: nothing is cached, or the layers hold different lengths or lie on several devices.
            NonFiniteError: a layer holds NaN or Inf; it is named, and the cache is left as it was.
            BudgetError: the budget is below the fixed cost; the cache is left as it was.
        """
        if self.prefix is not None:
            if self.tail_tokens:
                self.seal()
            return
        columns = self._filled_columns()
        build = self._begin(self.compressible[0].batch_size, columns)
        if build is None:
            self._decoding = True
            return
        build.twins = [self._first_equal(row, build.extents) for row in range(len(build.extents))]
        self._check_finite(self.compressible, build.extents)
        plans = self._plan([cell for group in self._groups() for cell in build.cells(group)])
        try:
            for group in self._groups():
                self._build_group(build, group, plans)
        except BaseException:
            self.reset()  # some layers are gone already; a half-filled cache must not be used
            raise
        self._finish(build)

    def _begin(self, batch: int, columns: int) -> PrefixBuild | None:
        """Split every row into sinks, middle and window; None if all rows stay exact."""
        extents = row_extents(self.attention_mask, batch, columns)
        reasons = [self._why_exact(end - start) for start, end in extents]
        self.note = "; ".join(f"row {row} stays exact: {why}" for row, why in enumerate(reasons) if why)
        if all(reasons):
            return None
        return PrefixBuild(extents, [bool(why) for why in reasons], self.n_sinks, self.n_window, columns)

    def _build_group(self, build: PrefixBuild, group: tuple[int, ...], plans: dict[Cell, Hashable]) -> None:
        """Code one layer group of all rows and drop its dense tensors."""
        for cell in build.cells(group):
            build.add(self._encode_cell(cell, gather(self.compressible, cell), plans[cell]))
        for slot in group:
            build.keep_exact(self.compressible[slot])
            self.compressible[slot].clear_tail()

    def _finish(self, build: PrefixBuild) -> None:
        first = self.compressible[0]
        rows = build.rows(self.shape, self.rope)
        self.cells = reports_of(build.coded, self._model_layers())
        self.attention_mask, self._decoding, self._arriving = None, True, None
        self._share(Prefix(rows, build.columns, first.keys[0, :, :0].clone()))
        self._trim_sliding()

    def _arrived(self, build: PrefixBuild, slot: int) -> None:
        """One more layer is there: code its group if it is complete, and finish after the last one."""
        groups = self._groups()
        index = next(index for index, group in enumerate(groups) if slot in group)
        group = groups[index]
        if slot != group[-1]:
            return
        try:
            with torch.no_grad():
                self._check_finite([self.compressible[s] for s in group], build.extents)
                build.part_twins(lambda row: self._first_equal(row, build.extents, group), first=index == 0)
                self._build_group(build, group, self._plan_arrived(build.cells(group), index))
                if index == len(groups) - 1:
                    self._finish(build)
        except BaseException:
            self.reset()  # earlier layers are gone already; a half-filled cache must not be used
            raise

    # ---- sealing later tokens ------------------------------------------------------------------------------------

    def _seal_when_full(self) -> None:
        spare = self.tail_tokens - max(VERIFIED_AT_ONCE, self.n_window)
        if self.n_seal and spare >= self.n_seal:
            try:
                self.seal(spare - spare % self.n_seal)
            except BudgetError as error:
                self.note = f"later tokens stay exact: {error}"

    @torch.no_grad()
    def seal(self, tokens: int | None = None) -> None:
        """Compress the oldest ``tokens`` tokens of the exact tail (all by default) into one more stretch.

        Raises:
            CacheStateError: nothing is compressed yet, or the tail is shorter.
            NonFiniteError: a layer holds NaN or Inf; it is named, and the cache is left as it was.
            BudgetError: so few tokens do not fit into what the ratio allows; the cache is left as it was.
        """
        tokens = self.tail_tokens if tokens is None else tokens
        if self.prefix is None or not 0 < tokens <= self.tail_tokens:
            raise CacheStateError(
                f"There are {self.tail_tokens} exact tokens behind a prefix; {tokens} cannot be sealed."
            )
        prefix, layers = self.prefix, self.compressible
        batch = len(prefix.rows)
        self._check_finite(layers, [(0, tokens)] * batch)
        twins = [
            next(
                o
                for o in range(row + 1)
                if prefix.rows[o] is prefix.rows[row] and self._equal_rows(o, row, (0, tokens))
            )
            for row in range(batch)
        ]
        spans = {row: Span(row, 0, tokens, prefix.rows[row].length, tokens) for row in sorted(set(twins))}
        groups = self._groups()
        cells = [Cell(span, group, kind) for group in groups for span in spans.values() for kind in range(2)]
        plans = self._plan_seal(cells)
        coded: dict[int, list[Coded]] = {row: [] for row in spans}
        for cell in cells:
            coded[cell.span.row].append(self._encode_cell(cell, gather(layers, cell), plans[cell]))
        rows = {
            row: prefix.rows[row].append(coded_stretch(span, prefix.columns, coded[row], self.shape, self.rope))
            for row, span in spans.items()
        }
        self.cells += reports_of([one for row in coded.values() for one in row], self._model_layers())
        for layer in layers:
            layer.clear_tail(tokens)
        self._share(Prefix(tuple(rows[first] for first in twins), prefix.columns + tokens, prefix.like))

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _share(self, prefix: Prefix | None) -> None:
        self.prefix = prefix
        for layer in self.compressible:
            layer.prefix = prefix

    def _trim_sliding(self) -> None:
        """A sliding layer is a view that keeps the whole prefill alive; copy what it really holds."""
        for layer in self.layers:
            if not isinstance(layer, CompressedLayer) and layer.is_initialized:
                layer.keys, layer.values = (
                    x if x.untyped_storage().nbytes() == x.numel() * x.element_size() else x.clone()
                    for x in (layer.keys, layer.values)
                )

    def _equal_rows(self, one: int, two: int, span: tuple[int, int], group: Sequence[int] | None = None) -> bool:
        columns = slice(*span)
        layers = self.compressible if group is None else [self.compressible[slot] for slot in group]
        return one == two or all(
            torch.equal(dense[one, :, columns], dense[two, :, columns])
            for layer in layers
            for dense in (layer.keys, layer.values)
        )

    def _first_equal(self, row: int, extents: list[tuple[int, int]], group: Sequence[int] | None = None) -> int:
        """The first row that holds the same tokens as ``row``, itself if none does."""
        return next(
            other
            for other in range(row + 1)
            if extents[other] == extents[row] and self._equal_rows(other, row, extents[row], group)
        )

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

    def _check_finite(self, layers: list[CompressedLayer], extents: list[tuple[int, int]]) -> None:
        """Least and largest of everything, which NaN and Inf pass through; the device is waited for once."""
        places = [
            (layer, name, row)
            for layer in layers
            for name in ("keys", "values")
            for row in range(len(extents))
            if extents[row][1] > extents[row][0]
        ]
        bounds = [torch.aminmax(getattr(layer, name)[row, :, slice(*extents[row])]) for layer, name, row in places]
        found = torch.stack([torch.stack(pair) for pair in bounds]).double().tolist()
        self._fits_half = all(abs(bound) < _HALF_RANGE for pair in found for bound in pair)
        for (layer, name, row), pair in zip(places, found, strict=True):
            if not all(map(math.isfinite, pair)):
                raise NonFiniteError(
                    f"The {name} of layer {self._model_layers()[layer.slot]}, batch row {row}, hold NaN or Inf. Check "
                    "the model's dtype and input; nothing was compressed."
                )
