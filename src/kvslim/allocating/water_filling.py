"""Bits per run of channels under one budget: reverse water-filling with measured curves instead of a formula.

A *run* is a few neighbouring latent channels that share a code width. Each run offers every width, with a cost in bits
and an error from measured quantization curves; zero bits drop its channels, so rank and bits are one decision. For a
price per bit every run takes its best width on its own, bisection finds the price at which the budget holds, and what
is left over goes to the runs that gain most from it. The result depends on nothing but the tables and the budget.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvslim.errors import BudgetError, ConfigError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_ROUNDS = 200
_LOWEST, _HIGHEST = 1e-60, 1e60


@dataclass(frozen=True)
class Filling:
    """One width per run.

    Attributes:
        choices: ``(runs,)`` index into the widths.
        cost: bits of all runs, never above the budget.
        error: summed error.
        price: error per bit at which the widths were chosen; what the next bit would save is below it.
    """

    choices: IntArray
    cost: int
    error: float
    price: float


def fill(errors: FloatArray, costs: IntArray, budget: int) -> Filling:
    """Choose a width for every run such that the summed error is least and the cost at most ``budget``.

    Args:
        errors: ``(runs, widths)`` error ≥ 0 of each run at each width.
        costs: ``(runs, widths)`` bits, rising along the widths; the first is the least that a run can cost.
        budget: bits of all runs together.

    Raises:
        ConfigError: a table has the wrong shape, or holds NaN or negative numbers.
        BudgetError: the least possible cost exceeds the budget; the message names it.
    """
    if errors.ndim != 2 or errors.shape != costs.shape or not errors.size:
        raise ConfigError(f"Errors {errors.shape} and costs {costs.shape} are tables (runs, widths) of one shape.")
    if not np.isfinite(errors).all() or errors.min() < 0 or (np.diff(costs, axis=1) < 0).any() or costs.min() < 0:
        raise ConfigError("Errors are finite and at least zero, and costs rise along the widths.")
    least = int(costs[:, 0].sum())
    if least > budget:
        raise BudgetError(f"The budget of {budget} bits is below the least possible, {least} bits. Raise it to that.")
    errors = np.minimum.accumulate(errors, axis=1)  # a measured curve may rise by noise; more bits never lose
    price, choices = _price(errors, costs, budget)
    _spend(errors, costs, choices, budget)
    rows = np.arange(len(choices))
    return Filling(choices, int(costs[rows, choices].sum()), float(errors[rows, choices].sum()), price)


def fill_at(errors: FloatArray, costs: IntArray, price: float) -> IntArray:
    """The best width of every run on its own at ``price`` error per bit; of equally good ones the narrowest."""
    best: IntArray = (np.minimum.accumulate(errors, axis=1) + price * costs).argmin(1)
    return best


def _price(errors: FloatArray, costs: IntArray, budget: int) -> tuple[float, IntArray]:
    """The least price whose widths fit, searched on a logarithmic scale, and these widths."""
    rows = np.arange(len(errors))
    free = errors.argmin(1)
    if int(costs[rows, free].sum()) <= budget:
        return 0.0, free
    low, high = _LOWEST, _HIGHEST
    best = np.zeros(len(errors), dtype=np.int64)
    for _ in range(_ROUNDS):
        middle = math.sqrt(low) * math.sqrt(high)
        choices = fill_at(errors, costs, middle)
        if int(costs[rows, choices].sum()) <= budget:
            high, best = middle, choices
        else:
            low = middle
        if high / low < 1 + 1e-12:
            break
    return high, best


def _spend(errors: FloatArray, costs: IntArray, choices: IntArray, budget: int) -> None:
    """Widen runs in place while anything fits, the largest saving per bit first; equal ones by their order."""
    left = budget - int(costs[np.arange(len(choices)), choices].sum())

    def step(run: int) -> tuple[float, int, int, int] | None:
        """(negative saving per bit, run, width, bits) of the best widening of a run that fits now."""
        now = int(choices[run])
        bits = costs[run, now + 1 :] - costs[run, now]
        saved = errors[run, now] - errors[run, now + 1 :]
        fits = (bits <= left) & (saved > 0) & (bits > 0)
        if not fits.any():
            return None
        rate = np.where(fits, saved / np.maximum(bits, 1), -1.0)
        at = int(rate.argmax())
        return (-float(rate[at]), run, now + 1 + at, int(bits[at]))

    heap = [found for run in range(len(choices)) if (found := step(run)) is not None]
    heapq.heapify(heap)
    while heap:
        _, run, width, bits = heapq.heappop(heap)
        if bits <= left and costs[run, width] - costs[run, choices[run]] == bits:
            choices[run] = width
            left -= bits
        if (again := step(run)) is not None:
            heapq.heappush(heap, again)
