"""A compressed prefix taken apart into a plan and tensors, and put together again.

What a cell is made of is the matter of a :class:`Codec`, one per method: :mod:`kvslim.checkpointing.session_tucker` and
:mod:`kvslim.checkpointing.session_graded`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.caching.block import Block
from kvslim.caching.cells import KINDS
from kvslim.caching.prefix import CodedStretch, CompressedRow, ExactStretch, PlacedBlock, Prefix, Stretch
from kvslim.caching.report import CellReport
from kvslim.checkpointing.session_plan import PrefixPlan, Record, RowRecord, StretchRecord
from kvslim.errors import CacheStateError
from kvslim.types import KVShape, Rope

Key = tuple[int, int, str]
"""Stretch, cell (-1 in an exact stretch) and name of a tensor."""
Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True)
class Codec(ABC):
    """What all blocks of a cache have in common, and how its method keeps a cell.

    Attributes:
        shape: layers, KV heads and head dim of the compressed layers.
        groups: slots of the layers that are coded together.
        model_layers: per slot the number of its layer in the model.
        dtype: of the exact tensors.
        rope: rotation that is taken off the keys, or None.
    """

    shape: KVShape
    groups: Sequence[tuple[int, ...]]
    model_layers: Sequence[int]
    dtype: torch.dtype
    rope: Rope | None

    @abstractmethod
    def forms(self, record: Record, cell: int, tokens: int) -> dict[str, Form]:
        """The tensors of cell ``cell`` of a stretch.

        Raises:
            CheckpointError: the record does not fit the cell.
        """

    @abstractmethod
    def record(self, block: Block, report: CellReport, cell: int) -> Record:
        """What the plan keeps of a block.

        Raises:
            CacheStateError: it is not of the form that the format keeps.
        """

    @abstractmethod
    def parts(self, block: Block) -> dict[str, Tensor]:
        """The tensors of a block that are its own, under the names that :meth:`forms` gives."""

    @abstractmethod
    def block(self, record: Record, mine: Mapping[str, Tensor], basis: Block | None, cell: int, tokens: int) -> Block:
        """Undo :meth:`record` and :meth:`parts`; ``basis`` is the block that lends its basis, if one does.

        Raises:
            CheckpointError: the tensors are none that a writer makes.
        """

    @abstractmethod
    def check(self, plan: PrefixPlan, stretches: Sequence[Stretch]) -> None:
        """Refuse what is not written and would not come back.

        Raises:
            CacheStateError: there is such a thing.
        """


# ---- which tensors there are -----------------------------------------------------------------------------------------


def tensor_forms(plan: PrefixPlan, codec: Codec) -> dict[Key, Form]:
    """Dtype and shape of every stored tensor, in the order of the arena: wider elements first, so all are aligned.

    Raises:
        CheckpointError: a record does not fit its cell.
    """
    forms: dict[Key, Form] = {}
    shape = codec.shape
    for number, part in enumerate(plan.stretches):
        if not part.cells:
            kept = (2, shape.layers, shape.kv_heads, part.tokens, shape.head_dim)
            forms[number, -1, "kept"] = (codec.dtype, kept)
        for index, cell in enumerate(part.cells):
            for name, form in codec.forms(cell, index, part.tokens).items():
                forms[number, index, name] = form
    return dict(sorted(forms.items(), key=lambda item: -item[1][0].itemsize))


def arena_bytes(plan: PrefixPlan, codec: Codec) -> int:
    """Bytes of all stored tensors together."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensor_forms(plan, codec).values())


# ---- taking apart ----------------------------------------------------------------------------------------------------


