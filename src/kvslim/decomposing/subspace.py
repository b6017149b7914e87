"""Leading eigenvectors of Gram matrices without an SVD: the numerics under the Flash routes.

Everything here is batched, uses matrix products, Cholesky factors of small blocks and nothing else on a GPU, never
waits for the device, and takes its random numbers from a seeded generator on the device of its input.

An orthonormal basis ``Q`` of any kind captures of a Gram matrix ``G`` exactly the energy ``tr(Qᵀ G Q)``, and its first
``r`` columns the partial trace. So eigenvectors are not needed, only a basis whose leading columns nearly span the
leading eigenvectors for every ``r``: a *nested* basis. Simultaneous iteration with Cholesky QR gives one, as the
triangular factor never mixes a column into an earlier one.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAF = 64  # order of the diagonal blocks that are factored by the library; the rest are matrix products
_LOST = 1e-2  # norm, after a shifted pass, below which a column was no more than a mix of earlier ones
_HALF_RANGE = 4096.0  # the largest entry of a Gram matrix scaled for float16: what underflows is 1e-11 of it
_PANEL = 512  # columns of a block of the Gram matrix


# ---- products --------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32, with ``b`` float32 and ``a`` float32, bfloat16 or float16; both 2-D or both 3-D.

    Half-precision ``a`` on a GPU stays as it is: ``b`` is split into two halves of its dtype and both products
    accumulate in float32, so 16 bits of ``b`` count (21 with float16), at the speed of two half-precision products.
    """
    if not a.is_cuda or a.dtype == torch.float32 or not b.numel():
        return a.to(torch.float32) @ b
    scale = b.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)  # float16 has no range to spare
    b = b / scale
    high = b.to(a.dtype)
    return (_half_product(a, high) + _half_product(a, (b - high).to(a.dtype))) * scale


def _half_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of half-precision CUDA tensors with float32 accumulation and result."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    result: Tensor = multiply(a, b, out_dtype=torch.float32)
    return result


def gram(a: Tensor) -> Tensor:
    """``aᵀ a`` of ``(rows, n)`` float32, bfloat16 or float16: ``(n, n)`` float32, exactly symmetric.

    Only the blocks on and above the diagonal are multiplied: for ``n = 4096`` that is 56 % of ``2 rows n²`` operations.
    Products of half-precision numbers are exact in float32. On a CPU they are taken in float32, as its half-precision
    products would round the result to half precision too.
    """
    n = a.shape[1]
    half = a.is_cuda and a.dtype != torch.float32
    a = a if half else a.to(torch.float32)
    if n < 2 * _PANEL:
        return _half_product(a.T, a) if half else a.T @ a
    out = torch.empty(n, n, dtype=torch.float32, device=a.device)
    for begin in range(0, n, _PANEL):
        end = min(begin + _PANEL, n)
        left = a[:, begin:end].T
        out[begin:end, begin:] = _half_product(left, a[:, begin:]) if half else left @ a[:, begin:]
        out[end:, begin:end] = out[begin:end, end:].T
    return out


class GramOperator:
    """Multiplies a batch of Gram matrices ``(B, n, n)`` float32 with bases.

    On a GPU the iterations use a float16 copy, scaled so that nothing that counts underflows: 11 bits, as TF32 has,
    without touching the process-wide TF32 switch, at twice its speed. The rounding moves eigenvalues by about 1e-5 of
    the largest, which costs the subspace nothing that matters; the Ritz values come from :meth:`precise`.
    """

    def __init__(self, grams: Tensor) -> None:
        self.grams = grams
        peak = grams.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
        self._scale = _HALF_RANGE / torch.where(peak > 0, peak, torch.ones_like(peak))
        self._half = (grams * self._scale).to(torch.float16) if grams.is_cuda else None

    def __call__(self, basis: Tensor) -> Tensor:
        """``G Q`` up to a factor per cell, in the precision of the iterations."""
        if self._half is None:
            return self.grams @ basis
        return _half_product(self._half, basis.to(torch.float16))

    def precise(self, basis: Tensor) -> Tensor:
        """``G Q`` in float32."""
        return self.grams @ basis


# ---- orthonormal bases -----------------------------------------------------------------------------------------------


