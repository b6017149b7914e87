"""How a session keeps the cells of JoltCache: Tucker factors, rotated residuals, and exact copies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.caching.block import Block, ExactBlock
from kvslim.caching.prefix import CodedStretch, Stretch
from kvslim.caching.report import CellReport
from kvslim.caching.tucker_residual import TuckerResidual
from kvslim.checkpointing.session_blocks import Codec, Form, blocks_of
from kvslim.checkpointing.session_plan import CellRecord, PrefixPlan, Record
from kvslim.decomposing.tucker import TuckerFactors
from kvslim.errors import CacheStateError, CheckpointError
from kvslim.quantizing.codebook import LevelKind
from kvslim.quantizing.packing import packed_bytes
from kvslim.quantizing.rotated import RotatedCodes


@dataclass(frozen=True)
class TuckerCodec(Codec):
    """See :class:`~kvslim.checkpointing.session_blocks.Codec`.

    Attributes:
        levels, seed: codebook and rotation of the residuals.
    """

    levels: LevelKind
    seed: int

    def slabs(self, cell: int) -> int:
        """Layers × KV heads of cell ``cell`` of a stretch."""
        return len(self.groups[cell // 2]) * self.shape.kv_heads

    def forms(self, record: Record, cell: int, tokens: int) -> dict[str, Form]:
        """See there."""
        assert isinstance(record, CellRecord)  # the plan was read as this kind
        slabs, features = self.slabs(cell), self.shape.head_dim
        if record.exact:
            return {"kept": (self.dtype, (slabs, tokens, features))}
        core_slabs = record.slab_rank or slabs
        fits = record.slab_rank <= slabs and record.token_rank <= core_slabs * record.feature_rank
        rank = record.feature_rank
        if not fits or (rank > features if record.feature else rank not in (0, features)):
            raise CheckpointError("The plan of the session is damaged: it has ranks beyond the size of their cell.")
        shapes: dict[str, Form] = {}
        if record.token_rank:
            shapes["token"] = (torch.float16, (tokens, record.token_rank))
            if not record.inherited:
                shapes["core"] = (torch.float16, (core_slabs, record.token_rank, rank))
                if record.feature:
                    shapes["feature"] = (torch.float16, (features, rank))
                if record.slab_rank:
                    shapes["slab"] = (torch.float16, (slabs, record.slab_rank))
        if record.bits:
            shapes["scales"] = (torch.float16, (slabs, tokens))
            shapes["codes"] = (torch.uint8, (slabs, tokens, packed_bytes(features, record.bits)))
        return shapes

    def record(self, block: Block, report: CellReport, cell: int) -> CellRecord:
        """See there."""
        if isinstance(block, ExactBlock):
            return CellRecord(exact=True, error=report.error, energy=report.energy)
        if not isinstance(block, TuckerResidual):
            raise CacheStateError(f"A session of JoltCache keeps its own blocks, not {type(block).__name__}.")
        factors, residual = block.factors, block.residual
        if residual is not None and (residual.kind, residual.seed) != (self.levels, self.seed):
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

    def parts(self, block: Block) -> dict[str, Tensor]:
        """See there."""
        if isinstance(block, ExactBlock):
            return {"kept": block.kept}
        assert isinstance(block, TuckerResidual)  # record() has refused the others
        parts: dict[str, Tensor | None] = {}
        if block.factors is not None:
            parts["token"] = block.factors.token
            if not block.inherited:
                parts |= {"core": block.factors.core, "feature": block.factors.feature, "slab": block.factors.slab}
        if block.residual is not None:
            parts |= {"scales": block.residual.scales, "codes": block.residual.codes}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def check(self, plan: PrefixPlan, stretches: Sequence[Stretch]) -> None:
        """What is inherited is not written, so it must be what reading will put in its place."""
        for number, index, owner in plan.owners():
            mine, basis = (self._factors(stretches[at], index) for at in (number, owner))
            pairs = (
                (mine.core, basis.core[:, : mine.core.shape[1]]),
                (mine.feature, basis.feature),
                (mine.slab, basis.slab),
            )
            if any(one is not None and two is not None and not torch.equal(one, two) for one, two in pairs):
                raise CacheStateError("A sealed block of this cache uses a basis that is not that of an earlier block.")

    def _factors(self, part: Stretch, index: int) -> TuckerFactors:
        block = blocks_of(part, self)[index] if isinstance(part, CodedStretch) else None
        assert isinstance(block, TuckerResidual)
        assert block.factors is not None  # the plan says so
        return block.factors

    def block(self, record: Record, mine: Mapping[str, Tensor], basis: Block | None, cell: int, tokens: int) -> Block:
        """See there."""
        assert isinstance(record, CellRecord)  # the plan was read as this kind
        heads, features = self.shape.kv_heads, self.shape.head_dim
        if record.exact:
            return ExactBlock(mine["kept"], heads)
        factors: TuckerFactors | None = None
        if record.inherited:
            assert isinstance(basis, TuckerResidual)
            assert basis.factors is not None  # the plan has been checked
            lent = basis.factors
            factors = TuckerFactors(lent.core[:, : record.token_rank], mine["token"], lent.feature, lent.slab)
        elif record.token_rank:
            factors = TuckerFactors(mine["core"], mine["token"], mine.get("feature"), mine.get("slab"))
        residual: RotatedCodes | None = None
        if record.bits:
            codes, scales = mine["codes"], mine["scales"]
            residual = RotatedCodes(
                codes, scales, record.bits, features, self.levels, self.seed, math.ldexp(1.0, record.code_gain)
            )
        gain, size = math.ldexp(1.0, record.gain), (self.slabs(cell), tokens, features)
        return TuckerResidual(factors, residual, gain, heads, size, record.missed, record.inherited)


def _exponent(gain: float) -> int:
    mantissa, exponent = math.frexp(gain)
    if mantissa != 0.5:
        raise CacheStateError(f"A gain is a power of two, not {gain!r}.")
    return exponent - 1
