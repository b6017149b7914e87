"""The two decompositions, against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvslim.decomposing.whitened import (
    loss_aware_svd,
    output_energies,
    plain_output_energies,
    plain_svd,
    whitened_svd,
)
from kvslim.errors import CalibrationError, ConfigError, NonFiniteError


def correlated(tokens: int, features: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    mix = torch.randn(features, features, generator=generator, dtype=torch.float64)
    return x * torch.logspace(1, -2, features, dtype=torch.float64) @ mix


def weight(inputs: int, outputs: int, seed: int = 1) -> Tensor:
    return torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 5, 11, 16])
def test_equals_the_cholesky_whitened_svd(rank: int) -> None:
    x, w = correlated(300, 24), weight(24, 16)
    gram = x.T @ x
    lower = torch.linalg.cholesky(gram)
    u, sigma, vh = torch.linalg.svd(lower.T @ w, full_matrices=False)
    reference = torch.linalg.solve(lower.T, u[:, :rank] * sigma[:rank]) @ vh[:rank]
    decomposition = whitened_svd(w, gram)
    factors = decomposition.truncate(rank)
    torch.testing.assert_close(factors.a @ factors.b, reference, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(decomposition.singular_values, sigma, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(24, 16), (12, 20)])
def test_full_rank_is_exact(shape: tuple[int, int]) -> None:
    w, x = weight(*shape), correlated(100, shape[0])
    for decomposition in (plain_svd(w), whitened_svd(w, x.T @ x)):
        assert decomposition.full_rank == min(shape)
        factors = decomposition.truncate(min(shape))
        torch.testing.assert_close(factors.a @ factors.b, w, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [(24, 16), (12, 20)])
def test_full_rank_is_exact_with_fewer_tokens_than_features(shape: tuple[int, int]) -> None:
    w, x = weight(*shape), correlated(5, shape[0])
    factors = whitened_svd(w, x.T @ x).truncate(min(shape))
    torch.testing.assert_close(factors.a @ factors.b, w, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", range(1, 17, 3))
def test_whitening_never_raises_the_output_error(rank: int) -> None:
    x, w = correlated(300, 24), weight(24, 16)

    def error(product: Tensor) -> float:
        return float((x @ (w - product)).norm())

    white, plain = whitened_svd(w, x.T @ x).truncate(rank), plain_svd(w).truncate(rank)
    assert error(white.a @ white.b) <= error(plain.a @ plain.b) * (1 + 1e-9)


def test_singular_values_tell_the_truncation_error() -> None:
    x, w = correlated(300, 24), weight(24, 16)
    white, plain = whitened_svd(w, x.T @ x), plain_svd(w)
    for rank in (2, 7, 13):
        f = white.truncate(rank)
        tail = white.singular_values[rank:].square().sum().sqrt()
        torch.testing.assert_close((x @ (w - f.a @ f.b)).norm(), tail, rtol=1e-6, atol=1e-6)
        f = plain.truncate(rank)
        tail = plain.singular_values[rank:].square().sum().sqrt()
        torch.testing.assert_close((w - f.a @ f.b).norm(), tail, rtol=1e-9, atol=1e-9)


def test_latent_channels_are_uncorrelated_and_ordered() -> None:
    x, w = correlated(300, 24), weight(24, 16)
    latent = x @ whitened_svd(w, x.T @ x).a
    second_moment = latent.T @ latent
    energies = second_moment.diagonal()
    assert (energies[:-1] >= energies[1:] * (1 - 1e-9)).all()
    assert (second_moment - energies.diag()).abs().max() < 1e-7 * energies.max()


@pytest.mark.parametrize("rank", [0, -1, 17])
def test_rank_outside_the_matrix(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.16"):
        plain_svd(weight(24, 16)).truncate(rank)


def test_bad_gram_matrices() -> None:
    w, x = weight(24, 16), correlated(100, 24)
    gram = x.T @ x
    with pytest.raises(CalibrationError, match="24 features"):
        whitened_svd(w, gram[:20, :20])
    with pytest.raises(CalibrationError, match="positive semi-definite"):
        whitened_svd(w, -gram)
    gram[3, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="Gram"):
        whitened_svd(w, gram)
    with pytest.raises(NonFiniteError, match="weight"):
        plain_svd(w * float("inf"))


@pytest.mark.parametrize("rank", [1, 5, 11, 15])
def test_loss_aware_equals_the_svd_whitened_on_both_sides(rank: int) -> None:
    x, w, g = correlated(300, 24), weight(24, 16), correlated(200, 16, seed=2)
    gram, outputs = x.T @ x, g.T @ g
    damped = outputs + 0.1 * outputs.diagonal().mean() * torch.eye(16, dtype=torch.float64)
    left, right = torch.linalg.cholesky(gram), torch.linalg.cholesky(damped)
    u, sigma, vh = torch.linalg.svd(left.T @ w @ right, full_matrices=False)
    inner = u[:, :rank] * sigma[:rank] @ vh[:rank]
    reference = torch.linalg.solve(left.T, inner) @ torch.linalg.inv(right)
    decomposition = loss_aware_svd(w, gram, outputs)
    factors = decomposition.truncate(rank)
    torch.testing.assert_close(factors.a @ factors.b, reference, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(decomposition.singular_values, sigma, atol=1e-6, rtol=1e-6)
    cost = ((x @ (w - factors.a @ factors.b)) @ right).square().sum()
    torch.testing.assert_close(decomposition.singular_values[rank:].square().sum(), cost, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 16), (12, 20)])
def test_loss_aware_is_exact_at_full_rank_and_for_a_plain_metric(shape: tuple[int, int]) -> None:
    x, w, g = correlated(100, shape[0]), weight(*shape), correlated(5, shape[1], seed=2)
    full = loss_aware_svd(w, x.T @ x, g.T @ g)  # fewer gradients than features: the damping gives an inverse
    torch.testing.assert_close(full.a @ full.b, w, atol=1e-4, rtol=1e-4)
    plain, white = loss_aware_svd(w, x.T @ x, 3 * torch.eye(shape[1])), whitened_svd(w, x.T @ x)
    ours, own = plain.truncate(7), white.truncate(7)
    torch.testing.assert_close(ours.a @ ours.b, own.a @ own.b, atol=1e-6, rtol=1e-6)


def test_energies_alone_are_those_of_the_decompositions() -> None:
    x, w, g = correlated(300, 24), weight(24, 16), correlated(200, 16, seed=2)
    for energies, decomposition in (
        (output_energies(w, x.T @ x), whitened_svd(w, x.T @ x)),
        (output_energies(w, x.T @ x, g.T @ g), loss_aware_svd(w, x.T @ x, g.T @ g)),
    ):
        torch.testing.assert_close(energies, decomposition.singular_values.square(), rtol=1e-9, atol=1e-9)


def test_energies_of_plain_svd_add_up_to_the_errors_it_makes_of_the_outputs() -> None:
    x, w = correlated(300, 24), weight(24, 16)
    energies, plain = plain_output_energies(w, x.T @ x), plain_svd(w)
    assert (energies.diff() <= 0).all()
    errors = [float((x @ (w - plain.a[:, :r] @ plain.b[:r])).square().sum()) for r in range(17)]
    ours = [float(energies[r:].sum()) for r in range(17)]
    assert ours[0] == pytest.approx(errors[0])
    chosen = [r for r in range(17) if ours[r] == pytest.approx(errors[r], rel=1e-9, abs=1e-6)]
    assert len(chosen) >= 3  # at the ends of runs they are exact,
    assert all(one <= other + 1e-6 for one, other in zip(ours, errors, strict=True))  # and the hull lies below


def test_bad_output_gradients() -> None:
    w, x = weight(24, 16), correlated(100, 24)
    with pytest.raises(CalibrationError, match="16 features"):
        loss_aware_svd(w, x.T @ x, torch.eye(20))
    with pytest.raises(CalibrationError, match="differs from zero"):
        loss_aware_svd(w, x.T @ x, torch.zeros(16, 16))
    with pytest.raises(CalibrationError, match="positive semi-definite"):
        loss_aware_svd(w, x.T @ x, torch.eye(16) - 2 * torch.eye(16)[:, :1] @ torch.eye(16)[:1])
    with pytest.raises(NonFiniteError, match="output gradients"):
        loss_aware_svd(w, x.T @ x, torch.full((16, 16), float("nan")))


@pytest.mark.parametrize("rank", [1, 7, 16])
@pytest.mark.parametrize("exponent", [0.25, 0.5])
def test_balanced_factors_are_the_same_map_split_as_asked(rank: int, exponent: float) -> None:
    x, w = correlated(300, 24), weight(24, 16)
    for decomposition in (whitened_svd(w, x.T @ x), plain_svd(w)):
        plain, even = decomposition.truncate(rank), decomposition.balanced(rank, exponent)
        torch.testing.assert_close(even.a @ even.b, plain.a @ plain.b, atol=1e-9, rtol=1e-9)
        powers = even.b.norm(dim=1).pow(1 / exponent) / decomposition.singular_values[:rank]
        torch.testing.assert_close(powers, powers[:1].expand(rank))
    whitened = whitened_svd(w, x.T @ x)
    plain, even = (x @ factors.a for factors in (whitened.truncate(rank), whitened.balanced(rank, exponent)))
    torch.testing.assert_close(even.norm(), plain.norm(), rtol=1e-5, atol=0)


def test_channels_without_energy_stay_finite() -> None:
    w = weight(24, 16)
    w[:, 8:] = w[:, :8]
    for decomposition in (plain_svd(w), plain_svd(torch.zeros(6, 4)), whitened_svd(w, torch.eye(24))):
        factors = decomposition.balanced(decomposition.full_rank, 0.25)
        assert torch.isfinite(factors.a).all()
        assert torch.isfinite(factors.b).all()
        wanted = decomposition.truncate(decomposition.full_rank)
        torch.testing.assert_close(factors.a @ factors.b, wanted.a @ wanted.b, atol=1e-8, rtol=1e-8)
