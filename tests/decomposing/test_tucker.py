"""Partial Tucker by ST-HOSVD: exact at full rank, tails that add up, orthonormal bases, degenerate tensors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.decomposing.tucker import hosvd, truncate


def relative_error(x: torch.Tensor, token_rank: int, feature_rank: int) -> float:
    rebuilt = truncate(x, token_rank, feature_rank).reconstruct()
    return float((rebuilt - x).norm() / x.norm())


@settings(max_examples=40, deadline=None)
@given(slabs=st.integers(1, 4), tokens=st.integers(1, 40), features=st.integers(1, 12), seed=st.integers(0, 99))
def test_full_rank_is_exact_for_any_shape(slabs: int, tokens: int, features: int, seed: int) -> None:
    x = torch.randn(slabs, tokens, features, generator=torch.Generator().manual_seed(seed))
    assert relative_error(x, 1000, features) < 1e-5


@pytest.mark.parametrize("shape", [(3, 100, 8), (4, 10, 16)])  # Gram on the feature side, and on the token side
def test_token_truncation_equals_the_svd(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    unfolded = x.permute(1, 0, 2).reshape(shape[1], -1).double()
    singular = torch.linalg.svdvals(unfolded)
    for rank in (1, 3, 7):
        expected = math.sqrt(float(singular[rank:].square().sum() / singular.square().sum()))
        assert relative_error(x, rank, shape[2]) == pytest.approx(expected, rel=1e-5)
        assert float(hosvd(x).tail()[rank, shape[2]]) == pytest.approx(expected**2, rel=1e-9)


def test_error_is_the_sum_of_the_sequential_tails() -> None:
    x = torch.randn(3, 60, 10, generator=torch.Generator().manual_seed(1))
    spectra = hosvd(x)
    first = x.double() @ spectra.feature_basis[:, :6] @ spectra.feature_basis[:, :6].T
    feature_tail = float((x.double() - first).square().sum())
    singular = torch.linalg.svdvals(first.permute(1, 0, 2).reshape(60, -1))
    expected = feature_tail + float(singular[9:].square().sum())
    factors = truncate(x, 9, 6, spectra)
    error = float((factors.reconstruct().double() - x.double()).square().sum())
    assert error == pytest.approx(expected, rel=1e-5)


def test_tail_table_bounds_the_sequential_error() -> None:
    """The allocator's τ is the error of truncating the full HOSVD; truncating in sequence is at least as good."""
    x = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(2))
    tail = hosvd(x).tail()
    for token_rank, feature_rank in ((1, 1), (5, 4), (12, 7), (16, 8)):
        assert relative_error(x, token_rank, feature_rank) ** 2 <= float(tail[token_rank, feature_rank]) + 1e-6


def test_bases_are_orthonormal_even_when_rank_deficient() -> None:
    low = torch.randn(2, 40, 2) @ torch.randn(2, 2, 6)
    factors = truncate(low, 9, 5)
    rows = factors.core.transpose(0, 1).flatten(1)
    assert torch.allclose(rows @ rows.T, torch.eye(9), atol=1e-5)
    assert factors.feature is not None
    assert torch.allclose(factors.feature.T @ factors.feature, torch.eye(5), atol=1e-5)
    assert torch.allclose(factors.reconstruct(), low, atol=1e-4)


def test_heads_are_not_mixed() -> None:
    """Rank one in tokens and features still keeps as many independent cores as there are heads."""
    x = torch.einsum("m,t,d->mtd", torch.tensor([1.0, -2.0, 5.0]), torch.randn(30), torch.randn(7))
    assert relative_error(x, 1, 1) < 1e-5


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_tensors(value: float) -> None:
    x = torch.full((2, 20, 4), value)
    assert torch.allclose(truncate(x, 1, 4).reconstruct(), x, atol=1e-5)
    tail = hosvd(x).tail()
    assert torch.isfinite(tail).all()
    assert float(tail[1, 1]) < 1e-9


def test_rank_zero_is_nothing() -> None:
    x = torch.randn(2, 20, 4)
    assert torch.equal(truncate(x, 0, 4).reconstruct(), torch.zeros_like(x))
