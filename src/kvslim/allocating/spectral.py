"""Ranks by water-filling: every latent channel goes where it takes away the most loss.

The squared error that a cell (see :mod:`kvslim.allocating.ranks`) makes at a rank is the energy of its channels beyond
it: the sum of their squared singular values. Its *sensitivity* says what a unit of this error costs. The ranks that
make the total cost least under one budget take the channels of all cells in falling order of sensitivity times energy:
since the energies of a cell fall, each next channel is the dearest one left, so greedy steps are exact.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

from kvslim.allocating.ranks import budget_and_floors
from kvslim.errors import CalibrationError

_ROUNDING = 1e-9
"""How far, as a share of a cell's largest energy, the next one may rise above the last and still count as falling."""


def spectral_ranks(
    energies: Sequence[Sequence[float]],
    sensitivities: Sequence[float],
    rate: float,
    multiple: int = 1,
    floor: float = 0.0,
) -> list[int]:
    """Share ``(1 - rate) * sum(full ranks)`` channels so that the summed cost of what is truncated is least.

    The cost is the sum over cells of ``sensitivity * (energy beyond the rank)``. With ``multiple=1`` no other ranks
    within the budget and floors cost less. Otherwise cells grow in steps of ``multiple`` (the last one up to the full
    rank), the step with the highest cost per channel first, and less than ``multiple`` channels stay unspent. Equal
    costs go to the earlier cell, so equal input gives equal output.

    Args:
        energies: per cell, the squared singular values of its channels, falling. Their number is its full rank.
        sensitivities: one non-negative number per cell: cost per unit of energy.
        rate: fraction of the latent channels to remove, ``0 <= rate < 1``.
        multiple: ranks are multiples of this, or the full rank.
        floor: least share of its full rank that a cell keeps, cut to ``1 - rate``.

    Returns:
        One rank per cell.

    Raises:
        ConfigError: the rate or multiple is out of range, or leaves fewer channels than the least allowed ranks.
        CalibrationError: an energy or sensitivity is negative, NaN or infinite, the energies of a cell do not fall, or
            every channel costs nothing.
    """
    _check(energies, sensitivities)
    caps = [len(cell) for cell in energies]
    budget, ranks = budget_and_floors(caps, rate, multiple, floor)
    left = budget - sum(ranks)

    def step(cell: int) -> tuple[float, int, int]:
        """The next step of a cell as a heap entry: dearest first, then the earliest cell."""
        channels = energies[cell][ranks[cell] : ranks[cell] + multiple]
        return -sensitivities[cell] * math.fsum(channels) / len(channels), cell, len(channels)

    steps = [step(cell) for cell, cap in enumerate(caps) if ranks[cell] < cap]
    heapq.heapify(steps)
    while left > 0 and steps:
        _, cell, size = heapq.heappop(steps)
        if size > left:
            continue  # what is left is less than a step; only another cell's short last step may still fit
        ranks[cell] += size
        left -= size
        if ranks[cell] < caps[cell]:
            heapq.heappush(steps, step(cell))
    return ranks


def _check(energies: Sequence[Sequence[float]], sensitivities: Sequence[float]) -> None:
    """Refuse what no order of channels follows from."""
    if len(energies) != len(sensitivities):
        raise CalibrationError(f"{len(sensitivities)} sensitivities for {len(energies)} groups. Calibrate this model.")
    numbers = [*sensitivities, *(energy for cell in energies for energy in cell)]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise CalibrationError("Energies and sensitivities must be finite and not negative. Calibrate again.")
    for cell in energies:
        if any(later > earlier + _ROUNDING * cell[0] for earlier, later in pairwise(cell)):
            raise CalibrationError("The energies of a group must fall from channel to channel. Sort them.")
    if not any(cell[0] * sensitivity > 0 for cell, sensitivity in zip(energies, sensitivities, strict=True)):
        raise CalibrationError("All energies or sensitivities are zero, so no rank is better than another. Calibrate.")
