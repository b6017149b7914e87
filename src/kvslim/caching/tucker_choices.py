"""What a cell can choose from: ranks and bits with their cost in bytes and their error (JoLT, joint allocation)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
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
class Grid:
    """Every plan of a cell of one shape, as arrays that run in parallel; the same for all cells of the shape.

    Attributes:
        token_ranks, feature_ranks, bits: ``(n,)`` integers.
        token_places, feature_places: ``(n,)`` where these ranks are in a table of tails over all ranks on the grid.
        losses: ``(n,)`` ε²(b), what the residual codec loses of what the truncation leaves.
        costs: ``(n,)`` bytes.
        inherit: the plans project on an earlier basis.
    """

    token_ranks: IntArray
    feature_ranks: IntArray
    bits: IntArray
    token_places: IntArray
    feature_places: IntArray
    losses: FloatArray
    costs: IntArray
    inherit: bool

    def plan(self, index: int) -> CellPlan:
        ranks = int(self.token_ranks[index]), int(self.feature_ranks[index])
        return CellPlan(*ranks, int(self.bits[index]), inherit=self.inherit)


@dataclass(frozen=True)
class CellChoices:
    """All plans of one cell with what each costs and loses.

    Attributes:
        grids: where the plans come from, one grid after the other.
        costs: ``(n,)`` bytes.
        errors: ``(n,)`` relative squared errors, weighted.
        tails: ``(n,)`` share of the energy outside the factors.
    """

    grids: tuple[Grid, ...]
    costs: IntArray
    errors: FloatArray
    tails: FloatArray

    def plan(self, choice: int) -> CellPlan:
        """The plan at index ``choice`` of :attr:`costs` and :attr:`errors`."""
        for grid in self.grids:
            if choice < len(grid.costs):
                return grid.plan(choice)
            choice -= len(grid.costs)
        raise IndexError(choice)

    def missed(self, choice: int) -> float:
        """Share of the energy outside the factors of plan ``choice``."""
        return float(self.tails[choice])

    def weighted(self, weight: float) -> CellChoices:
        """The same with errors multiplied by ``weight``."""
        return self if weight == 1 else dataclasses.replace(self, errors=self.errors * weight)

    def __add__(self, other: CellChoices) -> CellChoices:
        return CellChoices(
            (*self.grids, *other.grids),
            np.concatenate((self.costs, other.costs)),
            np.concatenate((self.errors, other.errors)),
            np.concatenate((self.tails, other.tails)),
        )


def own_choices(
    spectra: Sequence[Hosvd | None], shape: CellShape, bits: tuple[int, ...], levels: LevelKind
) -> list[CellChoices]:
    """Plans of cells of one shape with bases of their own, and without any: ranks × bits.

    The relative squared error of a choice is ``ε²(b) · τ(r_T, r_d)``: the tail that the truncation leaves, times what
    the residual codec loses of it. Without spectra only rank 0 is offered: pure rotated quantization. The device is
    waited for once.
    """
    known = [one for one in spectra if one is not None]
    tables = iter(_tails_on_grid(known, shape.features)) if known else iter(())
    made = []
    for one in spectra:
        grid = _own_grid(0 if one is None else one.cap, shape, bits, levels)
        tail = np.ones((1, len(feature_rank_grid(shape.features)))) if one is None else next(tables)
        tails = tail[grid.token_places, grid.feature_places]
        made.append(CellChoices((grid,), grid.costs, grid.losses * tails, tails))
    return made


def _tails_on_grid(spectra: Sequence[Hosvd], features: int) -> list[FloatArray]:
    """``τ`` at the ranks of the grids only: one table per cell on the host."""
    columns = feature_rank_grid(features)
    tables = []
    for one in spectra:
        rows = token_rank_grid(one.cap)
        tables.append(one.tail()[rows][:, columns])
    if len({table.shape for table in tables}) == 1:
        return list(torch.stack(tables).cpu().numpy())
    return [table.cpu().numpy() for table in tables]


def inherited_choices(
    tail: Tensor, feature_rank: int, shape: CellShape, bits: tuple[int, ...], levels: LevelKind
) -> CellChoices:
    """Plans that project on an earlier basis; ``tail`` ``(r + 1,)`` is what its first directions miss of the cell."""
    grid = _inherited_grid(tail.shape[0] - 1, feature_rank, shape, bits, levels)
    tails = tail.cpu().numpy()[grid.token_ranks]
    return CellChoices((grid,), grid.costs, grid.losses * tails, tails)


@lru_cache(maxsize=64)
def _own_grid(most: int, shape: CellShape, bits: tuple[int, ...], levels: LevelKind) -> Grid:
    plans = [
        CellPlan(token_rank, feature_rank, width)
        for token_rank in token_rank_grid(most)
        for feature_rank in (feature_rank_grid(shape.features) if token_rank else [shape.features])
        for width in bits
        if width != COPY_BITS and (token_rank or width)  # a cell is never dropped altogether
    ]
    if COPY_BITS in bits:
        plans.append(CellPlan(0, shape.features, COPY_BITS))
    return _grid(plans, shape, levels, inherit=False)


@lru_cache(maxsize=64)
def _inherited_grid(most: int, feature_rank: int, shape: CellShape, bits: tuple[int, ...], levels: LevelKind) -> Grid:
    plans = [
        CellPlan(token_rank, feature_rank, width, inherit=True)
        for token_rank in token_rank_grid(most)[1:]
        for width in bits
        if width != COPY_BITS
    ]
    return _grid(plans, shape, levels, inherit=True)


def _grid(plans: list[CellPlan], shape: CellShape, levels: LevelKind, *, inherit: bool) -> Grid:
    columns = np.array([(p.token_rank, p.feature_rank, p.bits) for p in plans], dtype=np.int64).reshape(-1, 3)
    widths = {plan.bits for plan in plans}
    loss = {width: 0.0 if width == COPY_BITS else distortion(width, shape.features, levels) for width in widths}
    costs = np.array([shape.bytes_of(plan) for plan in plans], dtype=np.int64)
    losses = np.array([loss[plan.bits] for plan in plans], dtype=np.float64)
    token_ranks, feature_ranks, bits = columns.T
    token_places = np.searchsorted(token_rank_grid(int(token_ranks.max(initial=0))), token_ranks)
    feature_places = np.searchsorted(feature_rank_grid(shape.features), feature_ranks)
    return Grid(token_ranks, feature_ranks, bits, token_places, feature_places, losses, costs, inherit)
