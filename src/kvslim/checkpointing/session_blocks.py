"""A compressed prefix taken apart into a plan and tensors, and put together again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.caching.block import Block, ExactBlock
from kvslim.caching.cells import KINDS
from kvslim.caching.prefix import CodedStretch, CompressedRow, ExactStretch, PlacedBlock, Prefix, Stretch
from kvslim.caching.report import CellReport
from kvslim.caching.tucker_residual import COPY_BITS, CellPlan, TuckerResidual
from kvslim.checkpointing.session_plan import CellRecord, PrefixPlan, RowRecord, StretchRecord
from kvslim.decomposing.tucker import TuckerFactors
from kvslim.errors import CacheStateError, CheckpointError
from kvslim.quantizing.codebook import LevelKind
from kvslim.quantizing.packing import packed_bytes
from kvslim.quantizing.rotated import RotatedCodes
from kvslim.types import KVShape, Rope

Key = tuple[int, int, str]
"""Stretch, cell (-1 in an exact stretch) and name of a tensor."""


@dataclass(frozen=True)
class Codec:
    """What all blocks of a cache have in common.

    Attributes:
        shape: layers, KV heads and head dim of the compressed layers.
        groups: slots of the layers that are coded together.
        model_layers: per slot the number of its layer in the model.
        dtype: of the exact tensors.
        levels, seed: codebook and rotation of the residuals.
        rope: rotation that is taken off the keys, or None.
    """

    shape: KVShape
    groups: Sequence[tuple[int, ...]]
    model_layers: Sequence[int]
    dtype: torch.dtype
    levels: LevelKind
    seed: int
    rope: Rope | None

    def slabs(self, cell: int) -> int:
        return len(self.groups[cell // 2]) * self.shape.kv_heads


# ---- which tensors there are -----------------------------------------------------------------------------------------


def tensor_forms(plan: PrefixPlan, codec: Codec) -> dict[Key, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every stored tensor, in the order of the arena: wider elements first, so all are aligned.

    Raises:
        CheckpointError: ranks do not fit the cells.
    """
    forms: dict[Key, tuple[torch.dtype, tuple[int, ...]]] = {}
    shape = codec.shape
    for number, part in enumerate(plan.stretches):
        if not part.cells:
            kept = (2, shape.layers, shape.kv_heads, part.tokens, shape.head_dim)
            forms[number, -1, "kept"] = (codec.dtype, kept)
        for index, cell in enumerate(part.cells):
            for name, form in _cell_forms(cell, codec.slabs(index), part.tokens, codec).items():
                forms[number, index, name] = form
    return dict(sorted(forms.items(), key=lambda item: -item[1][0].itemsize))


