"""One Lagrangian over all cells: the least total error under one byte budget.

Each cell offers choices, a cost in bytes and an error. The dual picks, for a price per byte, the best choice of every
cell on its own; bisection finds the price at which the budget holds (JoLT, joint allocation). The dual reaches only
choices on the convex hull and can strand bytes, so a repair follows: greedy upgrades, then swaps that lower the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvslim.errors import BudgetError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Allocation:
    """One choice per cell.

    Attributes:
        choices: index into the cell's own choices, in cell order.
        cost: total bytes, never above the budget.
        error: total error.
        price: the multiplier λ at which the dual met the budget, in error per byte.
    """

    choices: tuple[int, ...]
    cost: int
    error: float
    price: float


def allocate(costs: Sequence[IntArray], errors: Sequence[FloatArray], budget: int) -> Allocation:
    """Minimise the summed error subject to summed cost ≤ ``budget`` bytes.

    Args:
        costs: per cell, ``(n_choices,)`` integer bytes ≥ 0.
        errors: per cell, ``(n_choices,)`` errors ≥ 0, already weighted.
        budget: bytes that all cells share.

    Raises:
        BudgetError: even the cheapest choice of every cell exceeds the budget; the message names that least budget.
    """
    cells = frontiers(costs, errors)
    least = least_cost(costs)
    if least > budget:
        raise BudgetError(f"The budget of {budget} bytes is below the least possible, {least} bytes. Raise it to that.")
    price, chosen = _bisect(cells, budget)
    chosen = _repair(cells, chosen, budget)
    return Allocation(
        tuple(int(cell.index[c]) for cell, c in zip(cells, chosen, strict=True)),
        sum(int(cell.cost[c]) for cell, c in zip(cells, chosen, strict=True)),
        float(sum(cell.error[c] for cell, c in zip(cells, chosen, strict=True))),
        price,
    )


def least_cost(costs: Sequence[IntArray]) -> int:
    """Bytes of the cheapest choice of every cell together."""
    return sum(int(cost.min()) for cost in costs)


def allocate_at(costs: Sequence[IntArray], errors: Sequence[FloatArray], price: float) -> Allocation:
    """The best choice of every cell on its own at ``price`` (error per byte), without a budget."""
    chosen = [int(np.argmin(error + price * cost)) for cost, error in zip(costs, errors, strict=True)]
    pairs = list(zip(costs, errors, chosen, strict=True))
    return Allocation(tuple(chosen), sum(int(c[i]) for c, _, i in pairs), float(sum(e[i] for _, e, i in pairs)), price)


class Frontier:
    """The choices of one cell that no other choice beats: cost rising, error falling. ``index`` maps back.

    ``order`` sorts the costs; cells of one shape share it.
    """

    def __init__(self, cost: IntArray, error: FloatArray, order: IntArray | None = None) -> None:
        order = np.argsort(cost, kind="stable") if order is None else order
        best = np.minimum.accumulate(error[order])
        better = order[np.concatenate(([True], best[1:] < best[:-1]))]
        ahead = cost[better]
        self.index = better[np.concatenate((ahead[1:] > ahead[:-1], [True]))]  # of equal costs the last is the best
        self.cost = cost[self.index].astype(np.int64)
        self.error = error[self.index].astype(np.float64)


def frontiers(costs: Sequence[IntArray], errors: Sequence[FloatArray]) -> list[Frontier]:
    """One frontier per cell; a cost array that several cells share is sorted once."""
    orders = {id(cost): np.argsort(cost, kind="stable") for cost in costs}
    return [Frontier(cost, error, orders[id(cost)]) for cost, error in zip(costs, errors, strict=True)]


def _total_cost(cells: list[Frontier], chosen: list[int]) -> int:
    return sum(int(cell.cost[c]) for cell, c in zip(cells, chosen, strict=True))


def _bisect(cells: list[Frontier], budget: int) -> tuple[float, list[int]]:
    """The smallest price whose choices fit. Prices are searched on a logarithmic scale."""
    best = [len(cell.cost) - 1 for cell in cells]
    if _total_cost(cells, best) <= budget:
        return 0.0, best
    table = _Table(cells)
    cost = np.where(np.isinf(table.error), 0, table.cost).astype(np.float64)

    def at_price(price: float) -> list[int]:
        chosen: list[int] = (table.error + price * cost).argmin(1).tolist()
        return chosen

    low, high = 1e-30, 1e30
    for _ in range(200):
        middle = (low * high) ** 0.5
        if _total_cost(cells, at_price(middle)) <= budget:
            high = middle
        else:
            low = middle
        if high / low < 1 + 1e-9:
            break
    chosen = at_price(high)
    return high, chosen if _total_cost(cells, chosen) <= budget else [0] * len(cells)


class _Table:
    """All frontiers in two rectangles; a row ends in choices that nobody can afford."""

    def __init__(self, cells: list[Frontier]) -> None:
        width = max(len(cell.cost) for cell in cells)
        self.cost = np.full((len(cells), width), np.iinfo(np.int64).max)
        self.error = np.full((len(cells), width), np.inf)
        for row, cell in enumerate(cells):
            self.cost[row, : len(cell.cost)] = cell.cost
            self.error[row, : len(cell.error)] = cell.error


def _repair(cells: list[Frontier], chosen: list[int], budget: int) -> list[int]:
    """Spend what the dual left: upgrades while any fits, then swaps that pay for an upgrade with a downgrade."""
    chosen = list(chosen)
    table = _Table(cells)
    slack = budget - _total_cost(cells, chosen)
    swaps = 0
    while swaps < _SWAP_ROUNDS:
        move = _best_upgrade(cells, chosen, slack)
        if move is None and slack <= _STRANDED * budget:
            break  # nothing to win that is worth the search
        if move is None:
            move, swaps = _best_swap(table, chosen, slack), swaps + 1
        if move is None:
            break
        for cell, choice in move:
            slack -= int(cells[cell].cost[choice] - cells[cell].cost[chosen[cell]])
            chosen[cell] = choice
    return chosen


_Move = list[tuple[int, int]]
_SWAP_DEPTH = 6  # how many steps a swap may downgrade
_SWAP_ROUNDS = 40
_STRANDED = 2e-4  # share of the budget below which unspent bytes are left alone


def _best_upgrade(cells: list[Frontier], chosen: list[int], slack: int) -> _Move | None:
    """The affordable upgrade that saves the most error per byte."""
    best_rate, best = 0.0, None
    for i, (cell, now) in enumerate(zip(cells, chosen, strict=True)):
        end = int(np.searchsorted(cell.cost, cell.cost[now] + slack, side="right"))
        if end > now + 1:
            rates = (cell.error[now] - cell.error[now + 1 : end]) / (cell.cost[now + 1 : end] - cell.cost[now])
            at = int(np.argmax(rates))
            if rates[at] > best_rate:
                best_rate, best = float(rates[at]), [(i, now + 1 + at)]
    return best


def _best_swap(table: _Table, chosen: list[int], slack: int) -> _Move | None:
    """Downgrade one cell by a few steps and upgrade another with the freed bytes, if the total error falls."""
    cells = np.arange(len(chosen))
    now = np.array(chosen)
    cost, error = table.cost[cells, now], table.error[cells, now]
    best_gain, best = 1e-15 + 1e-9 * float(error.sum()), None
    for i, at in enumerate(chosen):
        for down in range(max(0, at - _SWAP_DEPTH), at):
            freed = slack + int(cost[i] - table.cost[i, down])
            up = (table.cost <= (cost + freed)[:, None]).sum(1) - 1
            gain = error - table.error[cells, up]
            gain[i] = -np.inf
            j = int(np.argmax(gain))
            total = float(gain[j] - (table.error[i, down] - error[i]))
            if total > best_gain:
                best_gain, best = total, [(i, down), (j, int(up[j]))]
    return best
