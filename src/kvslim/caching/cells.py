"""What is coded together, and how it is gathered from the exact layers of a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.caching.block import Block
from kvslim.caching.graded_block import GradedBlock
from kvslim.caching.layer import CompressedLayer
from kvslim.caching.prefix import CodedStretch, PlacedBlock, Prefix
from kvslim.caching.report import CellReport
from kvslim.errors import CacheStateError
from kvslim.kernels.unrotate import unrotate
from kvslim.types import KVShape, Rope

KINDS = ("keys", "values")


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one batch row that are coded together.

    Attributes:
        row: batch row.
        start, stop: columns in the layers' exact tensors.
        place: tokens of the row before them.
        row_tokens: tokens that the row's budget is for: with a prefill its exact ones too.
    """

    row: int
    start: int
    stop: int
    place: int
    row_tokens: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Cell:
    """The keys or values of some layers (slots), for one span."""

    span: Span
    layers: tuple[int, ...]
    kind: int  # index into KINDS


def gather(layers: Sequence[CompressedLayer], cell: Cell) -> Tensor:
    """``(layers · kv_heads, tokens, head_dim)`` of a cell as the model made it."""
    parts = [(layers[slot].keys, layers[slot].values)[cell.kind] for slot in cell.layers]
    span = cell.span
    pieces = [part[span.row, :, span.start : span.stop] for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def take_off(x: Tensor, cell: Cell, rope: Rope | None, *, fits_half: bool = False) -> Tensor:
    """The cell as it is coded: keys un-rotated if there is a ``rope``; else as they are.

    The rotation goes by a key's place in its row. Places and true positions differ by a constant per row, which turns
    all keys of a head alike and changes no spectrum; and what is taken off here is put back exactly. The result is
    float32; on a GPU keys of a half-precision model come in float16, whose 11 bits outlast their own 8 or 11, if their
    magnitudes fit (``fits_half``).
    """
    if cell.kind == 1 or rope is None:
        return x
    half = fits_half and x.is_cuda and x.dtype != torch.float32
    dtype = torch.float16 if half else torch.float32
    return unrotate(x, rope.inv_freq.to(x.device), rope.rotary_dim, cell.span.place, inverse=True, out_dtype=dtype)


@dataclass(frozen=True)
class Coded:
    """One cell after encoding.

    Attributes:
        cell: what was encoded.
        block: the result.
        words: the plan in words.
        energy: ``‖X‖²``, a number or a scalar tensor that is still being computed.
        lost: ``‖X - X̂‖²``, likewise.
        cost: what the errors cost by a calibration, likewise; 0 without one.
        expected: what the calibration predicts for them.
    """

    cell: Cell
    block: Block
    words: str
    energy: Tensor | float
    lost: Tensor | float
    cost: Tensor | float = 0.0
    expected: float = 0.0


def measured(cell: Cell, x: Tensor, block: Block, words: str) -> Coded:
    """Measure a block against the tensor ``x`` that it codes, by decoding it."""
    heads, lost = x.shape[0] // len(cell.layers), x.new_zeros((), dtype=torch.float64)
    for place in range(len(cell.layers)):
        gap = block.decode(place) - x[place * heads : (place + 1) * heads]
        lost += torch.linalg.vector_norm(gap, dtype=torch.float64) ** 2
    return Coded(cell, block, words, torch.linalg.vector_norm(x, dtype=torch.float64) ** 2, lost)


def reports_of(coded: Sequence[Coded], model_layers: Sequence[int]) -> list[CellReport]:
    """Bytes and errors of encoded cells; waits for the device once."""
    pairs = [torch.as_tensor(value, dtype=torch.float64).cpu() if isinstance(value, float) else value.double()
             for one in coded for value in (one.energy, one.lost, one.cost)]  # fmt: skip
    device = next((pair.device for pair in pairs if pair.is_cuda), torch.device("cpu"))
    numbers = torch.stack([pair.to(device) for pair in pairs]).tolist() if pairs else []
    reports = []
    for one, energy, lost, cost in zip(coded, numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        report = CellReport(
            row=one.cell.span.row,
            layers=tuple(model_layers[slot] for slot in one.cell.layers),
            kind=KINDS[one.cell.kind],
            plan=one.words,
            nbytes=one.block.nbytes,
            error=(max(0.0, lost) / energy) ** 0.5 if energy else 0.0,
            energy=energy,
            start=one.cell.span.place,
            cost=cost,
            expected=one.expected,
        )
        reports.append(report)
    return reports


def coded_stretch(span: Span, column: int, coded: Sequence[Coded], shape: KVShape, rope: Rope | None) -> CodedStretch:
    """Put the blocks of all layers of one span together; ``column`` is its first batch column."""
    placed = {
        (slot, one.cell.kind): PlacedBlock(one.block, place)
        for one in coded
        for place, slot in enumerate(one.cell.layers)
    }
    keys, values = (tuple(placed[slot, kind] for slot in range(shape.layers)) for kind in range(2))
    return CodedStretch(column, span.place, keys, values, rope)


def reports_after_crop(
    reports: Sequence[CellReport], prefix: Prefix | None, model_layers: Sequence[int]
) -> list[CellReport]:
    """The reports of what a crop has left; bytes are measured again, errors are those found when it was coded."""
    kept = []
    for report in reports:
        if (stretch := coded_at(prefix, report.row, report.start)) is not None:
            blocks = (stretch.keys, stretch.values)[KINDS.index(report.kind)]
            block = blocks[model_layers.index(report.layers[0])].block
            words = block.words if isinstance(block, GradedBlock) else report.plan
            kept.append(dataclasses.replace(report, nbytes=block.nbytes, plan=words))
    return kept


def reports_after_select(reports: Sequence[CellReport], before: Prefix, after: Prefix) -> list[CellReport]:
    """The reports of the stretches that are still there, each under the first row that holds it."""
    rows = {id(part): index for index, row in reversed([*enumerate(after.rows)]) for part in row.stretches}
    stretches = [coded_at(before, report.row, report.start) for report in reports]
    return [
        dataclasses.replace(report, row=rows[id(stretch)])
        for report, stretch in zip(reports, stretches, strict=True)
        if id(stretch) in rows
    ]


def coded_at(prefix: Prefix | None, row: int, place: int) -> CodedStretch | None:
    """The compressed stretch of batch row ``row`` that begins after ``place`` tokens, if there is one."""
    stretches = prefix.rows[row].stretches if prefix is not None else ()
    found = [part for part in stretches if isinstance(part, CodedStretch) and part.place == place]
    return found[0] if found else None


def row_extents(mask: Tensor | None, batch: int, columns: int) -> list[tuple[int, int]]:
    """Column range of the real tokens of every row; without a ``mask`` every column counts.

    Raises:
        CacheStateError: the mask does not fit, or a row has no real token.
    """
    if mask is None:
        return [(0, columns)] * batch
    mask = mask.to("cpu").bool()
    if mask.dim() != 2 or batch % mask.shape[0] or mask.shape[1] > columns:
        raise CacheStateError(
            f"attention_mask of shape {tuple(mask.shape)} does not fit a cache of {batch} rows and {columns} "
            "columns. Pass the mask of the prompt that was prefilled."
        )
    mask = mask.repeat_interleave(batch // mask.shape[0], dim=0)
    mask = torch.nn.functional.pad(mask, (0, columns - mask.shape[1]), value=True)
    extents = []
    for index, row in enumerate(mask):
        real = row.nonzero().flatten()
        if not len(real):
            raise CacheStateError(f"attention_mask has no real token in row {index}.")
        extents.append((int(real[0]), int(real[-1]) + 1))
    return extents
