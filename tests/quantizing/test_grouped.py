"""Codes of latents by themselves: error bounds, bytes, independence of tokens, extreme values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvslim.quantizing import grouped

BITS = st.sampled_from([2, 3, 4, 8])
RANKS = st.lists(st.integers(1, 70), min_size=1, max_size=4)


def made(batch: int, tokens: int, ranks: list[int], seed: int, scale: float = 1.0) -> Tensor:
    """Latents whose channels fall in size, off zero."""
    generator = torch.Generator().manual_seed(seed)
    width = sum(ranks)
    return scale * (torch.randn(batch, tokens, width, generator=generator) / torch.arange(1, width + 1).sqrt() + 0.3)


def half_ulp(x: Tensor) -> Tensor:
    """Half the distance to the next float16, the most that rounding to float16 moves ``x``."""
    x = x.to(torch.float16).float().abs().clamp_min(2.0**-14)
    return 2.0 ** (x.log2().floor() - 11)


@settings(max_examples=60, deadline=None)
@given(
    RANKS,
    BITS,
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 1000),
    st.sampled_from([1e-4, 1.0, 3e3]),
    st.booleans(),
)
def test_a_value_comes_back_within_half_a_step_unless_it_is_clipped(
    ranks: list[int], bits: int, batch: int, tokens: int, seed: int, scale: float, fitted: bool
) -> None:
    x = made(batch, tokens, ranks, seed, scale)
    stored = grouped.encode(x, ranks, bits, fitted=fitted)
    assert stored.codes.dtype == torch.uint8
    assert stored.steps.dtype == stored.minima.dtype == torch.float16
    back = grouped.decode(stored, ranks, bits)
    assert back.shape == x.shape
    for group, (mine, theirs) in enumerate(zip(x.split(ranks, -1), back.split(ranks, -1), strict=True)):
        step, low = stored.steps[..., group, None].float(), stored.minima[..., group, None].float()
        high = low + (2**bits - 1) * step
        wanted = mine.clamp(low, high) if fitted and bits < 8 else mine  # a fitted range clips what lies beyond it
        bound = step / 2 + (2**bits - 1) * half_ulp(step) + half_ulp(low)
        assert ((wanted - theirs).abs() <= bound * 1.001 + 1e-7 * scale).all()


@settings(max_examples=40, deadline=None)
@given(RANKS, BITS, st.integers(1, 3), st.integers(0, 9))
def test_bytes_are_those_of_the_formula(ranks: list[int], bits: int, batch: int, tokens: int) -> None:
    stored = grouped.encode(made(batch, tokens, ranks, 0), ranks, bits)
    held = [stored.codes, stored.steps, stored.minima]
    assert sum(t.numel() * t.element_size() for t in held) == batch * tokens * grouped.token_bytes(ranks, bits)


def test_bytes_by_hand() -> None:
    assert grouped.token_bytes([5], 4) == 3 + 4  # 20 bits of codes; a step and a minimum of 2 bytes each
    assert grouped.token_bytes([5], 3) == (2 + 1) + 4  # planes of 10 and 5 bits
    assert grouped.token_bytes([5, 8, 8], 2) == (2 + 2 + 2) + 12
    assert grouped.token_bytes([70], 8) == 70 + 4


@settings(max_examples=40, deadline=None)
@given(RANKS, BITS, st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_a_token_does_not_depend_on_its_neighbours(ranks: list[int], bits: int, sizes: list[int]) -> None:
    x = made(2, sum(sizes), ranks, 3)
    x[0, 0] *= 1000
    whole = grouped.encode(x, ranks, bits)
    parts = [grouped.encode(part, ranks, bits) for part in x.split(sizes, 1)]
    joined = parts[0]
    for part in parts[1:]:
        joined = grouped.join(joined, part)
    assert torch.equal(joined.codes, whole.codes)
    assert torch.equal(joined.steps, whole.steps)
    assert torch.equal(joined.minima, whole.minima)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_group_does_not_depend_on_another(bits: int) -> None:
    x = made(1, 3, [6, 6], 5)
    louder = x.clone()
    louder[..., 6:] *= 500
    one, other = (grouped.decode(grouped.encode(y, [6, 6], bits), [6, 6], bits) for y in (x, louder))
    assert torch.equal(one[..., :6], other[..., :6])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fitted", [True, False])
def test_values_beyond_float16_saturate(bits: int, dtype: torch.dtype, fitted: bool) -> None:
    x = torch.tensor([[[1e6, -3.0, 0.0, -1e30], [65504.0, 1.0, 2.0, 3.0], [7e4, 7e4, 7e4, 7e4]]], dtype=dtype)
    stored = grouped.encode(x, [4], bits, fitted=fitted)
    assert torch.isfinite(stored.steps).all()
    assert torch.isfinite(stored.minima).all()
    back = grouped.decode(stored, [4], bits)
    assert torch.isfinite(back.to(torch.float16)).all()  # in a float16 model too
    largest = grouped.LARGEST
    if bits == 8 or not fitted:  # a fitted range clips the ends
        torch.testing.assert_close(back[0, 0, [0, 3]], torch.tensor([largest, -largest]), rtol=2e-3, atol=0)
    torch.testing.assert_close(back[0, 2], torch.full((4,), largest), rtol=1e-3, atol=0)


def test_what_is_not_a_number_shows_in_its_group_alone() -> None:
    x = made(1, 3, [4, 4], 1)
    x[0, 0, 1], x[0, 1, 2], x[0, 2, 5] = float("nan"), float("inf"), -float("inf")
    back = grouped.decode(grouped.encode(x, [4, 4], 4), [4, 4], 4)[0]
    bad = back.isnan().view(3, 2, 4).all(-1)
    assert bad.tolist() == [[True, False], [True, False], [False, True]]
    assert back.isnan().sum() == 12


def test_a_constant_group_keeps_its_value() -> None:
    x = torch.full((1, 2, 9), 1.25)
    assert torch.equal(grouped.decode(grouped.encode(x, [1, 8], 2), [1, 8], 2), x)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_fitted_range_lowers_the_error_of_every_group(bits: int) -> None:
    x, ranks = made(2, 50, [60, 40], 7), [60, 40]
    errors = [grouped.decode(grouped.encode(x, ranks, bits, fitted=f), ranks, bits) - x for f in (True, False)]
    for mine, plain in zip(*(error.square().split(ranks, -1) for error in errors), strict=True):
        assert (mine.sum(-1) <= plain.sum(-1) * (1 + 1e-5)).all()
        assert mine.sum() < 0.95 * plain.sum()