def _cell_forms(
    cell: CellRecord, slabs: int, tokens: int, codec: Codec
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    features = codec.shape.head_dim
    if cell.exact:
        return {"kept": (codec.dtype, (slabs, tokens, features))}
    core_slabs = cell.slab_rank or slabs
    fits = cell.slab_rank <= slabs and cell.token_rank <= core_slabs * cell.feature_rank
    if not fits or (cell.feature_rank > features if cell.feature else cell.feature_rank not in (0, features)):
        raise CheckpointError("The plan of the session is damaged: it has ranks beyond the size of their cell.")
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    if cell.token_rank:
        shapes["token"] = (torch.float16, (tokens, cell.token_rank))
        if not cell.inherited:
            shapes["core"] = (torch.float16, (core_slabs, cell.token_rank, cell.feature_rank))
            if cell.feature:
                shapes["feature"] = (torch.float16, (features, cell.feature_rank))
            if cell.slab_rank:
                shapes["slab"] = (torch.float16, (slabs, cell.slab_rank))
    if cell.bits:
        shapes["scales"] = (torch.float16, (slabs, tokens))
        shapes["codes"] = (torch.uint8, (slabs, tokens, packed_bytes(features, cell.bits)))
    return shapes


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
        cells: list[CellRecord] = []
        if isinstance(part, ExactStretch):
            tensors[number, -1, "kept"] = part.kept
        else:
            first_row = next(index for index, row in enumerate(prefix.rows) if any(s is part for s in row.stretches))
            for index, block in enumerate(_blocks(part, codec)):
                layers = tuple(codec.model_layers[slot] for slot in codec.groups[index // 2])
                report = measured.get((first_row, part.place, layers, KINDS[index % 2]))
                if report is None:
                    raise CacheStateError("The report of the cache does not cover its cells.")
                cells.append(_record(block, report, codec))
                tensors |= {(number, index, name): tensor for name, tensor in _parts(block).items()}
        records.append(StretchRecord(part.column, part.place, part.tokens, tuple(cells)))
    places = {id(part): number for number, part in enumerate(stretches)}
    numbers = {id(row): number for number, row in enumerate(rows)}
    plan = PrefixPlan(
        columns=prefix.columns,
        batch=tuple(numbers[id(row)] for row in prefix.rows),
        rows=tuple(RowRecord(row.start, tuple(places[id(part)] for part in row.stretches)) for row in rows),
        stretches=tuple(records),
    )
    _check_inherited(plan, stretches, codec)
    forms = tensor_forms(plan, codec)
    if set(forms) != set(tensors) or any((tensors[k].dtype, tuple(tensors[k].shape)) != forms[k] for k in forms):
        raise CacheStateError("This cache holds tensors of a form that a session cannot keep.")
    return plan, {key: tensors[key] for key in forms}


def _distinct(prefix: Prefix) -> tuple[list[CompressedRow], list[Stretch]]:
    rows = list({id(row): row for row in prefix.rows}.values())
    return rows, list({id(part): part for row in rows for part in row.stretches}.values())


def _blocks(part: CodedStretch, codec: Codec) -> list[Block]:
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


def _record(block: Block, report: CellReport, codec: Codec) -> CellRecord:
    if isinstance(block, ExactBlock):
        return CellRecord(exact=True, error=report.error, energy=report.energy)
    if not isinstance(block, TuckerResidual):
        raise CacheStateError(f"Sessions keep the blocks of JoltCache, not {type(block).__name__}.")
    factors, residual = block.factors, block.residual
    if residual is not None and (residual.kind, residual.seed) != (codec.levels, codec.seed):
        raise CacheStateError("The residuals of this cache are not coded as its settings say.")
    return CellRecord(
        token_rank=factors.core.shape[1] if factors is not None else 0,
        feature_rank=factors.core.shape[2] if factors is not None else 0,
        feature=factors is not None and factors.feature is not None,
        slab_rank=factors.slab.shape[1] if factors is not None and factors.slab is not None else 0,
        inherited=block.inherited,
        bits=residual.bits if residual is not None else 0,
        gain=_exponent(block.gain),
        code_gain=_exponent(residual.gain) if residual is not None else 0,
        missed=block.missed,
        error=report.error,
        energy=report.energy,
    )


def _exponent(gain: float) -> int:
    mantissa, exponent = math.frexp(gain)
    if mantissa != 0.5:
        raise CacheStateError(f"A gain is a power of two, not {gain!r}.")
    return exponent - 1


def _parts(block: Block) -> dict[str, Tensor]:
    """The tensors of a block that are its own."""
    if isinstance(block, ExactBlock):
        return {"kept": block.kept}
    assert isinstance(block, TuckerResidual)  # _record has refused the others
    parts: dict[str, Tensor | None] = {}
    if block.factors is not None:
        parts["token"] = block.factors.token
        if not block.inherited:
            parts |= {"core": block.factors.core, "feature": block.factors.feature, "slab": block.factors.slab}
    if block.residual is not None:
        parts |= {"scales": block.residual.scales, "codes": block.residual.codes}
    return {name: tensor for name, tensor in parts.items() if tensor is not None}


def _check_inherited(plan: PrefixPlan, stretches: Sequence[Stretch], codec: Codec) -> None:
    """What is inherited is not written, so it must be what reading will put in its place."""
    for number, index, owner in plan.owners():
        mine, basis = (_factors(stretches[at], index, codec) for at in (number, owner))
        pairs = (
            (mine.core, basis.core[:, : mine.core.shape[1]]),
            (mine.feature, basis.feature),
            (mine.slab, basis.slab),
        )
        if any(one is not None and two is not None and not torch.equal(one, two) for one, two in pairs):
            raise CacheStateError("A sealed block of this cache uses a basis that is not that of an earlier block.")


def _factors(part: Stretch, index: int, codec: Codec) -> TuckerFactors:
    block = _blocks(part, codec)[index] if isinstance(part, CodedStretch) else None
    assert isinstance(block, TuckerResidual)
    assert block.factors is not None  # the plan says so
    return block.factors


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
            mine = {name: tensors[number, index, name] for name in _cell_forms(cell, codec.slabs(index), 1, codec)}
            basis = blocks.get((owners.get((number, index), -1), index))
            blocks[number, index] = _block(cell, mine, basis, codec, (codec.slabs(index), part.tokens))
    stretches = [_stretch(part, number, tensors, blocks, codec) for number, part in enumerate(plan.stretches)]
    rows = [CompressedRow(row.start, tuple(stretches[number] for number in row.stretches)) for row in plan.rows]
    prefix = Prefix(tuple(rows[number] for number in plan.batch), plan.columns, like)
    return prefix, _reports(plan, blocks, codec)


def _block(
    cell: CellRecord, mine: Mapping[str, Tensor], basis: Block | None, codec: Codec, size: tuple[int, int]
) -> Block:
    heads, features = codec.shape.kv_heads, codec.shape.head_dim
    if cell.exact:
        return ExactBlock(mine["kept"], heads)
    factors: TuckerFactors | None = None
    if cell.inherited:
        assert isinstance(basis, TuckerResidual)
        assert basis.factors is not None  # the plan has been checked
        lent = basis.factors
        factors = TuckerFactors(lent.core[:, : cell.token_rank], mine["token"], lent.feature, lent.slab)
    elif cell.token_rank:
        factors = TuckerFactors(mine["core"], mine["token"], mine.get("feature"), mine.get("slab"))
    residual: RotatedCodes | None = None
    if cell.bits:
        codes, scales = mine["codes"], mine["scales"]
        residual = RotatedCodes(
            codes, scales, cell.bits, features, codec.levels, codec.seed, math.ldexp(1.0, cell.code_gain)
        )
    gain = math.ldexp(1.0, cell.gain)
    return TuckerResidual(factors, residual, gain, heads, (*size, features), cell.missed, cell.inherited)


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
                        plan=str(cell_plan(cell, codec.shape.head_dim)),
                        nbytes=block.nbytes,
                        error=cell.error,
                        energy=cell.energy,
                        start=plan.stretches[number].place,
                    )
                )
            seen.add(number)
    return reports


def cell_plan(cell: CellRecord, features: int) -> CellPlan:
    """The plan that a block carries out."""
    bits = COPY_BITS if cell.exact else cell.bits
    return CellPlan(cell.token_rank, cell.feature_rank or features, bits, cell.inherited)
