"""Per-row asymmetric integers: half a step of error, constant rows exact, sizes as charged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.quantizing import integer


@settings(max_examples=40, deadline=None)
@given(bits=st.integers(1, 8), size=st.integers(1, 70), offset=st.floats(-50, 50), seed=st.integers(0, 99))
def test_error_is_at_most_half_a_step(bits: int, size: int, offset: float, seed: int) -> None:
    x = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(seed)) + offset
    stored = integer.encode(x, bits)
    error = (integer.decode(stored) - x).abs().amax(-1)
    # half a step, plus the float16 rounding of the step (over all levels) and of the minimum
    steps = stored.steps.float() * stored.gain
    allowed = 0.5 * steps + x.abs().amax(-1) * 2**-10 + (1 << bits) * steps * 2**-10
    assert (error <= allowed + 1e-6).all()


def test_bytes_per_token() -> None:
    stored = integer.encode(torch.randn(4, 10, 64), 4)
    assert stored.codes.nbytes + stored.steps.nbytes + stored.minima.nbytes == 4 * 10 * (32 + 4)


@pytest.mark.parametrize("value", [0.0, 3.0, -128.0])
def test_constant_rows_are_exact(value: float) -> None:
    x = torch.full((2, 3, 16), value)
    assert torch.equal(integer.decode(integer.encode(x, 2)), x)


@pytest.mark.parametrize("scale", [1e-15, 1e-6, 1e6, 1e15])
def test_any_magnitude(scale: float) -> None:
    x = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0)) * scale
    assert (integer.decode(integer.encode(x, 8)) - x).norm() < 0.01 * x.norm()
