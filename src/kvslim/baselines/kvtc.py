"""KVTC-like: PCA calibrated once, groups and bits by dynamic programming ("KV Cache Transform Coding", NVIDIA, 2025).

Read top to bottom: what a group costs, how a budget is shared, the cache; what is stored is in
:mod:`kvslim.baselines.kvtc_block`.

    model + text → PCA per layer → [kept]; tokens → coefficients → contiguous groups → integers per token and group

Keys are taken un-rotated. The coefficients of one token, in falling order of deviation, are cut into contiguous groups.
Each group of each token has one uniform asymmetric quantizer over its full range: a float16 step and a float16 minimum.
Cuts and widths minimise the plain squared error of keys and values of all layers together under one budget of bytes.

Where this differs from the paper: the PCA is per layer over the KV heads side by side, the paper also joins layers; the
paper keeps the last 128 tokens exact, which is ``window=128`` here and off by default, so that bytes compare; cuts and
widths are found exactly per layer for every number of bytes, and layers share the budget by a Lagrangian. The paper's
last stage, lossless Deflate of the codes, is for storage: a cache that is read has to have its codes at fixed places.
:attr:`KvtcCache.deflated_nbytes` says what it would come to, and no other figure includes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvslim.allocating.lagrangian import allocate
from kvslim.allocating.partition import FloatArray, Partitions, Piece
from kvslim.attending.families import rope_of, text_config
from kvslim.attending.layout import compressible_layers
from kvslim.baselines.kvtc_block import RANGE_BYTES, KvtcBlock, KvtcLayout, PcaBasis, encode
from kvslim.caching.block import storage_bytes
from kvslim.caching.budgeted import BudgetedCache
from kvslim.caching.cells import Cell, Coded, measured, take_off
from kvslim.caching.prefix import CodedStretch
from kvslim.caching.report import stretch_header_bytes
from kvslim.calibrating.graded_stats import GradedStats
from kvslim.config import is_number
from kvslim.errors import BudgetError, ConfigError
from kvslim.quantizing import integer
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.packing import packed_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Channels that a group can have. The last group of a row can be shorter, and a row can be one group."""

WIDTHS = (0, 1, 2, 3, 4, 6, 8)
"""Code widths in bits; a group of zero bits is dropped and stores nothing."""

KVTC_SINKS = 4
_SAMPLE, _SEED = 128, 0


# ---- what a group costs ----------------------------------------------------------------------------------------------


def pieces_of(
    deviations: Tensor, sizes: Sequence[int] = GROUP_SIZES, widths: Sequence[int] = WIDTHS
) -> Iterator[Piece]:
    """Every group that a row can have, with its measured error and its bytes per token at each width.

    Args:
        deviations: ``(features,)`` of the coefficients.
        sizes: channels of a group, multiples of the least of them; groups begin at its multiples.
        widths: bits.
    """
    features = len(deviations)
    sample = _standard_sample(features) * deviations
    gain = power_of_two_gain(sample)
    for start in range(0, features, min(sizes)):
        stops = {min(start + size, features) for size in sizes} | ({features} if not start else set())
        for stop in sorted(stops):
            part = sample[:, start:stop]
            errors = [_measured_error(part, bits, gain) for bits in widths]
            costs = [packed_bytes(stop - start, bits) + RANGE_BYTES if bits else 0 for bits in widths]
            yield Piece(start, stop, np.array(errors), np.array(costs, dtype=np.int64))


@lru_cache(maxsize=8)
def _standard_sample(features: int) -> Tensor:
    """``(tokens, features)`` float32 Gaussian numbers; each column has mean 0 and deviation 1, to the last."""
    generator = torch.Generator().manual_seed(_SEED)
    sample = torch.randn(_SAMPLE, features, generator=generator, dtype=torch.float64)
    sample -= sample.mean(0)
    return (sample / sample.square().mean(0).sqrt()).float()


def _measured_error(x: Tensor, bits: int, gain: float) -> float:
    """Squared error per token of ``(tokens, size)`` as one group at ``bits``."""
    if not bits:
        return float(x.double().square().sum(1).mean())
    scaled = x / gain
    minima, steps = integer.full_range(scaled, bits)
    decoded = integer.codes_of(scaled, minima, steps, bits) * steps.float()[:, None] + minima.float()[:, None]
    return float((decoded * gain - x).double().square().sum(1).mean())


