"""What a cell can choose from: ranks and bits with their cost in bytes and their error (JoLT, joint allocation)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvslim.allocating.lagrangian import FloatArray, IntArray
from kvslim.caching.tucker_residual import COPY_BITS, CellPlan, cell_bytes
from kvslim.decomposing.tucker import Hosvd
from kvslim.quantizing.codebook import LevelKind
from kvslim.quantizing.rotated import distortion


def token_rank_grid(most: int) -> list[int]:
    """Token ranks to try: every one up to 32, then steps of about 4 %, up to ``most``."""
    ranks = list(range(min(most, 32) + 1))
    while ranks[-1] < most:
        ranks.append(min(most, ranks[-1] + max(1, ranks[-1] // 24)))
    return ranks


def feature_rank_grid(features: int) -> list[int]:
    """Feature ranks to try: untruncated, and multiples of an eighth below."""
    return sorted({features} | {max(1, features * eighths // 8) for eighths in range(1, 8)})


@dataclass(frozen=True)
class CellShape:
    """A cell as the allocator sees it.

    Attributes:
        slabs, tokens, features: its axes.
        core_slabs: slabs of the core, fewer than ``slabs`` only if that mode is truncated too.
        item_bytes: bytes per element of an exact copy.
    """

    slabs: int
    tokens: int
    features: int
    core_slabs: int
    item_bytes: int

    def bytes_of(self, plan: CellPlan) -> int:
        core = self.core_slabs if self.core_slabs < self.slabs else None
        return cell_bytes(plan, self.slabs, self.tokens, self.features, self.item_bytes, core)


@dataclass(frozen=True)
class CellChoices:
    """All plans of one cell with what each costs and loses. The three sequences run in parallel."""

    plans: list[CellPlan]
    costs: IntArray
    errors: FloatArray

    def weighted(self, weight: float) -> CellChoices:
        """The same with errors multiplied by ``weight``."""
        return CellChoices(self.plans, self.costs, self.errors * weight)

    def __add__(self, other: CellChoices) -> CellChoices:
        costs, errors = np.concatenate((self.costs, other.costs)), np.concatenate((self.errors, other.errors))
        return CellChoices([*self.plans, *other.plans], costs, errors)


def own_choices(spectra: Hosvd | None, shape: CellShape, bits: Sequence[int], levels: LevelKind) -> CellChoices:
    """Plans with a basis of the cell's own, and without any: ranks × bits.

    The relative squared error of a choice is ``ε²(b) · τ(r_T, r_d)``: the tail that the truncation leaves, times what
    the residual codec loses of it. Without ``spectra`` only rank 0 is offered: pure rotated quantization.
    """
    tail = spectra.tail().cpu().numpy() if spectra is not None else np.ones((1, shape.features + 1))
    plans, errors = [], []
    for token_rank in token_rank_grid(tail.shape[0] - 1):
        for feature_rank in feature_rank_grid(shape.features) if token_rank else [shape.features]:
            for width, loss in _losses(bits, shape.features, levels):
                if token_rank or width:  # a cell is never dropped altogether
                    plans.append(CellPlan(token_rank, feature_rank, width))
                    errors.append(loss * tail[token_rank, feature_rank])
    if COPY_BITS in bits:
        plans.append(CellPlan(0, shape.features, COPY_BITS))
        errors.append(0.0)
    return _priced(plans, errors, shape)


def inherited_choices(
    tail: Tensor, feature_rank: int, shape: CellShape, bits: Sequence[int], levels: LevelKind
) -> CellChoices:
    """Plans that project on an earlier basis; ``tail`` ``(r + 1,)`` is what its first directions miss of the cell."""
    missed = tail.cpu().numpy()
    plans, errors = [], []
    for token_rank in token_rank_grid(missed.shape[0] - 1)[1:]:
        for width, loss in _losses(bits, shape.features, levels):
            plans.append(CellPlan(token_rank, feature_rank, width, inherit=True))
            errors.append(loss * missed[token_rank])
    return _priced(plans, errors, shape)


def _losses(bits: Sequence[int], features: int, levels: LevelKind) -> list[tuple[int, float]]:
    return [(width, distortion(width, features, levels)) for width in bits if width != COPY_BITS]


def _priced(plans: list[CellPlan], errors: list[float], shape: CellShape) -> CellChoices:
    costs = np.array([shape.bytes_of(plan) for plan in plans], dtype=np.int64)
    return CellChoices(plans, costs, np.array(errors))
