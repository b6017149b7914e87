"""Ways to share a byte budget that the joint Lagrangian is compared with: equal shares, and greedy steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from kvslim.allocating.lagrangian import Allocation, FloatArray, IntArray, allocate, frontiers, least_cost
from kvslim.errors import BudgetError

Strategy = Literal["joint", "uniform", "greedy"]


def allocate_uniform(costs: Sequence[IntArray], errors: Sequence[FloatArray], budget: int) -> Allocation:
    """The same bytes for every cell, spent as well as the cell can. Cells are of one size.

    Raises:
        BudgetError: a cell's cheapest choice exceeds its share.
    """
    share = budget // len(costs)
    if any(int(cost.min()) > share for cost in costs):
        least = len(costs) * max(int(cost.min()) for cost in costs)
        raise BudgetError(f"The budget of {budget} bytes is below the least for equal shares, {least} bytes.")
    parts = [allocate([cost], [error], share) for cost, error in zip(costs, errors, strict=True)]
    return Allocation(
        tuple(part.choices[0] for part in parts),
        sum(part.cost for part in parts),
        sum(part.error for part in parts),
        float(np.mean([part.price for part in parts])),
    )


def allocate_greedy(costs: Sequence[IntArray], errors: Sequence[FloatArray], budget: int) -> Allocation:
    """From the cheapest choices upwards, always the next step that saves most error per byte.

    A cell whose next step does not fit any more stays where it is: what the dual and its repair do better.

    Raises:
        BudgetError: even the cheapest choice of every cell exceeds the budget.
    """
    cells = frontiers(costs, errors)
    slack = budget - least_cost(costs)
    if slack < 0:
        raise BudgetError(f"The budget of {budget} bytes is below the least possible, {budget - slack} bytes.")
    chosen = [0] * len(cells)

    def step(index: int) -> tuple[float, int, int]:
        cell, now = cells[index], chosen[index]
        cost = int(cell.cost[now + 1] - cell.cost[now])
        return (-float(cell.error[now] - cell.error[now + 1]) / cost, index, cost)

    heap = [step(index) for index, cell in enumerate(cells) if len(cell.cost) > 1]
    heapq.heapify(heap)
    price = 0.0
    while heap:
        rate, index, cost = heapq.heappop(heap)
        if cost > slack:
            continue
        slack, price = slack - cost, -rate
        chosen[index] += 1
        if chosen[index] + 1 < len(cells[index].cost):
            heapq.heappush(heap, step(index))
    return Allocation(
        tuple(int(cell.index[c]) for cell, c in zip(cells, chosen, strict=True)),
        budget - slack,
        float(sum(cell.error[c] for cell, c in zip(cells, chosen, strict=True))),
        price,
    )


STRATEGIES: dict[Strategy, Callable[[Sequence[IntArray], Sequence[FloatArray], int], Allocation]] = {
    "joint": allocate,
    "uniform": allocate_uniform,
    "greedy": allocate_greedy,
}
