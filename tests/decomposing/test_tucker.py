"""Partial Tucker by ST-HOSVD: exact at full rank, tails that add up, orthonormal bases, degenerate tensors."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import tensorly
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorly.decomposition import partial_tucker

from kvslim.decomposing.flash import spectra
from kvslim.decomposing.hosvd import ROUTES, SpectrumRoute
from kvslim.decomposing.tucker import hosvd, leading_slabs, truncate

MakeCell = Callable[..., torch.Tensor]


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
@pytest.mark.parametrize("ranks", [(1, 4), (1, 2), (5, 3), (9, 4)])
@pytest.mark.parametrize("route", ROUTES)
def test_constant_tensors(arithmetic: str, route: SpectrumRoute, ranks: tuple[int, int], value: float) -> None:
    x = torch.full((3, 20, 4), value)
    found = spectra(x, route)
    factors = truncate(x, *ranks, found)
    assert torch.allclose(factors.reconstruct(), x, atol=1e-5)
    rows = factors.core.transpose(0, 1).flatten(1)
    assert torch.allclose(rows @ rows.T, torch.eye(len(rows)), atol=1e-5)
    tail = found.tail()
    assert torch.isfinite(tail).all()
    assert float(tail[1, 1]) < 1e-5


def test_rank_zero_is_nothing() -> None:
    x = torch.randn(2, 20, 4)
    assert torch.equal(truncate(x, 0, 4).reconstruct(), torch.zeros_like(x))


def error_of(x: torch.Tensor, rebuilt: torch.Tensor) -> float:
    return float((rebuilt.double() - x.double()).norm() / x.double().norm())


@pytest.mark.parametrize("shape", [(3, 120, 16), (4, 40, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [(6, 16), (10, 6)])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_truncates_nearly_as_well_as_the_exact_one(
    arithmetic: str,
    make_cell: MakeCell,
    route: SpectrumRoute,
    ranks: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int, int],
) -> None:
    x = make_cell(*shape).to(dtype)
    best = error_of(x, truncate(x.float(), *ranks).reconstruct())
    found = spectra(x, route, cap=10)
    for given_spectra in (found, dataclasses.replace(found, token_vectors=None)):
        factors = truncate(x, *ranks, given_spectra)
        assert {factors.core.dtype, factors.token.dtype} == {torch.float32}
        rows = factors.core.transpose(0, 1).flatten(1)
        assert torch.allclose(rows @ rows.T, torch.eye(ranks[0]), atol=1e-5)
        error = error_of(x, factors.reconstruct())
        assert error <= {"exact": 1 + 1e-6, "gram": 1.005, "randomized": 1.02}[route] * best + 1e-6
        assert error**2 <= float(found.tail()[ranks]) + 1e-5


@pytest.mark.parametrize("route", ROUTES)
def test_the_token_factor_projects_tokens_onto_the_core(make_cell: MakeCell, route: SpectrumRoute) -> None:
    """So a token that comes later gets its coefficients from the core alone."""
    x = make_cell(3, 60, 10)
    factors = truncate(x, 7, 6, spectra(x, route))
    assert factors.feature is not None
    later = torch.einsum("mtd,dk,mrk->tr", x[:, 40:], factors.feature, factors.core)
    assert torch.allclose(later, factors.token[40:], atol=1e-5)


@pytest.mark.parametrize("route", ["gram", "randomized"])
def test_ranks_above_the_cap_are_cut_to_it(make_cell: MakeCell, route: SpectrumRoute) -> None:
    x = make_cell(3, 60, 10)
    found = spectra(x, route, cap=5)
    for feature_rank in (10, 7):
        assert truncate(x, 9, feature_rank, found).token.shape == (60, 5)
    assert truncate(x, 9, 12, found).feature is None


def test_tokens_alone_are_truncated_as_well_as_tensorly_does(make_cell: MakeCell) -> None:
    """One truncated mode has one best answer, which TensorLy's iterations reach too."""
    x = make_cell(3, 90, 12)
    with tensorly.backend_context("pytorch"):
        (core, factors), _ = partial_tucker(x.double(), rank=[8], modes=[1], n_iter_max=200, tol=1e-10)
        theirs = error_of(x, tensorly.tenalg.multi_mode_dot(core, factors, modes=[1]))
    assert error_of(x, truncate(x, 8, 12).reconstruct()) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("ranks", [(4, 6), (12, 8), (20, 10)])
def test_truncation_in_sequence_is_close_to_alternating_least_squares(
    make_cell: MakeCell, ranks: tuple[int, int]
) -> None:
    """TensorLy goes on from its HOSVD by HOOI, so it may gain a little on a truncation in sequence: up to 3 %."""
    x = make_cell(3, 90, 12)
    with tensorly.backend_context("pytorch"):
        (core, factors), _ = partial_tucker(x.double(), rank=list(ranks), modes=[1, 2], n_iter_max=200, tol=1e-10)
        theirs = error_of(x, tensorly.tenalg.multi_mode_dot(core, factors, modes=[1, 2]))
    ours = error_of(x, truncate(x, *ranks).reconstruct())
    assert theirs * (1 - 1e-4) <= ours <= 1.03 * theirs


def test_leading_slabs_hold_the_most_energy_of_the_slab_mode() -> None:
    """All of it where slabs depend on each other, and as much as the singular values say where they do not."""
    rng = torch.Generator().manual_seed(3)
    three = torch.randn(3, 50, 10, generator=rng)
    x = torch.einsum("mk,ktd->mtd", torch.randn(4, 3, generator=rng), three)
    for count in (1, 2, 3, 4):
        slab = leading_slabs(x, count)
        assert torch.allclose(slab.T @ slab, torch.eye(count), atol=1e-5)
        kept = torch.einsum("mk,ktd->mtd", slab, torch.einsum("mk,mtd->ktd", slab, x))
        singular = torch.linalg.svdvals(x.flatten(1).double())
        lost = float(singular[count:].square().sum().sqrt())
        assert float((kept - x).norm()) == pytest.approx(lost, abs=1e-3)
