"""Spectra of cache cells by three routes: exact, or the leading directions only (FlashJoLT).

- ``exact``: all eigenvectors of the smaller Gram matrix in float64 (:func:`kvslim.decomposing.hosvd.hosvd`).
- ``gram``: the same Gram matrix in float32, then a few subspace steps on it; batched over cells, and warm-started from
  another cell's basis where one is given.
- ``randomized``: subspace steps on the token unfolding ``A`` ``(T, m d)`` itself, without a Gram matrix: a randomized
  range finder with power iterations, orthonormalised in between (JoLT, FlashJoLT; Halko, Martinsson and Tropp 2011).

The last two stop at a cap of ``q`` directions. What the others hold is the total energy less the captured one, so the
tail is honest by every route (:meth:`Hosvd.tail`).

Operations per cell of 32 heads × 128, T = 32k, cap 512 (576 columns are iterated), bf16 on a GPU, ``gram``, cold start:

    energy             0.3 GB read
    unfold             0.5 GB moved, unless the cell is a view of (T, heads, d)
    Gram               620 GFLOP bf16               8 products, 15 copies of blocks
    two float16 parts  0.3 GB moved
    3 steps            116 GFLOP fp16, 16 fp64      6 products, 3 passes of Cholesky QR
    orthonormal basis  11 GFLOP fp64                2 passes
    Ritz matrix        58 GFLOP fp16, 3 fp32
    8 Ritz steps       10 GFLOP fp64                6 passes of order 576
    16 feature steps   0.2 GFLOP fp64               10 passes of order 128
    basis, core table  3 GFLOP fp32

That is 800 GFLOP in half precision, 37 in float64 and 6 in float32: 1.0, 0.6 and 0.1 ms at the rates of an H200. All
but the first three lines is batched over the cells. A pass of Cholesky QR of order 576 takes about 170 launches (9
blocks of 64, 8 joins, each of about 10), so a batch takes about 2500 whatever its size, some 12 ms; it waits for the
device once, at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from kvslim.decomposing import subspace
from kvslim.decomposing.hosvd import ROUTES, Hosvd, SpectrumRoute, feature_shares, hosvd, unfold
from kvslim.errors import ConfigError, NonFiniteError

_FULL_BELOW = 256  # order of a Gram matrix up to which all its eigenvectors cost less than subspace steps
_FULL_FROM = 0.75  # share of all directions from which on a Gram matrix is decomposed in full, other matrices by QR
_COLD_STEPS = {"gram": 3, "randomized": 1}
_WARM_STEPS = {"gram": 2, "randomized": 1}
# Directions iterated beyond the cap, as a share of it. A step on A itself is dear beside a wider basis.
_OVERSAMPLING = {"gram": 1 / 8, "randomized": 3 / 16}
_SKETCH_ROWS = 4  # rows per direction of the sketch in which the randomized route takes its first step


# On a GPU, multiplications in place of an eigendecomposition: of the Ritz matrix, which the steps before have brought
# near to diagonal form, and of the feature Gram matrix, which comes as it is.
_RITZ_STEPS, _FEATURE_STEPS = 8, 16


def flash_cap(tokens: int, ratio: float = 4.0) -> int:
    """Directions that FlashJoLT looks for: ``min(max(q_min, ⌈T / 32⌉), 512)``, ``q_min`` 32 up to ratio 4, else 64."""
    return min(max(32 if ratio <= 4 else 64, math.ceil(tokens / 32)), 512)


def spectra(
    x: Tensor,
    route: SpectrumRoute = "exact",
    *,
    cap: int | None = None,
    start: Tensor | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Hosvd:
    """Spectra of one cell: :func:`spectra_of_many` of ``[x]``, whose arguments and errors it shares."""
    starts = None if start is None else [start]
    return spectra_of_many([x], route, cap=cap, starts=starts, steps=steps, seed=seed)[0]


def spectra_of_many(
    cells: Iterable[Tensor],
    route: SpectrumRoute = "exact",
    *,
    cap: int | None = None,
    starts: Sequence[Tensor | None] | None = None,
    steps: int | None = None,
    seed: int = 0,
    workspace: int = 2**32,
) -> list[Hosvd]:
    """Spectra of cells of one shape ``(m, T, d)``, in order.

    Cells are read one at a time. ``gram`` gathers their Gram matrices and works on a batch of them, and where
    ``m d ≤ T`` keeps no cell after its Gram matrix is taken. The other routes work on one cell after the other.
    The result depends on nothing but the arguments; no global random state is read or set.

    Args:
        cells: each float32, bfloat16 or float16 and finite, on one device. On a GPU half-precision cells are multiplied
            as they are, with float32 sums.
        route: how.
        cap: token directions wanted. By default all (``exact``), or :func:`flash_cap` of the tokens.
        starts: a basis ``(m d, k)`` of any ``k`` for each cell, or None, to start the iteration from; the token
            vectors of a neighbouring layer or of an earlier prompt. ``exact`` has no use for it.
        steps: multiplications by the Gram matrix (or by ``A`` and its transpose) before the last. By default 1 for
            ``randomized``; 3 for ``gram``, or 2 if all cells of a batch have a start, and one more if the cap is
            above a fifth of all directions.
        seed: of the random start.
        workspace: bytes that a batch of ``gram`` may take, its temporaries included.

    Raises:
        ConfigError: unknown route, cap below 1, cells of different shapes, or a start that does not fit.
        NonFiniteError: a cell holds NaN or Inf, or numbers whose squared sums leave float32.
    """
    if route not in ROUTES:
        raise ConfigError(f"route is one of {', '.join(ROUTES)}, not {route!r}.")
    if cap is not None and cap < 1:
        raise ConfigError(f"cap is a number of directions ≥ 1, not {cap}.")
    if steps is not None and steps < 0:
        raise ConfigError(f"steps is a number of multiplications ≥ 0, not {steps}.")
    pairs = _checked(cells, starts)
    if route == "exact":
        return [hosvd(x, cap) for x, _ in pairs]
    if route == "randomized":
        return [_randomized(x, start, _Settings(x, route, cap, steps, seed)) for x, start in pairs]
    results: list[Hosvd] = []
    batch: list[_Measured] = []
    for x, start in pairs:
        batch.append(_measure(x, start))
        if (len(batch) + 1) * batch[0].nbytes > workspace:
            results += _from_grams(batch, _Settings(x, route, cap, steps, seed))
    return results + (_from_grams(batch, _Settings(x, route, cap, steps, seed)) if batch else [])


def _checked(cells: Iterable[Tensor], starts: Sequence[Tensor | None] | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Cells with their starts, all of the first one's shape."""
    shape: tuple[int, ...] | None = None
    for x, start in zip(cells, repeat(None) if starts is None else starts, strict=starts is not None):
        shape = shape or tuple(x.shape)
        if tuple(x.shape) != shape:
            raise ConfigError(f"Cells of one call have one shape; found {tuple(x.shape)} beside {shape}.")
        if start is not None and start.shape[0] != shape[0] * shape[2]:
            raise ConfigError(f"A start for cells of {shape} has {shape[0] * shape[2]} rows, not {start.shape[0]}.")
        yield x, start


