"""The higher-order SVD of a cache cell, as far as an allocator and a truncation need it (JoLT), exactly.

A cell is one tensor ``X`` of shape ``(m, T, d)``: ``m`` = layers of the group × KV heads, ``T`` tokens, ``d`` features.
Its token unfolding is the matrix ``A`` of shape ``(T, m d)``. :mod:`kvslim.decomposing.flash` has faster routes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

SpectrumRoute = Literal["exact", "gram", "randomized"]
ROUTES: tuple[SpectrumRoute, ...] = get_args(SpectrumRoute)


@dataclass(frozen=True)
class Hosvd:
    """Everything the allocator and the truncation need to know of one cell. Its size does not grow with ``T``.

    Attributes:
        energy: squared Frobenius norm of the cell, with a rounding error below 1e-7 of it.
        core_energy: ``(q, d)`` float64; squared core of the HOSVD, summed over ``m``. ``q ≤ min(T, m d)``. Its row sums
            are the energies that the columns of ``token_vectors`` capture.
        feature_basis: ``(d, d)`` orthonormal, columns by falling energy; float64 (``exact``) or float32.
        token_vectors: ``(m d, q)`` orthonormal, right singular vectors of the token unfolding by falling energy
            (nearly so by the Flash routes), float64 (``exact``) or float32; or None when the caller dropped them to
            save memory: they are then computed again.
        route: how it was computed; a truncation goes on by the same route.
    """

    energy: float
    core_energy: Tensor
    feature_basis: Tensor
    token_vectors: Tensor | None
    route: SpectrumRoute = "exact"

    @property
    def cap(self) -> int:
        """``q``, the largest token rank that the spectra serve."""
        return int(self.core_energy.shape[0])

    def without_vectors(self) -> Hosvd:
        """The same without ``token_vectors``, which hold most of its memory."""
        return dataclasses.replace(self, token_vectors=None)

    def tail(self) -> Tensor:
        """``τ(r_T, r_d)``: the share of energy that a truncation loses, ``(q + 1, d + 1)`` float64; 1 at rank 0.

        The total is ``energy``, not the sum of the table: a spectrum that stops at ``q`` directions leaves out the mass
        of the others, which no rank on offer captures. FlashJoLT adds this omitted mass to the spectrum as one
        synthetic singular value, so that the allocator does not take rank ``q`` for lossless and underrate the error
        of every rank; measuring the tail against the whole energy is the same, for every entry of the table.
        All zero without any energy.
        """
        rows, columns = self.core_energy.shape
        kept = torch.zeros(rows + 1, columns + 1, dtype=torch.float64, device=self.core_energy.device)
        kept[1:, 1:] = self.core_energy.cumsum(0).cumsum(1)
        return (1 - kept / self.energy).clamp_min(0) if self.energy > 0 else torch.zeros_like(kept)


def unfold(x: Tensor) -> Tensor:
    """Token unfolding ``(T, m d)`` of ``(m, T, d)``; a view where the layout allows it."""
    return x.transpose(0, 1).reshape(x.shape[1], x.shape[0] * x.shape[2])


def hosvd(x: Tensor, cap: int | None = None) -> Hosvd:
    """Exact spectra of a cell ``x`` of shape ``(m, T, d)``, finite: the route ``exact``.

    All eigenvectors of the Gram matrix on the smaller side, in float64. The squared condition number is harmless there
    (a bf16 cache carries 8 bits), and a tail mass by subtraction is good to 1e-15 of the whole.

    Args:
        x: float32, bfloat16 or float16.
        cap: keep the first so many token directions; by default all ``min(T, m d)``.
    """
    slabs, tokens, features = x.shape
    wide = x.to(torch.float64)
    unfolded = unfold(wide)
    cap = min(tokens, slabs * features, cap or tokens)
    if slabs * features <= tokens:
        values, vectors = _eigh_descending(unfolded.T @ unfolded)
        vectors = vectors[:, :cap].contiguous()
    else:
        values, token_basis = _eigh_descending(unfolded @ unfolded.T)
        # QR instead of a division by the singular values: exact orthonormality also for a rank-deficient cell.
        vectors = torch.linalg.qr(unfolded.T @ token_basis[:, :cap]).Q
    _, feature_basis = _eigh_descending(torch.einsum("mtd,mte->de", wide, wide))
    shares = feature_shares(vectors[None], feature_basis[None], slabs)[0]
    return Hosvd(float(wide.square().sum()), values[:cap, None] * shares, feature_basis, vectors)


def feature_shares(token_vectors: Tensor, feature_basis: Tensor, slabs: int) -> Tensor:
    """How the unit length of each token direction spreads over the features: ``(B, q, d)`` from a batch of cells.

    Args:
        token_vectors: ``(B, m d, q)`` orthonormal.
        feature_basis: ``(B, d, d)`` orthonormal.
        slabs: ``m``.
    """
    features = feature_basis.shape[-1]
    turned: Tensor = feature_basis.mT[:, None] @ token_vectors.unflatten(1, (slabs, features))
    return turned.square().sum(1).mT


def _eigh_descending(gram: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_min(0), vectors.flip(1)
