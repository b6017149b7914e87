"""Partial Tucker decomposition of a cache cell by ST-HOSVD: token and feature modes truncated, heads untouched.

A cell is one tensor ``X`` of shape ``(m, T, d)``: ``m`` = layers of the group × KV heads, ``T`` tokens, ``d`` features.

    X ≈ C ×_T U_T ×_d U_d        core C: (m, r_T, r_d), U_T: (T, r_T), U_d: (d, r_d)      (JoLT, partial Tucker)

All spectra come from Gram matrices on the smaller side in float64: the squared condition number is harmless there
(a bf16 cache carries 8 bits), and a tail mass by subtraction is good to 1e-15 of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hosvd:
    """Everything the allocator and the truncation need to know of one cell. Its size does not grow with ``T``.

    Attributes:
        energy: squared Frobenius norm of the cell.
        core_energy: ``(R, d)`` float64; squared core of the full HOSVD, summed over ``m``; ``R = min(T, m d)``.
        feature_basis: ``(d, d)`` float64, columns by falling energy.
        token_vectors: ``(m d, R)`` float64, right singular vectors of the token unfolding by falling energy, or None
            when ``m d > T`` (or when the caller dropped them to save memory): they are then computed again.
    """

    energy: float
    core_energy: Tensor
    feature_basis: Tensor
    token_vectors: Tensor | None

    def tail(self) -> Tensor:
        """``τ(r_T, r_d)``: the share of energy that a truncation loses, ``(R + 1, d + 1)`` float64; 1 at rank 0."""
        rows, columns = self.core_energy.shape
        kept = torch.zeros(rows + 1, columns + 1, dtype=torch.float64, device=self.core_energy.device)
        kept[1:, 1:] = self.core_energy.cumsum(0).cumsum(1)
        total = self.core_energy.sum()
        return (1 - kept / total).clamp_min(0) if total > 0 else torch.zeros_like(kept)


@dataclass(frozen=True)
class TuckerFactors:
    """Float factors of one cell; ``feature`` is None when the feature mode is not truncated (identity).

    Attributes:
        core: ``(m, r_T, r_d)``.
        token: ``(T, r_T)``.
        feature: ``(d, r_d)``, or None and then ``r_d = d``.
    """

    core: Tensor
    token: Tensor
    feature: Tensor | None
    slab: Tensor | None = None

    def reconstruct(self, head: slice = slice(None)) -> Tensor:
        """``X̃`` for the selected slabs of ``m``: ``(m', T, d)`` float32."""
        if self.slab is None:
            core = self.core[head].to(torch.float32)
        else:
            core = torch.einsum("mk,krd->mrd", self.slab[head].to(torch.float32), self.core.to(torch.float32))
        if self.feature is not None:
            core = core @ self.feature.to(torch.float32).T
        return self.token.to(torch.float32) @ core


def hosvd(x: Tensor) -> Hosvd:
    """Spectra of a cell ``x`` of shape ``(m, T, d)``, float32 and finite."""
    slabs, tokens, features = x.shape
    wide = x.to(torch.float64)
    _, feature_basis = _eigh_descending(torch.einsum("mtd,mte->de", wide, wide))
    if slabs * features <= tokens:
        unfolded = wide.permute(1, 0, 2).reshape(tokens, slabs * features)
        values, vectors = _eigh_descending(unfolded.T @ unfolded)
        core = values.sqrt()[:, None] * vectors.T  # U_Tᵀ X, without a second pass over X
    else:
        vectors = None
        _, token_basis = _eigh_descending(torch.einsum("mtd,msd->ts", wide, wide))
        core = token_basis.T @ wide.permute(1, 0, 2).reshape(tokens, slabs * features)
    core = core.unflatten(1, (slabs, features)) @ feature_basis
    return Hosvd(float(wide.square().sum()), core.square().sum(1), feature_basis, vectors)


def st_hosvd(x: Tensor, token_rank: int, feature_rank: int, spectra: Hosvd | None = None) -> TuckerFactors:
    """Sequentially truncated HOSVD of ``x`` ``(m, T, d)``: feature mode first, then the token mode of what is left.

    Ranks above the tensor's own are cut to it. The squared error is the sum of the two tails, exactly, because each
    truncation is an orthogonal projection. Returns float32 factors with orthonormal columns.
    """
    slabs, tokens, features = x.shape
    token_rank = min(token_rank, tokens, slabs * features)
    spectra = spectra or hosvd(x)
    feature = None
    wide = x.to(torch.float64)
    vectors = spectra.token_vectors
    if feature_rank < features:
        feature = spectra.feature_basis[:, :feature_rank]
        wide = wide @ feature
        vectors = None
    unfolded = wide.permute(1, 0, 2).reshape(tokens, -1)
    token_rank = min(token_rank, unfolded.shape[1])
    token = _token_basis(unfolded, token_rank, vectors)
    core = torch.linalg.qr(unfolded.T @ token).Q.T
    token = unfolded @ core.T
    core = core.unflatten(1, (slabs, -1)).permute(1, 0, 2)
    return TuckerFactors(
        core.to(torch.float32).contiguous(),
        token.to(torch.float32),
        None if feature is None else feature.to(torch.float32),
    )


def _token_basis(unfolded: Tensor, rank: int, vectors: Tensor | None) -> Tensor:
    """Leading ``rank`` left singular vectors of ``(T, m r_d)``, orthonormal to float64 rounding."""
    if rank == 0:
        return unfolded.new_zeros(unfolded.shape[0], 0)
    if unfolded.shape[1] > unfolded.shape[0]:
        return _eigh_descending(unfolded @ unfolded.T)[1][:, :rank]
    if vectors is None:
        _, vectors = _eigh_descending(unfolded.T @ unfolded)
    # QR instead of a division by the singular values: exact orthonormality also for a rank-deficient cell.
    basis: Tensor = torch.linalg.qr(unfolded @ vectors[:, :rank]).Q
    return basis


def _eigh_descending(gram: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0).clamp_min(0), vectors.flip(1)


truncate = st_hosvd


def leading_slabs(x: Tensor, count: int) -> Tensor:
    """The leading ``count`` left singular vectors of the slab mode of ``x`` ``(m, T, d)``: ``(m, count)`` float32."""
    flat = x.flatten(1).to(torch.float64)
    return _eigh_descending(flat @ flat.T)[1][:, :count].to(torch.float32)