def take_apart(prefix: Prefix, reports: Sequence[CellReport], codec: Codec) -> tuple[PrefixPlan, dict[Key, Tensor]]:
    """The plan of a prefix and its tensors in the order of the arena. What rows share is there once.

    Raises:
        CacheStateError: a block is not of the form that this format keeps.
    """
    rows, stretches = _distinct(prefix)
    measured = {(report.row, report.start, report.layers, report.kind): report for report in reports}
    tensors: dict[Key, Tensor] = {}
    records = []
    for number, part in enumerate(stretches):
        cells: list[Record] = []
        if isinstance(part, ExactStretch):
            tensors[number, -1, "kept"] = part.kept
        else:
            first_row = next(index for index, row in enumerate(prefix.rows) if any(s is part for s in row.stretches))
            for index, block in enumerate(blocks_of(part, codec)):
                layers = tuple(codec.model_layers[slot] for slot in codec.groups[index // 2])
                report = measured.get((first_row, part.place, layers, KINDS[index % 2]))
                if report is None:
                    raise CacheStateError("The report of the cache does not cover its cells.")
                cells.append(codec.record(block, report, index))
                tensors |= {(number, index, name): tensor for name, tensor in codec.parts(block).items()}
        records.append(StretchRecord(part.column, part.place, part.tokens, tuple(cells)))
    places = {id(part): number for number, part in enumerate(stretches)}
    numbers = {id(row): number for number, row in enumerate(rows)}
    plan = PrefixPlan(
        columns=prefix.columns,
        batch=tuple(numbers[id(row)] for row in prefix.rows),
        rows=tuple(RowRecord(row.start, tuple(places[id(part)] for part in row.stretches)) for row in rows),
        stretches=tuple(records),
    )
    codec.check(plan, stretches)
    forms = tensor_forms(plan, codec)
    if set(forms) != set(tensors) or any((tensors[k].dtype, tuple(tensors[k].shape)) != forms[k] for k in forms):
        raise CacheStateError("This cache holds tensors of a form that a session cannot keep.")
    return plan, {key: tensors[key] for key in forms}


def _distinct(prefix: Prefix) -> tuple[list[CompressedRow], list[Stretch]]:
    rows = list({id(row): row for row in prefix.rows}.values())
    return rows, list({id(part): part for row in rows for part in row.stretches}.values())


def blocks_of(part: CodedStretch, codec: Codec) -> list[Block]:
    """The blocks of a stretch, group by group, keys then values."""
    blocks = []
    for group in codec.groups:
        for placed in (part.keys, part.values):
            block = placed[group[0]].block
            if any(placed[slot].block is not block or placed[slot].layer != at for at, slot in enumerate(group)):
                raise CacheStateError("The blocks of this cache do not follow its layer groups.")
            blocks.append(block)
    if (part.rope is None) != (codec.rope is None):
        raise CacheStateError("The keys of this cache are not rotated as its settings say.")
    return blocks


# ---- putting together ------------------------------------------------------------------------------------------------


def put_together(
    plan: PrefixPlan, tensors: Mapping[Key, Tensor], codec: Codec, like: Tensor
) -> tuple[Prefix, list[CellReport]]:
    """Undo :func:`take_apart`. ``like`` is an empty ``(kv_heads, 0, head_dim)`` tensor of the right device."""
    owners = {(number, index): owner for number, index, owner in plan.owners()}
    blocks: dict[tuple[int, int], Block] = {}
    for number in sorted(range(len(plan.stretches)), key=lambda number: plan.stretches[number].place):
        part = plan.stretches[number]
        for index, cell in enumerate(part.cells):
            mine = {name: tensors[number, index, name] for name in codec.forms(cell, index, part.tokens)}
            basis = blocks.get((owners.get((number, index), -1), index))
            blocks[number, index] = codec.block(cell, mine, basis, index, part.tokens)
    stretches = [_stretch(part, number, tensors, blocks, codec) for number, part in enumerate(plan.stretches)]
    rows = [CompressedRow(row.start, tuple(stretches[number] for number in row.stretches)) for row in plan.rows]
    prefix = Prefix(tuple(rows[number] for number in plan.batch), plan.columns, like)
    return prefix, _reports(plan, blocks, codec)


def _stretch(
    part: StretchRecord,
    number: int,
    tensors: Mapping[Key, Tensor],
    blocks: Mapping[tuple[int, int], Block],
    codec: Codec,
) -> Stretch:
    if not part.cells:
        return ExactStretch(part.column, part.place, tensors[number, -1, "kept"])
    keys, values = (
        tuple(
            PlacedBlock(blocks[number, 2 * index + kind], at)
            for index, group in enumerate(codec.groups)
            for at in range(len(group))
        )
        for kind in range(2)
    )
    return CodedStretch(part.column, part.place, keys, values, codec.rope)


def _reports(plan: PrefixPlan, blocks: Mapping[tuple[int, int], Block], codec: Codec) -> list[CellReport]:
    """One report per cell, under the first batch row that holds it."""
    reports, seen = [], set()
    for row, distinct in enumerate(plan.batch):
        for number in plan.rows[distinct].stretches:
            for index, cell in enumerate(plan.stretches[number].cells if number not in seen else ()):
                block = blocks[number, index]
                reports.append(
                    CellReport(
                        row=row,
                        layers=tuple(codec.model_layers[slot] for slot in codec.groups[index // 2]),
                        kind=KINDS[index % 2],
                        plan=cell.words(codec.shape.head_dim),
                        nbytes=block.nbytes,
                        error=cell.error,
                        energy=cell.energy,
                        start=plan.stretches[number].place,
                        cost=cell.cost,
                        expected=cell.expected,
                    )
                )
            seen.add(number)
    return reports
