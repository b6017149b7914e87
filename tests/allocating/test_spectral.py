"""Water-filling of ranks: exact against all plans, and the achieved rate is the requested one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslim.allocating.ranks import budget_and_floors
from kvslim.allocating.spectral import spectral_ranks
from kvslim.errors import CalibrationError, ConfigError


def spectra(channels: int) -> st.SearchStrategy[list[float]]:
    """Falling energies, ties and zeros included; none so small that a product with it is rounded to zero."""
    small = st.floats(0, 100).map(lambda value: value if value > 1e-30 else 0.0)
    energy = st.one_of(small, st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-12, 1e12))
    return st.lists(energy, min_size=1, max_size=channels).map(lambda values: sorted(values, reverse=True))


def cells(count: int, channels: int) -> st.SearchStrategy[list[tuple[list[float], float]]]:
    sensitivity = st.one_of(st.floats(1e-9, 1e9), st.sampled_from([0.0, 1.0]))
    rows = st.lists(st.tuples(spectra(channels), sensitivity), min_size=1, max_size=count)
    return rows.filter(lambda found: any(energies[0] * weight > 0 for energies, weight in found))


def cost(energies: list[list[float]], weights: list[float], ranks: tuple[int, ...] | list[int]) -> float:
    return math.fsum(w * math.fsum(e[r:]) for e, w, r in zip(energies, weights, ranks, strict=True))


@given(cells(4, 5), st.floats(0, 0.99), st.sampled_from([0.0, 0.25, 0.6]))
def test_no_other_plan_costs_less(rows: list[tuple[list[float], float]], rate: float, floor: float) -> None:
    energies, weights = [list(column) for column in zip(*rows, strict=True)]
    caps = [len(cell) for cell in energies]
    try:
        budget, floors = budget_and_floors(caps, rate, 1, floor)
    except ConfigError:
        return
    ranks = spectral_ranks(energies, weights, rate, floor=floor)
    ranges = [range(low, cap + 1) for low, cap in zip(floors, caps, strict=True)]
    plans = [plan for plan in itertools.product(*ranges) if sum(plan) <= budget]
    assert tuple(ranks) in plans
    best = min(cost(energies, weights, plan) for plan in plans)
    assert cost(energies, weights, ranks) <= best * (1 + 1e-9)
    assert sum(ranks) == budget


@given(cells(30, 40), st.floats(0, 0.999), st.integers(1, 24), st.floats(0, 1))
def test_achieved_is_requested_within_one_step(
    rows: list[tuple[list[float], float]], rate: float, multiple: int, floor: float
) -> None:
    energies, weights = [list(column) for column in zip(*rows, strict=True)]
    caps = [len(cell) for cell in energies]
    wanted = (1 - rate) * sum(caps)
    try:
        ranks = spectral_ranks(energies, weights, rate, multiple, floor)
    except ConfigError:
        assert wanted < sum(budget_and_floors(caps, 0.0, multiple, min(floor, 1 - rate))[1]) + 1
        return
    assert wanted - multiple - 1e-6 < sum(ranks) <= wanted + 1e-5
    for rank, cap in zip(ranks, caps, strict=True):
        assert min(multiple, cap) <= rank <= cap
        assert rank % multiple == 0 or rank == cap
        assert rank > min(floor, 1 - rate) * cap - multiple - 1e-6
    assert ranks == spectral_ranks(energies, weights, rate, multiple, floor)


@given(cells(6, 12), st.floats(0, 0.9), st.floats(1e-3, 1e3))
def test_the_unit_of_the_sensitivities_does_not_matter(
    rows: list[tuple[list[float], float]], rate: float, unit: float
) -> None:
    energies, weights = [list(column) for column in zip(*rows, strict=True)]
    try:
        ranks = spectral_ranks(energies, weights, rate)
    except ConfigError:
        return
    scaled = spectral_ranks(energies, [weight * 2.0 ** round(math.log2(unit)) for weight in weights], rate)
    assert scaled == ranks  # powers of two scale without rounding


def test_channels_go_where_they_save_the_most() -> None:
    flat, steep = [4.0, 4.0, 4.0, 4.0], [9.0, 3.0, 1.0, 0.0]
    assert spectral_ranks([flat, steep], [1.0, 1.0], 0.5) == [3, 1]
    assert spectral_ranks([flat, steep], [1.0, 10.0], 0.5) == [1, 3]
    assert spectral_ranks([flat, steep], [1.0, 0.0], 0.5, floor=0.5) == [2, 2]


def test_steps_end_at_full_ranks_that_are_no_multiple() -> None:
    assert spectral_ranks([[5.0] * 6, [1.0] * 6], [1.0, 1.0], 1 / 6, 4) == [6, 4]
    assert spectral_ranks([[5.0] * 6, [1.0] * 6], [1.0, 1.0], 0.0, 4) == [6, 6]
    # a step of 4 does not fit into the 2 that are left, the short last step of the other cell does
    assert spectral_ranks([[5.0] * 9, [1.0] * 6], [1.0, 1.0], 1 / 3, 4) == [4, 6]


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rate_out_of_range(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        spectral_ranks([[1.0]], [1.0], rate)


def test_budget_below_the_least_ranks_names_the_highest_rate() -> None:
    with pytest.raises(ConfigError, match=r"highest rate here is 0\.5000"):
        spectral_ranks([[1.0] * 64] * 4, [1.0] * 4, 0.9, 32)


@pytest.mark.parametrize(
    ("energies", "weights", "message"),
    [
        ([[1.0], [1.0]], [1.0], "1 sensitivities for 2 groups"),
        ([[1.0]], [-1.0], "not negative"),
        ([[1.0, float("nan")]], [1.0], "finite"),
        ([[float("inf")]], [1.0], "finite"),
        ([[1.0, 2.0]], [1.0], "must fall"),
        ([[0.0], [1.0]], [1.0, 0.0], "zero"),
    ],
)
def test_unusable_statistics(energies: list[list[float]], weights: list[float], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        spectral_ranks(energies, weights, 0.5)
