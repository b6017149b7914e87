"""What is coded together, and how it is gathered from the exact layers of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.caching.block import Block
from kvslim.caching.layer import CompressedLayer
from kvslim.caching.prefix import CodedStretch, PlacedBlock
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


def take_off(x: Tensor, cell: Cell, rope: Rope | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The cell as it is coded: keys un-rotated, in ``dtype``, if there is a ``rope``; else as they are.

    The rotation goes by a key's place in its row. Places and true positions differ by a constant per row, which turns
    all keys of a head alike and changes no spectrum; and what is taken off here is put back exactly.
    """
    if cell.kind == 1 or rope is None:
        return x
    inv_freq = rope.inv_freq.to(x.device)
    return unrotate(x, inv_freq, rope.rotary_dim, cell.span.place, inverse=True, out_dtype=dtype)


def measure(cell: Cell, x: Tensor, block: Block, words: str, model_layers: Sequence[int]) -> CellReport:
    """Bytes and error of a block against the cell ``x`` in the form that was coded."""
    energy = lost = 0.0
    heads = x.shape[0] // len(cell.layers)
    for place in range(len(cell.layers)):
        part = x[place * heads : (place + 1) * heads]
        energy += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
        if not block.exact:
            lost += float(torch.linalg.vector_norm(block.decode(place) - part, dtype=torch.float64)) ** 2
    return CellReport(
        row=cell.span.row,
        layers=tuple(model_layers[slot] for slot in cell.layers),
        kind=KINDS[cell.kind],
        plan=words,
        nbytes=block.nbytes,
        error=(lost / energy) ** 0.5 if energy else 0.0,
        energy=energy,
        start=cell.span.place,
    )


def coded_stretch(
    span: Span, column: int, encoded: Sequence[tuple[Cell, Block]], shape: KVShape, rope: Rope | None
) -> CodedStretch:
    """Put the blocks of all layers of one span together; ``column`` is its first batch column."""
    placed = {
        (slot, cell.kind): PlacedBlock(block, place)
        for cell, block in encoded
        for place, slot in enumerate(cell.layers)
    }
    keys, values = (tuple(placed[slot, kind] for slot in range(shape.layers)) for kind in range(2))
    return CodedStretch(column, span.place, keys, values, rope)


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
