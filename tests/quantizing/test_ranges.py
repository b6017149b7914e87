"""Fitted ranges: never worse than the full one, better where it counts, each row for itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvslim.quantizing import integer, ranges

BITS = [2, 3, 4]
KINDS = ["gaussian", "falling", "outlier", "one side", "two values", "constant", "offset"]


def rows(kind: str, count: int, size: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    if kind == "falling":
        x /= torch.arange(1, size + 1).sqrt()
    elif kind == "outlier":
        x[:, 0] *= 100
    elif kind == "one side":
        x = x.exp()
    elif kind == "two values":
        x = (x > 0).float() - 0.3
    elif kind == "constant":
        x = x[:, :1].expand(-1, size).clone()
    elif kind == "offset":
        x = 0.01 * x + 1
    return (x * (scale / float(x.abs().max()))).clamp(-scale, scale)


def error(x: Tensor, minima: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Squared error of each row through the stored form, float64."""
    back = integer.decode(integer.encode_in_range(x, minima, steps, bits))
    return (back.double() - x.double()).square().sum(-1)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(BITS),
    st.integers(1, 90),
    st.integers(0, 999),
    st.sampled_from([1e-7, 1e-3, 1.0, 700.0, 60000.0]),
)
def test_no_row_is_worse_than_with_its_full_range(kind: str, bits: int, size: int, seed: int, scale: float) -> None:
    x = rows(kind, 5, size, seed, scale)
    minima, steps = ranges.fitted_range(x, bits)
    assert minima.dtype == steps.dtype == torch.float16
    assert minima.shape == steps.shape == (5,)
    assert (steps >= 0).all()
    assert ((minima.float() + (2**bits - 1) * steps.float()).abs() <= torch.finfo(torch.float16).max).all()
    plain = error(x, *integer.full_range(x, bits), bits)
    # errors are compared in grains of a 2**-22th of the squared unit, which is above the step by less than a rounding
    grain = (steps.double() + x.abs().amax(-1).double() * 2**-9 + 2.0**-24).square() * 2.0**-20
    assert (error(x, minima, steps, bits) <= plain * (1 + 1e-5) + grain * size).all()


@pytest.mark.parametrize(("bits", "share"), [(2, 0.45), (3, 0.72), (4, 0.89)])
@pytest.mark.parametrize("size", [192, 256])
def test_gaussian_rows_lose_much_of_their_error(bits: int, share: float, size: int) -> None:
    x = torch.randn(500, size, generator=torch.Generator().manual_seed(1))
    fitted, plain = (error(x, *how(x, bits), bits).sum() for how in (ranges.fitted_range, integer.full_range))
    assert fitted < share * plain
    if bits == 2:  # the least that four evenly spaced levels can make of a Gaussian is 0.1188 (Max, 1960)
        assert fitted < 0.1188 * x.square().sum() * 1.03


def test_a_row_by_hand() -> None:
    # The full range 0 … 9 has levels 0, 3, 6, 9 and errs by 0 + 1 + 1 + 0. Levels of one step and one minimum
    # through 0, 2, 4 and 9 cannot err less: 0, 2, 4 are fitted and 9 is off by 3.
    x = torch.tensor([[0.0, 2.0, 4.0, 9.0], [0.0, 1.0, 2.0, 3.0]])
    minima, steps = ranges.fitted_range(x, 2)
    assert error(x, minima, steps, 2)[0] <= 2
    assert (minima[1], steps[1]) == (0, 1)


def test_the_last_fit_is_a_least_squares_fit() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    minima, steps = ranges.fitted_range(x, 2)
    codes = integer.codes_of(x, minima, steps, 2).double()
    best = []
    for row, code in zip(x.double(), codes, strict=True):
        design = torch.stack([torch.ones_like(code), code], 1)
        best.append((row - design @ torch.linalg.lstsq(design, row[:, None]).solution[:, 0]).square().sum())
    ours = error(x, minima, steps, 2)
    assert ours.sum() < 1.01 * torch.stack(best).sum()


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_fitted_bit_for_bit_alike_alone_and_among_many(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([rows(kind, 20, 45, 3) for kind in KINDS])
    whole = ranges.fitted_range(x, bits)
    alone = [ranges.fitted_range(row[None], bits) for row in x]
    spaced = torch.stack([x, x], -1).flatten(1)[:, ::2]  # another layout in memory
    monkeypatch.setattr(ranges, "_PORTION", 5000)
    for other in (
        [torch.cat(parts) for parts in zip(*alone, strict=True)],
        ranges.fitted_range(spaced, bits),
        ranges.fitted_range(x.view(7, 20, 45), bits),
    ):
        for mine, theirs in zip(whole, other, strict=True):
            assert torch.equal(mine, theirs.flatten())


def test_eight_bits_keep_the_full_range() -> None:
    x = rows("gaussian", 4, 64, 0)
    for mine, plain in zip(ranges.fitted_range(x, 8), integer.full_range(x, 8), strict=True):
        assert torch.equal(mine, plain)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x = rows("gaussian", 3, 16, 0)
    wanted = ranges.fitted_range(x, 3)
    x[1, 5] = float("nan")
    minima, steps = ranges.fitted_range(x, 3)
    assert minima.isnan().tolist() == steps.isnan().tolist() == [False, True, False]
    assert torch.equal(minima[::2], wanted[0][::2])
    assert torch.equal(steps[::2], wanted[1][::2])