# ---- how a budget is shared ------------------------------------------------------------------------------------------


Place = tuple[int, int]
"""A layer slot, and keys (0) or values (1)."""


class KvtcTables:
    """What statistics give: a basis and all best cuts, per layer slot and kind.

    Raises:
        ConfigError: the statistics are no PCA of whole layers with un-rotated keys.
    """

    def __init__(self, stats: GradedStats) -> None:
        _check_stats(stats)
        pairs = zip(stats.of("keys"), stats.of("values"), strict=True)
        tables = {(slot, kind): table for slot, pair in enumerate(pairs) for kind, table in enumerate(pair)}
        self.bases = {place: PcaBasis(table.basis, stats.model.kv_heads) for place, table in tables.items()}
        self.cuts = {place: best_cuts(basis.deviations) for place, basis in self.bases.items()}
        self._layouts: dict[int, dict[Place, KvtcLayout]] = {}

    def layouts(self, token_bytes: int) -> dict[Place, KvtcLayout]:
        """The layouts of least squared error, all layers, keys and values, of at most ``token_bytes`` per token."""
        if token_bytes not in self._layouts:
            errors: list[FloatArray] = [cuts.errors for cuts in self.cuts.values()]
            costs = {len(error): np.arange(len(error)) for error in errors}
            chosen = allocate([costs[len(error)] for error in errors], errors, token_bytes).choices
            self._layouts[token_bytes] = {
                place: layout_of(cuts, cost) for (place, cuts), cost in zip(self.cuts.items(), chosen, strict=True)
            }
        return self._layouts[token_bytes]


def best_cuts(deviations: Tensor) -> Partitions:
    """The best cut of a row of coefficients with these deviations for every number of bytes per token."""
    return Partitions(list(pieces_of(deviations)), len(deviations))


def layout_of(cuts: Partitions, token_bytes: int) -> KvtcLayout:
    """The best layout of exactly ``token_bytes``.

    Raises:
        BudgetError: none takes exactly that.
    """
    return KvtcLayout(tuple((one.stop - one.start, WIDTHS[one.width]) for one in cuts.best(token_bytes)))


def _check_stats(stats: GradedStats) -> None:
    calibration, heads = stats.calibration, stats.model.kv_heads
    if calibration.metric != "energy" or calibration.groups(heads) != 1:
        grouped = "" if calibration.group_size is None else f", group_size={calibration.group_size}"
        raise ConfigError(
            f"KVTC needs a PCA of whole layers; these statistics have metric={calibration.metric!r}{grouped}. "
            "Calibrate with metric='energy' and all KV heads together: kvslim calibrate MODEL --metric energy -o FILE."
        )
    if not stats.of("keys"):
        raise ConfigError(
            "KVTC takes keys un-rotated; these statistics have none, as the model's rotation changes with length. "
            "Use a method for rotated keys, such as kivi-4."
        )


_TABLES: weakref.WeakKeyDictionary[GradedStats, KvtcTables] = weakref.WeakKeyDictionary()


def tables_of(stats: GradedStats) -> KvtcTables:
    """The tables of these statistics, made once and shared by all caches.

    Raises:
        ConfigError: see :class:`KvtcTables`.
    """
    if stats not in _TABLES:
        _TABLES[stats] = KvtcTables(stats)
    return _TABLES[stats]


# ---- the cache -------------------------------------------------------------------------------------------------------


