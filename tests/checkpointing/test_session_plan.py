"""The plan of a prefix in bytes: every plan comes back, and none that does not fit together is taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvslim.checkpointing.session_plan import CellRecord, PrefixPlan, RowRecord, StretchRecord
from kvslim.errors import CheckpointError

CELLS = 2
numbers = st.floats(0, 1e300)
shares = st.floats(0, 1e100)
measured: dict[str, Any] = {"missed": shares, "error": shares, "energy": numbers}
exponents = st.integers(-120, 120)
owning = st.builds(
    CellRecord,
    token_rank=st.integers(1, 2**32 - 1),
    feature_rank=st.integers(1, 2**16 - 1),
    feature=st.booleans(),
    slab_rank=st.integers(0, 2**16 - 1),
    bits=st.integers(0, 8),
    gain=exponents,
    code_gain=exponents,
    **measured,
)
plain = st.builds(CellRecord, bits=st.integers(1, 8), gain=exponents, code_gain=exponents, **measured)
copied = st.builds(CellRecord, exact=st.just(True), error=shares, energy=numbers)
cells = st.tuples(*[owning | plain | copied] * CELLS)


@st.composite
def plans(draw: st.DrawFn) -> PrefixPlan:
    """Rows of a few stretches each, none shared, and then some rows twice."""
    rows, stretches, end = [], [], 0
    for _ in range(draw(st.integers(1, 3))):
        start, place, mine = draw(st.integers(0, 50)), 0, []
        for _ in range(draw(st.integers(0, 3))):
            tokens = draw(st.integers(1, 1000))
            record = draw(st.just(()) | cells)
            mine.append(len(stretches))
            stretches.append(StretchRecord(start + place, place, tokens, record))
            place += tokens
        rows.append(RowRecord(start, tuple(mine)))
        end = max(end, start + place)
    batch = [*range(len(rows)), *draw(st.lists(st.integers(0, len(rows) - 1), max_size=4))]
    return PrefixPlan(max(end, 1), tuple(batch), tuple(rows), tuple(stretches))


@given(plan=plans(), rest=st.binary(max_size=9))
def test_a_plan_comes_back(plan: PrefixPlan, rest: bytes) -> None:
    assert PrefixPlan.from_bytes(plan.to_bytes() + rest, CELLS) == (plan, rest)


@given(plan=plans(), cut=st.floats(0, 1, exclude_max=True))
def test_a_plan_that_ends_too_early_is_refused(plan: PrefixPlan, cut: float) -> None:
    data = plan.to_bytes()
    with pytest.raises(CheckpointError, match="plan of the session is damaged"):
        PrefixPlan.from_bytes(data[: int(cut * len(data))], CELLS)


OWNER = CellRecord(token_rank=4, feature_rank=8, bits=2)
HEIR = CellRecord(token_rank=3, feature_rank=8, inherited=True)
EXACT = StretchRecord(0, 0, 4, ())
CODED = StretchRecord(4, 4, 10, (OWNER, CellRecord(bits=3)))
SEALED = StretchRecord(14, 14, 6, (HEIR, CellRecord(bits=3)))
PLAN = PrefixPlan(20, (0, 0), (RowRecord(0, (0, 1, 2)),), (EXACT, CODED, SEALED))


def with_stretch(index: int, **change: Any) -> PrefixPlan:
    stretches = list(PLAN.stretches)
    stretches[index] = dataclasses.replace(stretches[index], **change)
    return dataclasses.replace(PLAN, stretches=tuple(stretches))


def with_cell(index: int, **change: Any) -> PrefixPlan:
    first, second = PLAN.stretches[index].cells
    return with_stretch(index, cells=(dataclasses.replace(first, **change), second))


def test_the_owner_of_a_basis_is_the_newest_before_it() -> None:
    read, _ = PrefixPlan.from_bytes(PLAN.to_bytes(), CELLS)
    assert list(read.owners()) == [(2, 0, 1)]
    assert read.tokens == 20


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (dataclasses.replace(PLAN, columns=0), "without rows or tokens"),
        (dataclasses.replace(PLAN, columns=19), "more tokens than columns"),
        (dataclasses.replace(PLAN, columns=2**31), "more rows and columns"),
        (dataclasses.replace(PLAN, batch=(), rows=()), "without rows"),
        (dataclasses.replace(PLAN, rows=(RowRecord(0, (0, 1, 3)),)), "a stretch that is not there"),
        (dataclasses.replace(PLAN, rows=(RowRecord(0, (0, 1)),)), "a stretch that no row uses"),
        (dataclasses.replace(PLAN, rows=(RowRecord(0, (1, 0, 2)),)), "do not follow each other"),
        (dataclasses.replace(PLAN, batch=(0, 2), rows=PLAN.rows * 2), "a batch row that is not there"),
        (with_stretch(1, column=3), "do not follow each other"),
        (with_stretch(1, place=5), "do not follow each other"),
        (with_stretch(0, tokens=0), "a stretch of an unknown form"),
        (with_cell(1, bits=9), "a cell of an unknown form"),
        (with_cell(1, gain=2000), "a gain out of range"),
        (with_cell(1, error=1e200), "an error out of range"),
        (with_cell(1, error=float("nan")), "no number"),
        (with_cell(1, energy=-1.0), "no number"),
        (with_cell(1, exact=True), "two things"),
        (with_cell(1, token_rank=0, bits=0), "stores nothing"),
        (with_cell(1, token_rank=0), "a basis of rank 0"),
        (with_cell(1, feature_rank=0), "a core without features"),
        (with_cell(1, inherited=True), "inherits a basis from nothing"),
        (with_cell(2, feature_rank=7), "a basis of another shape"),
        (with_cell(2, token_rank=5), "more directions"),
    ],
)
def test_plans_that_do_not_fit_together(plan: PrefixPlan, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        list(PrefixPlan.from_bytes(plan.to_bytes(), CELLS)[0].owners())


def test_a_basis_that_depends_on_the_row_is_refused() -> None:
    other = dataclasses.replace(CODED)
    rows = (RowRecord(0, (0, 1, 2)), RowRecord(0, (0, 3, 2)))
    plan = PrefixPlan(20, (0, 1), rows, (*PLAN.stretches, other))
    with pytest.raises(CheckpointError, match="depends on the row"):
        list(PrefixPlan.from_bytes(plan.to_bytes(), CELLS)[0].owners())


def test_more_than_256_distinct_rows() -> None:
    stretches = tuple(StretchRecord(0, 0, 1, ()) for _ in range(300))
    plan = PrefixPlan(1, tuple(range(300)), tuple(RowRecord(0, (i,)) for i in range(300)), stretches)
    assert PrefixPlan.from_bytes(plan.to_bytes(), CELLS)[0] == plan
