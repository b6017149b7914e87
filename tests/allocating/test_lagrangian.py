"""The allocator: never over budget, close to the exhaustive optimum, deterministic, clear when it cannot."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.allocating.lagrangian import allocate
from kvslim.errors import BudgetError


def convex_cells(rng: np.random.Generator, cells: int, choices: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Rate-distortion curves as a codec gives them: error falls by a factor per step of cost."""
    costs = [np.cumsum(rng.integers(1, 50, choices)) for _ in range(cells)]
    errors = [rng.random() * np.exp(-c / (20 + 60 * rng.random())) for c in costs]
    return costs, errors


def optimum(costs: list[np.ndarray], errors: list[np.ndarray], budget: int) -> float:
    return min(
        sum(e[i] for e, i in zip(errors, chosen, strict=True))
        for chosen in itertools.product(*(range(len(c)) for c in costs))
        if sum(c[i] for c, i in zip(costs, chosen, strict=True)) <= budget
    )


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10_000), cells=st.integers(1, 30), choices=st.integers(1, 40), share=st.floats(0, 1.2))
def test_budget_holds_for_any_table(seed: int, cells: int, choices: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 1000, choices) for _ in range(cells)]
    errors = [rng.random(choices) for _ in range(cells)]
    least, most = sum(int(c.min()) for c in costs), sum(int(c.max()) for c in costs)
    budget = int(least + share * (most - least))
    result = allocate(costs, errors, budget)
    assert result.cost == sum(int(c[i]) for c, i in zip(costs, result.choices, strict=True)) <= budget
    assert result.error == pytest.approx(sum(float(e[i]) for e, i in zip(errors, result.choices, strict=True)))
    assert result == allocate(costs, errors, budget)


def test_gap_to_the_exhaustive_optimum_on_codec_like_curves() -> None:
    rng, gaps = np.random.default_rng(0), []
    for _ in range(150):
        costs, errors = convex_cells(rng, 4, 6)
        low, high = sum(int(c.min()) for c in costs), sum(int(c.max()) for c in costs)
        budget = int(rng.integers(low, high + 1))
        gaps.append(allocate(costs, errors, budget).error / optimum(costs, errors, budget))
    assert max(gaps) < 1.06  # four cells of six coarse choices: one stranded step is a large share
    assert float(np.mean(gaps)) < 1.002


def test_the_hull_is_not_the_limit() -> None:
    """A choice inside the convex hull is out of the dual's reach; the repair must find it."""
    costs = [np.array([0, 10, 20]), np.array([0, 10, 20])]
    errors = [np.array([1.0, 0.9, 0.0]), np.array([1.0, 0.9, 0.0])]
    assert allocate(costs, errors, 30).error == pytest.approx(0.9)
    assert allocate(costs, errors, 10).error == pytest.approx(1.9)


def test_more_budget_never_hurts_much_and_enough_takes_the_best() -> None:
    costs, errors = convex_cells(np.random.default_rng(3), 10, 20)
    low, high = sum(int(c.min()) for c in costs), sum(int(c.max()) for c in costs)
    found = [allocate(costs, errors, b).error for b in np.linspace(low, high, 15).astype(int)]
    assert all(later <= earlier * 1.001 for earlier, later in itertools.pairwise(found))
    assert found[-1] == pytest.approx(sum(float(e.min()) for e in errors))


def test_impossible_budget_names_the_least() -> None:
    with pytest.raises(BudgetError, match="least possible, 30 bytes"):
        allocate([np.array([10, 20]), np.array([20, 40])], [np.array([1.0, 0.0])] * 2, 29)
