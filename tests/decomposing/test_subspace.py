"""Products, Gram matrices, Cholesky QR and nested bases against float64, also where ranks are deficient."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.decomposing import subspace


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def defect(basis: torch.Tensor) -> float:
    """Largest entry of ``QᵀQ − I``."""
    wide = basis.double()
    return float((wide.mT @ wide - torch.eye(basis.shape[-1], dtype=torch.float64)).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (2500, 7), (1100, 300)])
def test_gram_is_the_product_with_the_transpose(arithmetic: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    a = randn(*shape, dtype=dtype)
    expected = a.double().T @ a.double()
    for given_a in (a, a.T.contiguous().T):
        assert torch.allclose(subspace.gram(given_a).double(), expected, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_products_keep_the_precision_of_the_second_factor(arithmetic: str, dtype: torch.dtype, scale: float) -> None:
    a, b = randn(50, 80, dtype=dtype), randn(80, 6, seed=1) * scale
    expected = a.double() @ b.double()
    assert float((subspace.product(a, b) - expected).norm() / expected.norm()) < 2**-16
    assert subspace.product(a, b[:, :0]).shape == (50, 0)


@settings(max_examples=25, deadline=None)
@given(order=st.integers(1, 40), leaf=st.integers(1, 12), seed=st.integers(0, 99))
def test_inverse_cholesky_for_any_block_size(order: int, leaf: int, seed: int) -> None:
    a = randn(2, order + 5, order, seed=seed, dtype=torch.float64)
    s = a.mT @ a
    expected = torch.linalg.inv(torch.linalg.cholesky(s))
    assert torch.allclose(subspace.inverse_cholesky(s, leaf), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_cholesky_qr_spans_what_the_columns_span_in_their_order(condition: float) -> None:
    y = randn(2, 200, 70, dtype=torch.float64) * torch.logspace(0, -1, 70, condition).double()
    basis = subspace.cholesky_qr(y, torch.zeros(200, 70))
    assert defect(basis) < 1e-9
    for columns in (1, 30, 70):
        expected = torch.linalg.qr(y[..., :columns]).Q
        assert torch.allclose(basis[..., :columns] @ basis[..., :columns].mT, expected @ expected.mT, atol=1e-8)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_cholesky_qr_completes_a_basis_of_deficient_rank(rank: int) -> None:
    y = randn(200, rank) @ randn(rank, 30, seed=1)
    y[:, 3] = y[:, 2]
    basis = subspace.cholesky_qr(y[None], subspace.random_directions(200, 30, 0, y.device))
    assert defect(basis) < 1e-6
    assert torch.allclose(basis @ (basis.mT @ y), y, atol=1e-4)


def test_sketch_adds_every_row_to_one_column_with_a_sign() -> None:
    rows = randn(3, 23, 7)
    signs = subspace.sketch(torch.eye(23)[None].split(5, dim=1), 5, seed=1)[0]
    assert torch.equal(signs.abs().sum(1), torch.ones(23))
    assert torch.allclose(subspace.sketch(rows.split(5, dim=1), 5, seed=1), rows.mT @ signs, atol=1e-5)
    half = rows.to(torch.bfloat16)
    assert torch.allclose(subspace.sketch(half.split(5, dim=1), 5, seed=1), half.float().mT @ signs, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_products_are_those_of_the_unfolding(arithmetic: str, dtype: torch.dtype) -> None:
    cell, basis = randn(3, 2500, 4, dtype=dtype), randn(1, 12, 5, seed=1)
    unfolded = torch.cat(list(cell), 1).double()
    expected = unfolded.T @ unfolded
    operator = subspace.TokenOperator(cell)
    for found, wanted in (
        (subspace.token_gram(cell), expected),
        (subspace.feature_gram(cell), sum(slab.T @ slab for slab in cell.double())),
        (operator(basis)[0], expected @ basis[0].double()),
        (operator.ritz(basis)[0], basis[0].double().T @ expected @ basis[0].double()),
    ):
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    rows = unfolded.float()[None].split(7, dim=1)
    assert torch.allclose(operator.sketch(7, seed=2), subspace.sketch(rows, 7, seed=2), atol=1e-4)


def test_simultaneous_iteration_captures_what_eigenvectors_capture(
    make_cell: Callable[..., torch.Tensor],
) -> None:
    unfolded = make_cell(1, 300, 96, seed=3)[0].double()
    h = torch.stack((unfolded.T @ unfolded, torch.diag(torch.arange(96.0, dtype=torch.float64))))
    w, captured = subspace.simultaneous_iteration(h, 16)
    assert defect(w) < 1e-12
    assert torch.allclose((w * (h @ w)).sum(1), captured)
    best = torch.linalg.eigvalsh(h).flip(-1)
    for rank in (1, 12, 48, 90):
        tails = [values.sum(1) - values[:, :rank].sum(1) for values in (captured, best)]
        assert (tails[0] <= 1.02 * tails[1] + 1e-9).all()
    assert torch.allclose(captured.sum(1), best.sum(1))


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_simultaneous_iteration_with_deficient_rank(rank: int) -> None:
    half = randn(1, 40, rank, dtype=torch.float64)
    w, captured = subspace.simultaneous_iteration(half @ half.mT, 16)
    assert defect(w) < 1e-12
    assert float(captured[:, :rank].sum()) == pytest.approx(float(half.square().sum()), rel=1e-6)
