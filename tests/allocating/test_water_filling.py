"""Water-filling over runs of channels: the best widths on small cases, budgets that hold, bad tables refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.allocating.water_filling import fill, fill_at
from kvslim.errors import BudgetError, ConfigError
from kvslim.quantizing.codebook import gaussian_levels, gaussian_mse

WIDTHS = np.arange(9)
CURVE = np.array([1.0, *(gaussian_mse(gaussian_levels(bits)) for bits in range(1, 9))])


def gaussian(energies: list[float]) -> tuple[np.ndarray, np.ndarray]:
    errors = np.array(energies)[:, None] * CURVE
    return errors, np.broadcast_to(WIDTHS, errors.shape).astype(np.int64)


@settings(max_examples=80, deadline=None)
@given(
    energies=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60),
    budget=st.integers(0, 500),
)
def test_the_budget_holds_and_nothing_that_fits_is_left_undone(energies: list[float], budget: int) -> None:
    errors, costs = gaussian(energies)
    found = fill(errors, costs, budget)
    rows = np.arange(len(energies))
    assert found.cost == costs[rows, found.choices].sum() <= budget
    assert found.error == pytest.approx(errors[rows, found.choices].sum())
    left = budget - found.cost
    assert all(choice == 8 or costs[row, choice + 1] - costs[row, choice] > left
               for row, choice in zip(rows, found.choices, strict=True))  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(energies=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=4), budget=st.integers(0, 20))
def test_no_choice_of_widths_is_better_with_convex_curves(energies: list[float], budget: int) -> None:
    errors, costs = gaussian(energies)
    best = min(
        sum(errors[row, width] for row, width in enumerate(widths))
        for widths in itertools.product(range(9), repeat=len(energies))
        if sum(widths) <= budget
    )
    assert fill(errors, costs, budget).error <= best * (1 + 1e-9)


def test_one_bit_more_goes_where_the_energy_is_four_times_higher() -> None:
    """At high rate a bit divides the error by four: channels of energies 1, 4, 16 differ by one bit each."""
    found = fill(*gaussian([1.0, 4.0, 16.0]), budget=15)
    assert found.choices.tolist() == [4, 5, 6]


def test_channels_below_the_water_are_dropped() -> None:
    found = fill(*gaussian([100.0, 100.0, 1e-4]), budget=8)
    assert found.choices.tolist() == [4, 4, 0]


def test_a_curve_that_rises_by_noise_never_buys_bits_for_nothing() -> None:
    errors = np.array([[1.0, 0.5, 0.6, 0.1]])
    costs = np.array([[0, 1, 2, 3]])
    assert fill(errors, costs, 2).choices.tolist() == [1]
    assert fill_at(errors, costs, 0.0).tolist() == [3]


def test_equal_runs_are_served_in_order() -> None:
    assert fill(*gaussian([1.0] * 4), budget=2).choices.tolist() == [1, 1, 0, 0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(BudgetError, match="least possible, 4 bits"):
        fill(np.ones((2, 2)), np.array([[2, 3], [2, 3]]), 3)
    with pytest.raises(ConfigError, match="of one shape"):
        fill(np.ones((2, 2)), np.zeros((2, 3), dtype=np.int64), 3)
    with pytest.raises(ConfigError, match="finite"):
        fill(np.array([[1.0, np.nan]]), np.array([[0, 1]]), 3)
    with pytest.raises(ConfigError, match="rise"):
        fill(np.array([[1.0, 0.5]]), np.array([[1, 0]]), 3)
