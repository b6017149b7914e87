"""The codebooks are the published optima of the normal distribution."""

import pytest
import torch

from kvslim.errors import ConfigError
from kvslim.quantizing.codebook import gaussian_levels, gaussian_mse, midpoints

# Max (1960), Table I: mean squared error of the optimum quantizer of a standard normal variable.
LLOYD_MAX_MSE = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
# Max (1960), Table II: the same for equally spaced levels.
UNIFORM_MSE = {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154, 5: 0.003495}


@pytest.mark.parametrize(("bits", "mse"), LLOYD_MAX_MSE.items())
def test_lloyd_max_matches_the_published_table(bits: int, mse: float) -> None:
    assert gaussian_mse(gaussian_levels(bits)) == pytest.approx(mse, rel=3e-3)


@pytest.mark.parametrize(("bits", "mse"), UNIFORM_MSE.items())
def test_uniform_matches_the_published_table(bits: int, mse: float) -> None:
    assert gaussian_mse(gaussian_levels(bits, "uniform")) == pytest.approx(mse, rel=3e-3)


@pytest.mark.parametrize("kind", ["lloyd_max", "uniform"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_sorted_and_symmetric(bits: int, kind: str) -> None:
    levels = gaussian_levels(bits, kind)  # type: ignore[arg-type]
    assert len(levels) == 1 << bits
    assert (levels.diff() > 0).all()
    assert torch.equal(levels, -levels.flip(0))


@pytest.mark.parametrize("bits", range(2, 9))
def test_lloyd_max_is_a_fixed_point(bits: int) -> None:
    """Moving any level either way must not lower the error."""
    levels = gaussian_levels(bits)
    best = gaussian_mse(levels)
    for index in range(0, len(levels), max(1, len(levels) // 8)):
        for shift in (-1e-3, 1e-3):
            moved = levels.clone()
            moved[index] += shift
            assert gaussian_mse(moved) >= best - 1e-15


def test_error_matches_a_sample() -> None:
    levels = gaussian_levels(3)
    x = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nearest = levels[torch.bucketize(x, midpoints(levels))]
    assert (nearest - x).square().mean().item() == pytest.approx(gaussian_mse(levels), rel=0.02)


def test_bad_requests() -> None:
    with pytest.raises(ConfigError, match="1 to 8"):
        gaussian_levels(9)
    with pytest.raises(ConfigError, match="lloyd_max, uniform"):
        gaussian_levels(4, "nonsense")  # type: ignore[arg-type]