def inverse_cholesky(s: Tensor, leaf: int = _LEAF) -> Tensor:
    """``L⁻¹`` of ``s = L Lᵀ``, for a batch ``(B, q, q)`` of positive definite matrices.

    Recursive by halves, so that all but the ``leaf`` blocks is matrix products: library routines for one large
    triangular matrix, or for batches of them, are bound by latency on a GPU. ``2 q / leaf`` small factorisations and
    inversions, and as many products, for the whole batch.
    """
    q = s.shape[-1]
    if q <= leaf:
        lower = torch.linalg.cholesky_ex(s).L
        eye = torch.eye(q, dtype=s.dtype, device=s.device).expand_as(s)
        inverse: Tensor = torch.linalg.solve_triangular(lower, eye, upper=False)
        return inverse
    k = (q // leaf + 1) // 2 * leaf
    a = inverse_cholesky(s[:, :k, :k], leaf)
    w = s[:, k:, :k] @ a.mT
    c = inverse_cholesky(torch.baddbmm(s[:, k:, k:], w, w.mT, alpha=-1), leaf)
    out = torch.zeros_like(s)
    out[:, :k, :k] = a
    out[:, k:, k:] = c
    out[:, k:, :k] = torch.bmm(c, w @ a).neg_()
    return out


def improve_conditioning(y: Tensor, fill: Tensor) -> Tensor:
    """A better conditioned basis ``(B, n, q)`` of the same nested column spaces: one pass of shifted Cholesky QR.

    Columns are scaled to unit length first; the shift (Fukaya et al. 2020) is what rounding in ``yᵀ y`` can reach, so
    the factorisation cannot fail. A condition number κ becomes about ``max(1, κ √shift)``, with a shift of 3e-4 for
    float32 and 576 columns. A column that depends on earlier ones, zero included, is replaced by that of ``fill``:
    ``(n, q)`` or ``(B, n, q)``, columns of unit length.
    """
    rounding = torch.finfo(y.dtype).eps
    y = y / torch.linalg.vector_norm(y, dim=1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    s = y.mT @ y
    s.diagonal(dim1=-2, dim2=-1).add_(4 * y.shape[2] * rounding)
    y = y @ inverse_cholesky(s).mT
    norms = torch.linalg.vector_norm(y, dim=1, keepdim=True)
    return torch.where(norms < _LOST, fill, y)


def orthonormalize(y: Tensor, fill: Tensor) -> Tensor:
    """Orthonormal basis ``(B, n, q)``, ``q ≤ n``, whose first ``r`` columns span those of ``y``, for every ``r``.

    Two shifted passes and one without shift: orthonormal to rounding for condition numbers up to about 1e4 in float32.
    ``fill`` takes the place of columns that depend on others, so a rank-deficient or zero ``y`` gives a full basis too.
    """
    y = improve_conditioning(improve_conditioning(y, fill), fill)
    return y @ inverse_cholesky(y.mT @ y).mT


def random_directions(n: int, q: int, seed: int, device: torch.device) -> Tensor:
    """``(n, q)`` float32 random columns of unit length."""
    rng = torch.Generator(device=device).manual_seed(seed)
    columns = torch.randn(n, q, generator=rng, device=device)
    return columns.div_(torch.linalg.vector_norm(columns, dim=0))


def sketch(rows: Tensor, q: int, seed: int) -> Tensor:
    """``rowsᵀ Ω`` with a sparse random ``Ω`` (count sketch): ``(..., k, n)`` to ``(..., n, q)`` float32.

    Each row enters one of ``q`` sums with a random sign, so this costs one pass over the rows, not a product; as a
    start of a subspace iteration it is worth one multiplication by a Gaussian matrix. With fewer than ``q`` rows, the
    columns without any are zero.
    """
    k = rows.shape[-2]
    rng = torch.Generator(device=rows.device).manual_seed(seed)
    order = torch.randperm(k, generator=rng, device=rows.device)
    signs = torch.randint(0, 2, (k, 1), generator=rng, device=rows.device).to(rows.dtype) * 2 - 1
    total = torch.zeros(*rows.shape[:-2], q, rows.shape[-1], dtype=torch.float32, device=rows.device)
    for begin in range(0, k, q):  # sums without atomic additions: the same on every run
        part = order[begin : begin + q]
        total[..., : len(part), :] += rows[..., part, :] * signs[begin : begin + q]
    return total.mT


# ---- nested eigenvectors of small matrices ---------------------------------------------------------------------------


def nested_eigenvectors(h: Tensor, steps: int | None = None) -> tuple[Tensor, Tensor]:
    """Orthonormal ``W`` of symmetric positive semidefinite ``h`` ``(B, q, q)`` by falling energy, and ``diag(Wᵀ h W)``.

    With ``steps=None`` on a CPU these are the eigenvectors, by float64 LAPACK. On a GPU batches of symmetric eigenvalue
    problems run one after the other, so ``steps`` (16 by default) rounds of simultaneous iteration are taken instead:
    the first ``r`` columns then capture nearly as much as the first ``r`` eigenvectors, and the second result says
    exactly how much.

    Returns:
        ``(B, q, q)`` in the dtype of ``h``, and ``(B, q)`` energies.
    """
    if steps is None and not h.is_cuda:
        values, vectors = torch.linalg.eigh(h.to(torch.float64))
        return vectors.flip(-1).to(h.dtype), values.flip(-1).clamp_min(0).to(h.dtype)
    steps = 16 if steps is None else steps
    q = h.shape[-1]
    eye = torch.eye(q, dtype=h.dtype, device=h.device)
    mass = h.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    # Directions without energy must not vanish from the basis, and need no order among themselves.
    ridge = 8 * torch.finfo(h.dtype).eps * mass + torch.where(mass > 0, 0.0, 1.0)
    lifted = h + ridge * eye
    w = _permuted(eye.expand_as(h), h.diagonal(dim1=-2, dim2=-1))
    for _ in range(steps):
        w = improve_conditioning(lifted @ w, w)
    w = orthonormalize(w, eye)
    energies = (w * (h @ w)).sum(1)
    order = energies.argsort(dim=-1, descending=True, stable=True)
    return _permuted(w, energies), energies.gather(-1, order).clamp_min(0)


def _permuted(columns: Tensor, energies: Tensor) -> Tensor:
    """Columns ``(B, n, q)`` by falling ``energies`` ``(B, q)``."""
    order = energies.argsort(dim=-1, descending=True, stable=True)
    return columns.gather(-1, order[:, None, :].expand_as(columns))
