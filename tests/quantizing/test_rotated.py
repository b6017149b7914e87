"""The rotated codec: error at the codebook's own level, exact sizes, odd shapes, degenerate rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.quantizing import rotated
from kvslim.quantizing.codebook import gaussian_levels, gaussian_mse


def relative_error(x: torch.Tensor, bits: int, kind: str = "lloyd_max") -> float:
    decoded = rotated.decode(rotated.encode(x, bits, kind=kind))  # type: ignore[arg-type]
    return float((decoded - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("kind", ["lloyd_max", "uniform"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_gaussian_rows_reach_the_codebooks_error(bits: int, kind: str) -> None:
    x = torch.randn(500, 128, generator=torch.Generator().manual_seed(1))
    optimum = gaussian_mse(gaussian_levels(bits, kind))  # type: ignore[arg-type]
    # The scale is fitted per row, so a row of 128 numbers does better than the optimum for a whole population.
    assert 0.8 * optimum < relative_error(x, bits, kind) < 1.05 * optimum
    assert rotated.distortion(bits, 128, kind) == pytest.approx(relative_error(x, bits, kind), rel=0.05)  # type: ignore[arg-type]


def test_an_outlier_channel_costs_little() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    x[:, 5] *= 30
    assert relative_error(x, 4) < 2 * relative_error(torch.randn(200, 64), 4)


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 130),
    rows=st.integers(0, 4),
    bits=st.integers(1, 8),
    power=st.integers(-60, 60),
    seed=st.integers(0, 99),
)
def test_shapes_sizes_and_scales(size: int, rows: int, bits: int, power: int, seed: int) -> None:
    x = torch.randn(2, rows, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    stored = rotated.encode(x, bits, seed=seed)
    decoded = rotated.decode(stored)
    assert decoded.shape == x.shape
    assert torch.isfinite(decoded).all()
    assert stored.codes.nbytes + stored.scales.nbytes == 2 * rows * rotated.row_bytes(size, bits)
    if rows and bits >= 4:
        assert (decoded - x).norm() <= 0.4 * x.norm()


def test_zero_rows_decode_to_zero() -> None:
    x = torch.zeros(3, 64)
    x[1] = torch.randn(64)
    decoded = rotated.decode(rotated.encode(x, 4))
    assert torch.equal(decoded[0], torch.zeros(64))
    assert torch.equal(decoded[2], torch.zeros(64))


def test_zero_bits_lose_everything() -> None:
    assert rotated.distortion(0, 64) == 1.0
    assert rotated.row_bytes(64, 0) == 0