class _Settings:
    """What both Flash routes are told, for one batch of cells.

    Attributes:
        slabs, tokens, features: the shape.
        cap: directions that come out.
        width: directions that are iterated.
    """

    def __init__(self, x: Tensor, route: SpectrumRoute, cap: int | None, steps: int | None, seed: int) -> None:
        self.slabs, self.tokens, self.features = x.shape
        self.route, self.steps, self.seed = route, steps, seed
        self._fill: Tensor | None = None
        most = min(self.tokens, self.slabs * self.features)
        self.cap = min(most, cap or flash_cap(self.tokens))
        wanted = self.cap + max(8, int(_OVERSAMPLING[route] * self.cap))
        self.width = min(most, -(-wanted // 8) * 8)  # tensor cores take multiples of 8

    def rounds(self, *, warm: bool) -> int:
        if self.steps is not None:
            return self.steps
        # Near half of all directions the spectrum falls little beyond the cap, and steps are cheap.
        more = self.route == "gram" and 4 * self.width > min(self.tokens, self.slabs * self.features)
        return (_WARM_STEPS if warm else _COLD_STEPS)[self.route] + more

    def fill(self, basis: Tensor) -> Tensor:
        """Random directions, drawn once, to complete a ``basis`` ``(B, n, q)`` of deficient rank."""
        shape = (basis.shape[1], basis.shape[2])
        if self._fill is None or self._fill.shape != shape:
            self._fill = subspace.random_directions(*shape, self.seed, basis.device)
        return self._fill


# ---- route gram ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """A cell after the one pass over its tokens: the Gram matrix on the smaller side, and what that side needs."""

    gram: Tensor
    energy: Tensor
    start: Tensor | None
    unfolded: Tensor | None  # kept only where the Gram matrix is on the token side

    @property
    def nbytes(self) -> int:
        """Bytes in the batch: with its half-precision parts, a Gram matrix takes up to three times its own."""
        kept = 0 if self.unfolded is None else self.unfolded.numel() * self.unfolded.element_size()
        return 3 * self.gram.numel() * self.gram.element_size() + 2 * kept


def _measure(x: Tensor, start: Tensor | None) -> _Measured:
    slabs, tokens, features = x.shape
    energy = _energy(x)
    if slabs * features <= tokens:
        return _Measured(subspace.token_gram(x), energy, start, None)
    unfolded = unfold(x)
    return _Measured(subspace.gram(unfolded.T), energy, start, unfolded)


def _from_grams(batch: list[_Measured], settings: _Settings) -> list[Hosvd]:
    """Spectra from Gram matrices, all cells at once. Empties ``batch``, so that nothing is held twice."""
    grams = torch.stack([cell.gram for cell in batch])
    energies = torch.stack([cell.energy for cell in batch])
    starts = [cell.start for cell in batch]
    kept = [cell.unfolded for cell in batch if cell.unfolded is not None]
    batch.clear()
    slabs, features = settings.slabs, settings.features
    if not kept:
        blocks = grams.unflatten(2, (slabs, features)).unflatten(1, (slabs, features))
        feature_grams = blocks.diagonal(dim1=1, dim2=3).sum(-1)
        vectors, values = _leading(grams, starts, settings)
        # Sums on tensor cores come out a little low, all alike: energies count in relation to the matrix's own trace.
        mass = grams.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
        values = values * torch.where(mass > 0, energies / mass, 0.0)[:, None]
    else:
        cells = torch.stack(kept)
        feature_grams = torch.stack([subspace.gram(a.view(-1, features)) for a in cells])
        starts = [None if v is None else subspace.product(a, v.float()) for a, v in zip(cells, starts, strict=True)]
        token_basis, _ = _leading(grams, starts, settings)
        vectors, values = _right_vectors(cells, token_basis, settings)
    return _assembled(vectors, values, energies, feature_grams, settings)


def _leading(grams: Tensor, starts: list[Tensor | None], settings: _Settings) -> tuple[Tensor, Tensor]:
    """Leading ``q`` directions ``(B, n, q)`` of Gram matrices ``(B, n, n)``, and the energies ``(B, q)`` they hold."""
    n, cap = grams.shape[-1], settings.cap
    if n <= _FULL_BELOW or settings.width > _FULL_FROM * n:
        values, vectors = torch.linalg.eigh(grams.double())
        return vectors.flip(-1)[..., :cap].float(), values.flip(-1)[..., :cap].clamp_min(0)
    operator = subspace.GramOperator(grams)

    def draw() -> Tensor:
        return subspace.sketch(grams.split(settings.width, dim=1), settings.width, settings.seed)

    basis = _iterated(operator, draw, starts, settings)
    rotation, values = subspace.nested_eigenvectors(basis.mT @ operator.precise(basis), _RITZ_STEPS)
    return basis @ rotation[..., :cap].float(), values[..., :cap]


def _right_vectors(cells: Tensor, token_basis: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """``V = orth(Aᵀ U)`` ``(B, m d, q)`` from token directions ``U`` ``(B, T, q)``, and the energies it captures."""
    y = subspace.product(cells.mT, token_basis)
    basis = subspace.orthonormalize(y, settings.fill(y))
    seen = subspace.product(cells, basis)
    rotation, values = subspace.nested_eigenvectors(seen.mT @ seen, _RITZ_STEPS)
    return basis @ rotation.float(), values


# ---- route randomized ------------------------------------------------------------------------------------------------


def _randomized(x: Tensor, start: Tensor | None, settings: _Settings) -> Hosvd:
    """The range of ``Aᵀ`` by power iterations on ``A``; the small SVD is that of ``A Q``, by its Gram matrix."""
    operator, width, cap = subspace.TokenOperator(x), settings.width, settings.cap

    def draw() -> Tensor:
        """The first step, taken on a sketch of ``A`` with a few rows per direction."""
        small = operator.sketch(_SKETCH_ROWS * width, settings.seed).mT
        y = subspace.sketch(small.split(width, dim=1), width, settings.seed + 1)
        return small.mT @ (small @ subspace.orthonormalize(y, settings.fill(y), rough=True))

    energy = _energy(x)
    basis = _iterated(operator, draw, [start], settings)
    rotation, values = subspace.nested_eigenvectors(operator.ritz(basis), _RITZ_STEPS)
    vectors = basis @ rotation[..., :cap].float()
    feature_grams = subspace.feature_gram(x)[None]
    return _assembled(vectors, values[:, :cap], energy[None], feature_grams, settings)[0]


# ---- both ------------------------------------------------------------------------------------------------------------


def _iterated(
    multiply: Callable[[Tensor], Tensor],
    draw: Callable[[], Tensor],
    starts: list[Tensor | None],
    settings: _Settings,
) -> Tensor:
    """Orthonormal basis ``(B, n, width)`` after the rounds of subspace iteration.

    Columns that a start does not bring come from ``draw``: ``(B, n, width)``.
    """
    width = settings.width
    given = [None if start is None else start[:, :width].float() for start in starts]
    if any(start is None or start.shape[1] < width for start in given):
        given = [y if v is None else torch.cat((v, y[:, v.shape[1] :]), 1) for v, y in zip(given, draw(), strict=True)]
    basis = torch.stack([start for start in given if start is not None])
    for _ in range(settings.rounds(warm=all(start is not None for start in starts))):
        basis = multiply(subspace.orthonormalize(basis, settings.fill(basis), rough=True))
    return subspace.orthonormalize(basis, settings.fill(basis))


def _assembled(
    vectors: Tensor, values: Tensor, energies: Tensor, feature_grams: Tensor, settings: _Settings
) -> list[Hosvd]:
    """One :class:`Hosvd` per cell of the batch; the only wait for the device."""
    feature_basis = subspace.nested_eigenvectors(feature_grams, _FEATURE_STEPS)[0].float()
    core = values[:, :, None] * feature_shares(vectors, feature_basis, settings.slabs)
    total, captured = torch.stack((energies, values.sum(1))).tolist()
    if not all(map(math.isfinite, total + captured)):
        raise NonFiniteError("A cell holds NaN or Inf, or numbers so large that their squares leave float32.")
    cells = zip(total, core, feature_basis, vectors, strict=True)
    return [Hosvd(energy, table, features, tokens, settings.route) for energy, table, features, tokens in cells]


def _energy(x: Tensor) -> Tensor:
    """Squared norm as a float64 scalar on the device of ``x``; on a GPU float32 within a token's features."""
    within = torch.float32 if subspace.on_gpu(x) else torch.float64
    energy: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=within).double().square().sum()
    if not subspace.on_gpu(x) and not torch.isfinite(energy):
        raise NonFiniteError("A cell holds NaN or Inf.")  # LAPACK would say so in other words
    return energy
