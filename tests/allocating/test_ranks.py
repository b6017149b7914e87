"""Rank allocation: the achieved rate is the requested one, whatever the scores."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslim.allocating.ranks import budget_and_floors, proportional_ranks, uniform_ranks
from kvslim.errors import CalibrationError, ConfigError

scores = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.floats(0.5, 2.0))
cells = st.lists(st.tuples(scores, st.integers(1, 300)), min_size=1, max_size=60).filter(
    lambda rows: any(score > 0 for score, _ in rows)
)


@given(cells, st.floats(0, 0.999), st.integers(1, 64), st.floats(0, 1))
def test_achieved_is_requested_within_one_step(
    rows: list[tuple[float, int]], rate: float, multiple: int, floor: float
) -> None:
    values, caps = [list(column) for column in zip(*rows, strict=True)]
    wanted = (1 - rate) * sum(caps)
    try:
        ranks = proportional_ranks(values, caps, rate, multiple, floor)
    except ConfigError:
        assert wanted < sum(budget_and_floors(caps, 0.0, multiple, min(floor, 1 - rate))[1]) + 1
        return
    assert wanted - multiple - 1e-6 < sum(ranks) <= wanted + 1e-5
    assert all(1 <= rank <= cap for rank, cap in zip(ranks, caps, strict=True))
    assert all(rank % multiple == 0 or rank == cap for rank, cap in zip(ranks, caps, strict=True))
    assert ranks == proportional_ranks(values, caps, rate, multiple, floor)
    uniform = uniform_ranks(caps, rate, multiple)
    assert wanted - multiple - 1e-6 < sum(uniform) <= wanted + 1e-5
    assert all(rank % multiple == 0 or rank == cap for rank, cap in zip(uniform, caps, strict=True))


@given(st.lists(scores, min_size=2, max_size=40).filter(any), st.floats(0, 0.9))
def test_a_higher_score_never_gets_less(values: list[float], rate: float) -> None:
    ranks = proportional_ranks(values, [64] * len(values), rate)
    ordered = [rank for _, rank in sorted(zip(values, ranks, strict=True))]
    assert all(low <= high + 1 for low, high in itertools.pairwise(ordered))  # one step, for ties


def test_shares_follow_the_scores() -> None:
    assert proportional_ranks([1, 2, 3, 4], [100] * 4, 0.75) == [10, 20, 30, 40]
    assert proportional_ranks([0, 0, 0, 9], [100] * 4, 0.75, floor=0.1) == [10, 10, 10, 70]
    assert proportional_ranks([0, 0, 0, 9], [100] * 4, 0.9, floor=0.5) == [10, 10, 10, 10]


def test_what_a_full_cell_cannot_take_goes_to_the_others_in_proportion() -> None:
    assert proportional_ranks([1000, 1, 3], [100] * 3, 0.4) == [100, 20, 60]


def test_cells_without_score_split_what_is_left() -> None:
    assert proportional_ranks([1, 0, 0], [100] * 3, 0.4) == [100, 40, 40]


def test_uniform_and_its_remainder() -> None:
    assert uniform_ranks([192] * 4, 0.5) == [96] * 4
    ranks = uniform_ranks([192] * 60, 0.3)
    assert set(ranks) == {134, 135}
    assert sum(ranks) == 8064  # 0.7 * 192 * 60
    assert uniform_ranks([192, 64], 0.0) == [192, 64]


def test_multiples_and_caps_that_are_none() -> None:
    assert uniform_ranks([48] * 3, 0.0, 32) == [48] * 3
    assert uniform_ranks([64] * 4, 0.3, 32) == [64, 32, 32, 32]


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rate_out_of_range(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        uniform_ranks([10], rate)


def test_budget_below_the_least_ranks_names_the_highest_rate() -> None:
    with pytest.raises(ConfigError, match=r"highest rate here is 0\.5000"):
        uniform_ranks([64] * 4, 0.9, 32)


@pytest.mark.parametrize("bad", [[0.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_unusable_scores(bad: list[float]) -> None:
    with pytest.raises(CalibrationError, match="finite"):
        proportional_ranks(bad, [8, 8], 0.5)
