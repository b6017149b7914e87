"""Leading eigenvectors of Gram matrices without an SVD: the numerics under the Flash routes.

Everything here is batched, uses matrix products, Cholesky factors of small blocks and nothing else on a GPU, never
waits for the device, and takes its random numbers from a seeded generator on the device of its input.

An orthonormal basis ``Q`` of any kind captures of a Gram matrix ``G`` exactly the energy ``tr(Qᵀ G Q)``, and its first
``r`` columns the partial trace. So eigenvectors are not needed, only a basis whose leading columns nearly span the
leading eigenvectors for every ``r``: a *nested* basis. Simultaneous iteration with Cholesky QR gives one, as the
triangular factor never mixes a column into an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_LEAF = 64  # order of the diagonal blocks that are factored by the library; the rest are matrix products
_LOST = 0.5  # norm, after a shifted pass, that a column stays below if what it adds to earlier ones is rounding
_HALF_RANGE = 4096.0  # the largest entry of a Gram matrix scaled to float16: what underflows is 1e-11 of it
_SYMMETRIC_FROM = 256  # order from which on a Gram matrix is made in blocks of an eighth of its columns, within limits
_LEAST_PANEL, _PANEL = 128, 512
_SQUARE = 0.75  # columns per row from which on random vectors no longer complete a basis well
_ROWS, _TALL_ROWS = 1024, 2048  # rows that a CPU multiplies at a time, with themselves and with a narrow matrix


def on_gpu(x: Tensor) -> bool:
    """Whether ``x`` is where half-precision products are fast and exact in float32, and LAPACK is slow."""
    return x.is_cuda


# ---- products --------------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32, with ``b`` float32 and ``a`` float32, bfloat16 or float16; both 2-D or both 3-D.

    Half-precision ``a`` on a GPU stays as it is: ``b`` is split into two halves of its dtype and both products
    accumulate in float32, so 16 bits of ``b`` count (21 with float16), at the speed of two half-precision products.
    """
    if not on_gpu(a) or a.dtype == torch.float32 or not b.numel():
        return a.to(torch.float32) @ b
    scale = b.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)  # float16 has no range to spare
    b = b / scale
    high = b.to(a.dtype)
    return (half_product(a, high) + half_product(a, (b - high).to(a.dtype))) * scale


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of half-precision CUDA tensors with float32 accumulation and result."""
    multiply = torch.mm if a.dim() == 2 else torch.bmm
    result: Tensor = multiply(a, b, out_dtype=torch.float32)
    return result


def pieces(cell: Tensor, rows: int) -> Iterator[Tensor]:
    """Consecutive rows of the token unfolding of ``cell`` ``(m, T, d)``: ``(rows, m d)`` each, the last may be shorter.

    On a CPU float32, so that neither the unfolding nor its float32 copy is ever held as a whole; on a GPU in the dtype
    of ``cell``.
    """
    tokens = cell.transpose(0, 1)
    for first in range(0, len(tokens), rows):
        part = tokens[first : first + rows].flatten(1)
        yield part if on_gpu(part) else part.to(torch.float32)


def token_gram(cell: Tensor) -> Tensor:
    """``Aᵀ A`` ``(m d, m d)`` float32 of the token unfolding ``A`` of ``cell`` ``(m, T, d)``, symmetric to rounding.

    Of ``cell`` float32, bfloat16 or float16. Only the blocks on and above the diagonal are multiplied: from ``m d =
    1024`` on, that is 56 % of ``2 T (m d)²`` operations. Products of half-precision numbers are exact in float32. On a
    CPU they are taken in float32, piece by piece, as its half-precision products would round the result to half
    precision too.
    """
    rows = cell.shape[1] if on_gpu(cell) else _ROWS
    return _summed_grams(pieces(cell, rows), cell.shape[0] * cell.shape[2], cell)


def gram(a: Tensor) -> Tensor:
    """``aᵀ a`` of a matrix ``(rows, n)``: ``(n, n)`` float32; as :func:`token_gram`."""
    return token_gram(a[None])


def feature_gram(cell: Tensor) -> Tensor:
    """``Σ x xᵀ`` ``(d, d)`` float32 over all heads and tokens of ``cell`` ``(m, T, d)``; as :func:`token_gram`."""
    parts = [cell.flatten(0, 1)] if on_gpu(cell) else (slab.to(torch.float32) for slab in cell)
    return _summed_grams(parts, cell.shape[2], cell)


def _summed_grams(parts: Iterable[Tensor], n: int, like: Tensor) -> Tensor:
    panel = n if n < _SYMMETRIC_FROM else min(max(-(-n // 8), _LEAST_PANEL), _PANEL)
    out = torch.zeros(n, n, dtype=torch.float32, device=like.device)
    for part in parts:
        for begin in range(0, n, panel):
            left, right = part[:, begin : begin + panel].T, part[:, begin:]
            if part.dtype == torch.float32:
                out[begin : begin + panel, begin:].addmm_(left, right)
            else:
                out[begin : begin + panel, begin:] += half_product(left, right)
    for begin in range(panel, n, panel):
        out[begin:, begin - panel : begin] = out[begin - panel : begin, begin:].T
    return out


class TokenOperator:
    """Products of the token unfolding ``A`` ``(T, n)`` of one cell ``(m, T, d)`` with bases ``(1, n, q)`` float32.

    A CPU takes some rows at a time, which stay in its cache from one product to the next.
    """

    def __init__(self, cell: Tensor) -> None:
        self._cell = cell
        self._unfolded = next(pieces(cell, cell.shape[1]))[None] if on_gpu(cell) else None

    def __call__(self, basis: Tensor) -> Tensor:
        """``Aᵀ A Q``."""
        if self._unfolded is not None:
            return product(self._unfolded.mT, product(self._unfolded, basis))
        out = torch.zeros_like(basis[0])
        for part in pieces(self._cell, _TALL_ROWS):
            out.addmm_(part.T, part @ basis[0])
        return out[None]

    def ritz(self, basis: Tensor) -> Tensor:
        """``Qᵀ Aᵀ A Q`` ``(1, q, q)``."""
        if self._unfolded is not None:
            seen = product(self._unfolded, basis)
            return seen.mT @ seen
        q = basis.shape[2]
        return _summed_grams((part @ basis[0] for part in pieces(self._cell, _TALL_ROWS)), q, basis)[None]

    def sketch(self, q: int, seed: int) -> Tensor:
        """:func:`sketch` of the rows: ``(1, n, q)``."""
        if self._unfolded is not None:
            return sketch(self._unfolded.split(q, dim=1), q, seed)
        return sketch((part[None] for part in pieces(self._cell, q)), q, seed)


class GramOperator:
    """Multiplies a batch of Gram matrices ``(B, n, n)`` float32 with bases ``(B, n, q)`` float32.

    On a GPU each matrix is kept as the sum of two float16 matrices, 22 bits in all: its leading eigenvalues may be 1e6
    times the last wanted, and rounding to 11 bits would bury those. Products then run at the speed of half precision
    whatever the process-wide TF32 switch says. The matrices are scaled so that nothing that counts underflows.
    """

    def __init__(self, grams: Tensor) -> None:
        self._grams, self._low = grams, None
        if on_gpu(grams):
            peak = grams.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
            self._unit = torch.where(peak > 0, peak, 1.0) / _HALF_RANGE
            scaled = grams / self._unit
            self._grams = scaled.half()
            self._low = (scaled - self._grams).half()

    def __call__(self, basis: Tensor) -> Tensor:
        """``G Q`` up to a factor per cell; on a GPU for a ``Q`` rounded to float16, which is as good a start."""
        if self._low is None:
            return self._grams @ basis
        high = basis.half()
        return half_product(self._grams, high) + half_product(self._low, high)

    def precise(self, basis: Tensor) -> Tensor:
        """``G Q`` for an orthonormal ``Q``, with an error of about 1e-6 of its largest column."""
        if self._low is None:
            return self._grams @ basis
        high = basis.half()
        low = ((basis - high) * _HALF_RANGE).half()  # entries of a column of unit length are small numbers
        return (self(basis) + half_product(self._grams, low) / _HALF_RANGE) * self._unit


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


def orthonormalize(y: Tensor, fill: Tensor, *, rough: bool = False) -> Tensor:
    """Orthonormal basis ``(B, n, q)``, ``q ≤ n``, whose first ``r`` columns span those of ``y``, for every ``r``.

    Where columns depend on others, the basis is completed: a rank-deficient or zero ``y`` gives as many columns too.
    A CPU, and a basis of nearly all directions, takes Householder QR; a GPU Cholesky QR in float64.

    Args:
        y: float32 or float64, of condition number up to 1e7 or so in what counts.
        fill: ``(n, q)`` or ``(B, n, q)`` columns of unit length to complete the basis with on a GPU.
        rough: on a GPU, be content with well conditioned columns.
    """
    if not on_gpu(y) or y.shape[2] > _SQUARE * y.shape[1]:
        basis: Tensor = torch.linalg.qr(y).Q
        return basis
    return cholesky_qr(y, fill, rough=rough)


def cholesky_qr(y: Tensor, fill: Tensor, *, rough: bool = False) -> Tensor:
    """:func:`orthonormalize` by two passes of Cholesky QR in float64, or one if ``rough``.

    Columns are scaled to unit length first. The first pass is shifted (Fukaya et al. 2020) by what rounding in
    ``yᵀ y`` can reach, so the factorisation cannot fail: a condition number κ becomes about ``max(1, κ √shift)``, with
    a shift of 5e-13 for 576 columns. A column that depends on earlier ones, zero included, is then replaced by that of
    ``fill``; random ones complete a basis well up to 3/4 of all directions.
    """
    dtype, y = y.dtype, y.to(torch.float64)
    y = y / torch.linalg.vector_norm(y, dim=1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
    s = y.mT @ y
    s.diagonal(dim1=-2, dim2=-1).add_(4 * y.shape[2] * torch.finfo(y.dtype).eps)
    y = y @ inverse_cholesky(s).mT
    y = torch.where(torch.linalg.vector_norm(y, dim=1, keepdim=True) < _LOST, fill.to(y.dtype), y)
    return (y if rough else y @ inverse_cholesky(y.mT @ y).mT).to(dtype)


def random_directions(n: int, q: int, seed: int, device: torch.device) -> Tensor:
    """``(n, q)`` float32 random columns of unit length."""
    rng = torch.Generator(device=device).manual_seed(seed)
    columns = torch.randn(n, q, generator=rng, device=device)
    return columns.div_(torch.linalg.vector_norm(columns, dim=0))


def sketch(parts: Iterable[Tensor], q: int, seed: int) -> Tensor:
    """``rowsᵀ Ω`` with a sparse random ``Ω`` (count sketch): ``(B, n, q)`` float32.

    Row ``i`` enters sum ``i mod q`` with a random sign, so this costs one pass over the rows, not a product; as a start
    of a subspace iteration it is worth one multiplication by a Gaussian matrix. With fewer than ``q`` rows, the
    columns without any are zero.

    Args:
        parts: the rows ``(B, q, n)`` at a time, in order; the last part may have fewer.
        q: number of sums.
        seed: of the signs.
    """
    total: Tensor | None = None
    for part in parts:
        if total is None:
            rng = torch.Generator(device=part.device).manual_seed(seed)
            total = torch.zeros(len(part), q, part.shape[2], dtype=torch.float32, device=part.device)
        signs = torch.randint(0, 2, (part.shape[1], 1), generator=rng, device=part.device).to(part.dtype) * 2 - 1
        total[:, : part.shape[1]].addcmul_(part.to(torch.float32), signs.to(torch.float32))
    assert total is not None  # there is at least one token
    return total.mT


# ---- nested eigenvectors of small matrices ---------------------------------------------------------------------------


def nested_eigenvectors(h: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Orthonormal ``W`` of symmetric positive semidefinite ``h`` ``(B, q, q)`` by falling energy, and ``diag(Wᵀ h W)``.

    On a CPU these are the eigenvectors, by LAPACK. A GPU takes the symmetric eigenvalue problems of a batch one after
    the other, so there :func:`simultaneous_iteration` stands in for them.

    Args:
        h: float32 or float64.
        steps: multiplications by ``h`` on a GPU.

    Returns:
        ``(B, q, q)`` and ``(B, q)``, both float64.
    """
    h = h.to(torch.float64)
    if on_gpu(h):
        return simultaneous_iteration(h, steps)
    values, vectors = torch.linalg.eigh(h)
    return vectors.flip(-1), values.flip(-1).clamp_min(0)


