"""The channel basis against its definition in float64: uncorrelated, invertible, costs that add up."""

import pytest
import torch
from torch import Tensor

from kvslim.caching.graded_block import GradedBasis
from kvslim.decomposing.channel_basis import DAMPING, METRICS, channel_basis, encoder
from kvslim.errors import CalibrationError, NonFiniteError

FEATURES, TOKENS = 24, 4000


def sample(seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn(FEATURES, FEATURES, generator=rng, dtype=torch.float64)
    x = torch.randn(TOKENS, FEATURES, generator=rng, dtype=torch.float64) @ mix + 3
    g = torch.randn(TOKENS, FEATURES, generator=rng, dtype=torch.float64) @ torch.diag(torch.arange(1.0, 25.0).double())
    return x, g


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("metric", METRICS)
def test_channels_are_uncorrelated_of_deviation_one_and_invertible(groups: int, metric: str) -> None:
    x, g = sample()
    basis = channel_basis(x.T @ x, x.sum(0), g.T @ g, TOKENS, groups=groups, metric=metric)  # type: ignore[arg-type]
    graded = GradedBasis(basis, kv_heads=4)
    heads = x.float().view(TOKENS, 4, -1).transpose(0, 1)
    y = graded.latents(heads)
    for part in y.view(TOKENS, groups, -1).unbind(1):
        moments = part.T @ part / TOKENS
        assert (moments - torch.eye(part.shape[1])).abs().max() < 2e-2  # float16 directions
    size = FEATURES // groups
    rows = basis.directions.float() * basis.deviations.view(groups, size, 1)
    back = (y.view(TOKENS, groups, size).transpose(0, 1) @ rows).transpose(0, 1).flatten(1) + basis.mean
    assert (back - x).abs().max() < 1e-3
    costs = basis.costs.view(groups, size)
    assert (costs[:, :-1] >= costs[:, 1:]).all()


def test_a_dropped_channel_costs_what_the_metric_says() -> None:
    """``Σ eᵀ F e`` over the tokens, with the damped ``F``, is the sum of the costs of the channels dropped."""
    x, g = sample(1)
    basis = channel_basis(x.T @ x, x.sum(0), g.T @ g, TOKENS, groups=1)
    fisher = g.T @ g / TOKENS
    fisher += DAMPING * fisher.diagonal().mean() * torch.eye(FEATURES)
    y = (x - x.mean(0)) @ encoder(basis)[0].double()
    y[:, :10] = 0
    error = y @ (basis.deviations[:, None] * basis.directions[0].float()).double()
    cost = ((error @ fisher) * error).sum() / TOKENS
    assert cost == pytest.approx(float(basis.costs[10:].sum()), rel=1e-2)


def test_the_energy_metric_is_pca() -> None:
    x, g = sample(2)
    basis = channel_basis(x.T @ x, x.sum(0), g.T @ g, TOKENS, groups=1, metric="energy")
    centred = x - x.mean(0)
    energies = torch.linalg.eigvalsh(centred.T @ centred / TOKENS).flip(0)
    assert torch.allclose(basis.deviations.double() ** 2, energies, rtol=1e-3)
    assert float(basis.costs.sum()) == pytest.approx(float(energies.sum() / (x.square().sum() / TOKENS)), rel=1e-4)


def test_features_that_never_vary_stay_invertible() -> None:
    x, g = sample(3)
    x[:, 5:11] = 2.0
    basis = channel_basis(x.T @ x, x.sum(0), g.T @ g, TOKENS, groups=1)
    assert torch.isfinite(encoder(basis)).all()
    assert int((basis.costs > 1e-6 * basis.costs[0]).sum()) == FEATURES - 6


def test_bad_sums_are_refused() -> None:
    x, g = sample(4)
    with pytest.raises(NonFiniteError, match="Calibrate again"):
        channel_basis(x.T @ x * float("nan"), x.sum(0), g.T @ g, TOKENS, groups=1)
    with pytest.raises(CalibrationError, match="other text"):
        channel_basis(x.T @ x, x.sum(0), torch.zeros(FEATURES, FEATURES), TOKENS, groups=1)
    with pytest.raises(CalibrationError, match="positive semi-definite"):
        channel_basis(-(x.T @ x), x.sum(0) * 0, g.T @ g, TOKENS, groups=1)
