"""Low-rank factorisation of a projection weight: plain SVD, and the truncation-aware SVD of SVD-LLM.

A linear map ``y = x W`` becomes ``h = x A``, ``y = h B`` (Palu, Eq. 4). Plain SVD makes the error of the *weight*
least; the truncation-aware one makes the error of the *outputs* least over calibration inputs with Gram matrix
``G = Σ x xᵀ``. The latter is defined through a Cholesky factor ``G = L Lᵀ`` and the SVD of ``Lᵀ W``. Here it is
computed as the principal components of the outputs: with ``V_r`` the leading eigenvectors of ``Wᵀ G W``,

    ``A = W V_r``,  ``B = V_rᵀ``

is the same product ``A B`` and needs neither a factorisation nor an inverse of ``G``. The latent channels are then
uncorrelated over the calibration data, in falling order of energy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.errors import CalibrationError, ConfigError, NonFiniteError
from kvslim.types import LowRankFactors

_RIDGE = 1e-10
"""Share of the mean input energy added to the diagonal of the Gram matrix. Far below any effect on directions that
the calibration data contain; it only orders the directions they never show by their weight."""

_FAINTEST = 1e-6
"""Singular values below this share of the largest are scaled like it: no channel is blown up without bound."""

_INDEFINITE = 1e-6
"""Largest negative eigenvalue, relative to the largest positive one, that passes as rounding."""


@dataclass(frozen=True)
class Decomposition:
    """A weight factored without loss, channels in falling order of importance, ready to be truncated.

    Attributes:
        a: ``(in_features, k)`` float64 with ``k = min(in_features, out_features)``.
        b: ``(k, out_features)`` float64; ``a @ b`` is the weight.
        singular_values: ``(k,)`` float64, falling. The sum of squares of those beyond a rank is the squared error that
            truncation to this rank makes: of the weight for :func:`plain_svd`, of the outputs summed over the
            calibration tokens for :func:`whitened_svd`.
    """

    a: Tensor
    b: Tensor
    singular_values: Tensor

    @property
    def full_rank(self) -> int:
        """The rank at which nothing is lost."""
        return int(self.singular_values.shape[0])

    def truncate(self, rank: int) -> LowRankFactors:
        """Keep the leading ``rank`` channels.

        Raises:
            ConfigError: ``rank`` is not between 1 and :attr:`full_rank`.
        """
        if not 1 <= rank <= self.full_rank:
            raise ConfigError(
                f"Rank {rank} is outside 1..{self.full_rank} for a {self.a.shape[0]} x {self.b.shape[1]} weight."
            )
        return LowRankFactors(a=self.a[:, :rank], b=self.b[:rank])

    def balanced(self, rank: int, exponent: float) -> LowRankFactors:
        """Keep the leading ``rank`` channels, scaled for coding: the product is that of :meth:`truncate`.

        Rounding makes an error of about one size in every latent channel, and ``b`` carries it to the output. Rows of
        ``b`` of norm ``σ_i^exponent`` decide where: with 0 all the energy is in the latents, their outliers set a
        coarse step, and the error is the same in all directions. With ½ the step is finest and the summed error of
        keys and values least, but it lies where their energy is, and there the queries look too. The energy of the
        latents as a whole stays.
        """
        factors, sigma = self.truncate(rank), self.singular_values[:rank]
        sigma = sigma.clamp_min(_FAINTEST * float(sigma[0])) if float(sigma[0]) > 0 else torch.ones_like(sigma)
        norms = factors.b.norm(dim=1)
        norms = torch.where(norms > 0, norms, 1)
        scale = norms / sigma.pow(exponent)
        energies = (sigma / norms).square()  # of the latents, up to a common factor
        scale = scale * (energies.sum() / (energies * scale.square()).sum()).sqrt()
        return LowRankFactors(a=factors.a * scale, b=factors.b / scale[:, None])


def plain_svd(weight: Tensor) -> Decomposition:
    """Decompose ``weight`` of shape ``(in_features, out_features)`` as ``A = U √Σ``, ``B = √Σ Vᵀ`` (Palu, Sec. 2.2).

    Raises:
        NonFiniteError: the weight holds NaN or Inf.
    """
    _require_finite(weight, "The weight")
    u, sigma, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    root = sigma.sqrt()
    return Decomposition(a=u * root, b=root[:, None] * vh, singular_values=sigma)


def whitened_svd(weight: Tensor, gram: Tensor) -> Decomposition:
    """Decompose ``weight`` so that truncation makes the least squared error of ``x W`` over the calibration inputs.

    Args:
        weight: ``(in_features, out_features)``, any float dtype.
        gram: ``(in_features, in_features)``, the sum of ``x xᵀ`` over the calibration inputs.

    Raises:
        CalibrationError: the Gram matrix has the wrong shape or is not positive semi-definite.
        NonFiniteError: the weight or the Gram matrix holds NaN or Inf.
    """
    inputs, outputs = weight.shape
    if gram.shape != (inputs, inputs):
        raise CalibrationError(
            f"The Gram matrix is {tuple(gram.shape)} but the weight reads {inputs} features. Calibrate this model."
        )
    _require_finite(weight, "The weight")
    _require_finite(gram, "The Gram matrix")
    w = weight.double()
    g = gram.to(w)
    ridge = _RIDGE * g.diagonal().mean()
    covariance = w.T @ (g @ w) + ridge * (w.T @ w)
    energies, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    if -energies[0] > _INDEFINITE * energies[-1].clamp_min(0):
        raise CalibrationError("The Gram matrix is not positive semi-definite. Calibrate again.")
    keep = min(inputs, outputs)
    basis = vectors.flip(1)[:, :keep]
    return Decomposition(
        a=w @ basis, b=basis.T.contiguous(), singular_values=energies.flip(0)[:keep].clamp_min(0).sqrt()
    )


def _require_finite(tensor: Tensor, what: str) -> None:
    if not torch.isfinite(tensor).all():
        raise NonFiniteError(f"{what} holds NaN or Inf.")