def simultaneous_iteration(h: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """:func:`nested_eigenvectors` of float64 ``h`` by an even number of ``steps`` with ``h``, two at a time.

    The first ``r`` columns come to capture nearly as much as the first ``r`` eigenvectors, the better the more
    diagonal ``h`` was; the second result says exactly how much. In float64, two steps between orthonormalisations
    leave 6 digits at a condition number of 1e5.
    """
    eye = torch.eye(h.shape[-1], dtype=h.dtype, device=h.device)
    mass = h.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    # Directions without energy must not vanish from the basis, and need no order among themselves. The ridge is to
    # stand out from the rounding of the square.
    ridge = (8 * torch.finfo(h.dtype).eps) ** 0.5 * mass + torch.where(mass > 0, 0.0, 1.0)
    lifted = h + ridge * eye
    square = lifted @ lifted
    w = _by_energy(eye.expand_as(h), h.diagonal(dim1=-2, dim2=-1))[0]
    for _ in range(steps // 2):
        w = cholesky_qr(square @ w, w, rough=True)
    w = cholesky_qr(w, w)
    return _by_energy(w, (w * (h @ w)).sum(1))


def _by_energy(columns: Tensor, energies: Tensor) -> tuple[Tensor, Tensor]:
    """Columns ``(B, n, q)`` and their energies ``(B, q)``, which fall."""
    energies, order = energies.sort(dim=-1, descending=True, stable=True)
    return columns.gather(-1, order[:, None, :].expand_as(columns)), energies.clamp_min(0)
