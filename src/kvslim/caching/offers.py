"""Cells on their way through the allocation: what each can choose from, and what carrying the choice out needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvslim.caching.cells import Cell
from kvslim.caching.tucker_choices import CellChoices
from kvslim.caching.tucker_residual import CellPlan, TuckerResidual
from kvslim.decomposing.hosvd import Hosvd


@dataclass(frozen=True)
class Planned:
    """A chosen plan with what carrying it out needs."""

    plan: CellPlan
    missed: float = 1.0
    spectra: Hosvd | None = None
    slab: Tensor | None = None
    basis: TuckerResidual | None = None


@dataclass(frozen=True)
class Offer:
    """One cell before the allocation: what it can choose from, and what carrying a choice out will need."""

    cell: Cell
    choices: CellChoices
    spectra: Hosvd | None = None
    slab: Tensor | None = None
    basis: TuckerResidual | None = None

    def planned(self, choice: int) -> Planned:
        plan, missed = self.choices.plan(choice), self.choices.missed(choice)
        if plan.inherit:
            return Planned(plan, missed, basis=self.basis)
        return Planned(plan, missed, self.spectra, self.slab)


def by_row(offers: Sequence[Offer]) -> list[list[Offer]]:
    """Offers sorted into batch rows, in order."""
    rows: dict[int, list[Offer]] = {}
    for offer in offers:
        rows.setdefault(offer.cell.span.row, []).append(offer)
    return list(rows.values())


def least_of(row: Sequence[Offer]) -> int:
    """Bytes of the cheapest choices of a row."""
    return sum(int(offer.choices.costs.min()) for offer in row)
