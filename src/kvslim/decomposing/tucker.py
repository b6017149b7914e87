"""Partial Tucker decomposition of a cache cell by ST-HOSVD: token and feature modes truncated, heads untouched.

A cell is one tensor ``X`` of shape ``(m, T, d)``: ``m`` = layers of the group × KV heads, ``T`` tokens, ``d`` features.

    X ≈ C ×_T U_T ×_d U_d        core C: (m, r_T, r_d), U_T: (T, r_T), U_d: (d, r_d)      (JoLT, partial Tucker)

Here the *core* is orthonormal along tokens and ``U_T`` carries the scale: with ``V`` the leading right singular vectors
of the token unfolding, the core is ``Vᵀ`` and the token factor ``X V``. The product is the same. This form needs no QR
of a matrix with ``T`` rows, and the coefficients of a token that comes later are its projection ``x V``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.decomposing import subspace
from kvslim.decomposing.flash import spectra as spectra_of
from kvslim.decomposing.hosvd import Hosvd, hosvd, unfold
from kvslim.decomposing.subspace import half_product, on_gpu, product

__all__ = ["Hosvd", "TuckerFactors", "hosvd", "leading_slabs", "truncate"]


@dataclass(frozen=True)
class TuckerFactors:
    """Float factors of one cell; ``feature`` is None when the feature mode is not truncated (identity).

    Attributes:
        core: ``(m, r_T, r_d)``; unfolded to ``(r_T, m r_d)`` its rows are orthonormal.
        token: ``(T, r_T)``, with the scale of the cell.
        feature: ``(d, r_d)`` with orthonormal columns, or None and then ``r_d = d``.
        slab: ``(m, r_m)`` with orthonormal columns if the mode of heads and layers is truncated too (the paper's
            ablation), else None; the core then has ``r_m`` slabs.
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
        if on_gpu(self.token) and self.token.dtype != torch.float32:  # token factors are multiplied as they are
            flat = core.transpose(0, 1).flatten(1)
            plain = self.slab is None and self.feature is None and self.core.dtype == self.token.dtype
            # The core is exact in half precision then, and one product is enough.
            wide = half_product(self.token, flat.to(self.token.dtype)) if plain else product(self.token, flat)
            slabs: Tensor = wide.unflatten(1, (core.shape[0], core.shape[2])).transpose(0, 1)
            return slabs
        return self.token.to(torch.float32) @ core


def truncate(x: Tensor, token_rank: int, feature_rank: int, spectra: Hosvd | None = None) -> TuckerFactors:
    """Sequentially truncated HOSVD of ``x`` ``(m, T, d)``: feature mode first, then the token mode of what is left.

    The squared error is the sum of the two tails, exactly, because each truncation is an orthogonal projection.

    Args:
        x: float32, bfloat16 or float16, finite. The token factor is computed in float64 (route ``exact``) or float32.
        token_rank: ranks above the tensor's own, or above the cap of ``spectra``, are cut to it.
        feature_rank: ``d`` leaves the features as they are.
        spectra: of ``x``; exact ones are computed if left out. With untruncated features its token vectors are the
            core; else they are the start from which the Flash routes find those of the truncated tensor.

    Returns:
        float32 factors.
    """
    slabs, tokens, features = x.shape
    spectra = spectra or hosvd(x)
    feature_rank = min(feature_rank, features)
    token_rank = min(token_rank, tokens, slabs * feature_rank, spectra.cap)
    feature = None if feature_rank == features else spectra.feature_basis[:, :feature_rank]
    if token_rank == 0:
        vectors = spectra.feature_basis.new_zeros(slabs * feature_rank, 0)
    elif feature is None:
        vectors = _token_vectors(x, spectra)[:, :token_rank]
    elif spectra.route == "exact":
        rest = x.double() @ feature
        vectors = _token_vectors(rest, hosvd(rest, token_rank))
    else:
        vectors = _vectors_of_rest(x, _token_vectors(x, spectra)[:, :token_rank], feature)
    core = vectors.unflatten(0, (slabs, feature_rank)).transpose(1, 2)
    # The projection of X onto the core: features are put into the small factor, so X is read once and as it is.
    lifted = vectors if feature is None else (feature @ core.mT).flatten(0, 1)
    token = unfold(x).double() @ lifted if spectra.route == "exact" else subspace.product(unfold(x), lifted)
    return TuckerFactors(
        core.to(torch.float32).contiguous(),
        token.to(torch.float32),
        None if feature is None else feature.to(torch.float32).contiguous(),
    )


def _token_vectors(x: Tensor, spectra: Hosvd) -> Tensor:
    """Token vectors of ``x``, computed again where the caller dropped them."""
    found = spectra if spectra.token_vectors is not None else spectra_of(x, spectra.route, cap=spectra.cap)
    assert found.token_vectors is not None
    return found.token_vectors


def _vectors_of_rest(x: Tensor, vectors: Tensor, feature: Tensor) -> Tensor:
    """Token vectors ``(m r_d, r_T)`` of ``x`` after its features are truncated, from those ``(m d, r_T)`` before.

    Restricted to the features that are left, they are so good a start that one step of subspace iteration comes within
    0.2 % of the best error. The truncated tensor itself is not formed: ``x`` stays in its dtype.
    """
    slabs, features = x.shape[0], x.shape[2]

    def restricted(columns: Tensor) -> Tensor:
        columns = (feature.T @ columns.unflatten(0, (slabs, features))).flatten(0, 1)
        fill = subspace.random_directions(columns.shape[0], columns.shape[1], 0, columns.device)
        return subspace.orthonormalize(columns[None], fill)[0]

    unfolded = unfold(x)
    lifted = (feature @ restricted(vectors).unflatten(0, (slabs, -1))).flatten(0, 1)
    return restricted(subspace.product(unfolded.T, subspace.product(unfolded, lifted)))


def leading_slabs(x: Tensor, count: int) -> Tensor:
    """The leading ``count`` singular vectors of the slab mode of ``x`` ``(m, T, d)``: ``(m, count)`` float32.

    For the paper's ablation, which truncates heads and layers too. Exact, in float64.
    """
    wide = x.flatten(1).double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    slab: Tensor = vectors.flip(1)[:, :count].to(torch.float32).contiguous()
    return slab