class KvtcCache(BudgetedCache):
    """A KVTC-like cache at a ratio; see the module.

    Args:
        model: a transformers model of a supported family.
        stats: of :func:`kvslim.graded.calibrate` with ``metric="energy"``, for this model in this dtype.
        ratio: bf16 bytes over measured bytes of the compressed prefix with its exact tokens, at least 1.
        sinks: first tokens kept exact, and charged.
        window: last prefilled tokens kept exact, and charged; the paper keeps 128.
        seal: so many later tokens are coded together under the same ratio; None keeps them exact.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches: padding is then not stored.

    Raises:
        ConfigError: a setting is out of range, or the statistics are of another metric or of grouped heads.
        CacheStateError: the statistics are of another model or dtype.
        UnsupportedModelError: no row for this model, or its rotation changes with the length.
        BudgetError: on compression, when the exact tokens alone exceed the budget. A short row stays exact instead,
            with a warning and a note in the report.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stats: GradedStats,
        ratio: float,
        *,
        sinks: int = KVTC_SINKS,
        window: int = 0,
        seal: int | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        if not (is_number(ratio) and ratio >= 1):
            raise ConfigError(f"ratio is at least 1 (bf16 bytes over compressed bytes), not {ratio!r}.")
        if not isinstance(stats, GradedStats):
            raise ConfigError(f"stats is a GradedStats (kvslim.calibrate, GradedStats.load), not {stats!r:.80}.")
        stats.check_model(model)
        self.stats = stats
        self._tables = tables_of(stats)
        super().__init__(
            *compressible_layers(model), sinks=sinks, window=window, seal=seal, rope=rope_of(model),
            attention_mask=attention_mask, ratio=ratio, budget_bytes=None,
        )  # fmt: skip
        self.read_by(text_config(model))

    @property
    def deflated_nbytes(self) -> int:
        """Bytes of the compressed prefix if its codes were deflated for storage, as the paper does; not in nbytes."""
        return self.prefix_nbytes + sum(b.deflated_code_bytes() - storage_bytes([b.codes]) for b in self._blocks())

    def _blocks(self) -> list[KvtcBlock]:
        """Every block of the prefix, once if rows share it."""
        rows = self.prefix.rows if self.prefix is not None else ()
        stretches = [part for row in rows for part in row.stretches if isinstance(part, CodedStretch)]
        blocks = [placed.block for part in stretches for placed in (*part.keys, *part.values)]
        return list({id(block): block for block in blocks if isinstance(block, KvtcBlock)}.values())

    # ---- bytes and planning --------------------------------------------------------------------------------------

    def _header_bytes(self) -> int:
        """Also the size and width of each group, a byte."""
        return super()._header_bytes() + self._layout_bytes()

    def _layout_bytes(self) -> int:
        return 2 * self.shape.layers * -(-self.shape.kv_heads * self.shape.head_dim // min(GROUP_SIZES))

    def _plan(self, cells: list[Cell]) -> dict[Cell, Any]:
        spans = {cell.span.row: cell.span for cell in cells}
        all_tokens = sum(span.row_tokens for span in spans.values())
        budgets = {row: self._budget(row, span.row_tokens, all_tokens, 0) for row, span in spans.items()}
        return self._layouts(cells, budgets)

    def _plan_seal(self, cells: list[Cell]) -> dict[Cell, Any]:
        """Later tokens under the same ratio, less the description of one more stretch."""
        spans = {cell.span.row: cell.span for cell in cells}
        header = stretch_header_bytes(2 * len(self._groups())) + self._layout_bytes()
        budgets = {}
        for row, span in spans.items():
            allowed = int(self.shape.dense_bytes(span.tokens) / self._sealed_ratio())
            if allowed <= header:
                raise BudgetError(
                    f"{span.tokens} later tokens have {allowed} bytes, their description takes {header}. "
                    "Seal more tokens together, or lower the ratio."
                )
            budgets[row] = allowed - header
        return self._layouts(cells, budgets)

    def _layouts(self, cells: list[Cell], budgets: dict[int, int]) -> dict[Cell, Any]:
        """Each cell's layout. A token's bytes are the same for all tokens, so the budget is shared by token."""
        return {
            cell: self._tables.layouts(budgets[cell.span.row] // cell.span.tokens)[cell.layers[0], cell.kind]
            for cell in cells
        }

    def _encode_cell(self, cell: Cell, raw: Tensor, plan: KvtcLayout) -> Coded:
        x = take_off(raw, cell, self.rope).to(torch.float32)
        block = encode(x, self._tables.bases[cell.layers[0], cell.kind], plan)
        return measured(cell, x, block, str(plan))
