"""Low-rank factorisation of a projection weight: plain SVD, the truncation-aware SVD of SVD-LLM, and a loss-aware one.

A linear map ``y = x W`` becomes ``h = x A``, ``y = h B`` (Palu, Eq. 4). Plain SVD makes the error of the *weight*
least; the truncation-aware one makes the error of the *outputs* least over calibration inputs with Gram matrix
``G = Σ x xᵀ``. The latter is defined through a Cholesky factor ``G = L Lᵀ`` and the SVD of ``Lᵀ W``. Here it is
computed as the principal components of the outputs: with ``V_r`` the leading eigenvectors of ``Wᵀ G W``,

    ``A = W V_r``,  ``B = V_rᵀ``

is the same product ``A B`` and needs neither a factorisation nor an inverse of ``G``. The latent channels are then
uncorrelated over the calibration data, in falling order of energy.

Not every output error costs the same. With ``F = Σ g gᵀ`` over the loss gradients ``g`` by the outputs (see
:mod:`kvslim.calibrating.fisher`), an error ``e`` costs ``eᵀ F e``, so the loss-aware decomposition makes the error of
``y F^½`` least instead of ``y``'s. With ``V_r`` the leading eigenvectors of ``F^½ Wᵀ G W F^½``,

    ``A = W F^½ V_r``,  ``B = V_rᵀ F^-½``.

This takes the inputs and the gradients of a token as independent, as K-FAC does (Martens and Grosse, 2015).
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

_DAMPING = 0.1
"""Share of the mean gradient energy added to the diagonal of ``F``: directions that a few calibration windows do not
show to matter are not free, and ``F`` has an inverse. A tenth was best or within noise of it on two models."""


@dataclass(frozen=True)
class Decomposition:
    """A weight factored without loss, channels in falling order of importance, ready to be truncated.

    Attributes:
        a: ``(in_features, k)`` float64 with ``k = min(in_features, out_features)``.
        b: ``(k, out_features)`` float64; ``a @ b`` is the weight.
        singular_values: ``(k,)`` float64, falling. The sum of squares of those beyond a rank is the squared error that
            truncation to this rank makes: of the weight for :func:`plain_svd`, of the outputs summed over the
            calibration tokens for :func:`whitened_svd`, and its cost for :func:`loss_aware_svd`.
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

    def unit(self, rank: int) -> LowRankFactors:
        """Keep the leading ``rank`` channels, scaled to deviation 1: the product is that of :meth:`truncate`.

        For decompositions by a Gram matrix that is a mean over tokens: there ``AᵀGA`` is diagonal, and holds the
        squared singular values. Channels fainter than a millionth of the first are scaled as if they were not.
        """
        factors, sigma = self.truncate(rank), self.singular_values[:rank]
        scale = sigma.clamp_min(_FAINTEST * float(sigma[0])) if float(sigma[0]) > 0 else torch.ones_like(sigma)
        return LowRankFactors(a=factors.a / scale, b=factors.b * scale[:, None])

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
    energies, vectors = torch.linalg.eigh(_covariance(weight, gram))
    energies, basis = _leading(energies, min(weight.shape)), vectors.flip(1)[:, : min(weight.shape)]
    return Decomposition(a=weight.double() @ basis, b=basis.T.contiguous(), singular_values=energies.sqrt())


def loss_aware_svd(weight: Tensor, gram: Tensor, output_gram: Tensor) -> Decomposition:
    """Decompose ``weight`` so that truncation costs the least loss, to second order; see the module's head.

    Args:
        weight: ``(in_features, out_features)``, any float dtype.
        gram: ``(in_features, in_features)``, the sum of ``x xᵀ`` over the calibration inputs.
        output_gram: ``(out_features, out_features)``, the sum of ``g gᵀ`` over the gradients by the outputs.

    Returns:
        The factors. The squared singular values beyond a rank sum to the cost of truncating there, in units of
        ``eᵀ F e`` summed over the calibration tokens; ``F`` has a tenth of its mean diagonal added to the diagonal.

    Raises:
        CalibrationError: a Gram matrix has the wrong shape or is not positive semi-definite.
        NonFiniteError: the weight or a Gram matrix holds NaN or Inf.
    """
    root, inverse = _roots(output_gram, weight)
    energies, vectors = torch.linalg.eigh(_symmetric(root @ _covariance(weight, gram) @ root))
    energies, basis = _leading(energies, min(weight.shape)), vectors.flip(1)[:, : min(weight.shape)]
    return Decomposition(a=weight.double() @ (root @ basis), b=basis.T @ inverse, singular_values=energies.sqrt())


def output_energies(weight: Tensor, gram: Tensor, output_gram: Tensor | None = None) -> Tensor:
    """The squared singular values of :func:`whitened_svd`, or of :func:`loss_aware_svd`, without the factors.

    Arguments and errors as there. Returns ``(min(in_features, out_features),)`` float64, falling.
    """
    covariance = _covariance(weight, gram)
    if output_gram is not None:
        root, _ = _roots(output_gram, weight)
        covariance = _symmetric(root @ covariance @ root)
    return _leading(torch.linalg.eigvalsh(covariance), min(weight.shape))


def plain_output_energies(weight: Tensor, gram: Tensor) -> Tensor:
    """What each channel of :func:`plain_svd` adds to the squared error of the outputs when it is cut off.

    With ``W = Σᵢ σᵢ uᵢ vᵢᵀ`` the error of the outputs at a rank is exactly the sum of ``σᵢ² uᵢᵀ G uᵢ`` beyond it. These
    need not fall with ``i``, as plain SVD does not know ``G``; where they rise, neighbours share their mean, so that
    the sums at the ends of each such run, the ranks worth choosing, stay what they are.

    Arguments, result and errors as for :func:`output_energies`.
    """
    decomposition = plain_svd(weight)
    left = decomposition.a * decomposition.singular_values.sqrt()  # σᵢ uᵢ
    found = (left * (gram.to(left) @ left)).sum(0).clamp_min(0).tolist()
    runs: list[tuple[float, int]] = []  # mean and length, by pooling adjacent violators
    for energy in found:
        mean, length = energy, 1
        while runs and runs[-1][0] < mean:
            before, count = runs.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        runs.append((mean, length))
    return torch.tensor([mean for mean, length in runs for _ in range(length)], dtype=torch.float64)


def _covariance(weight: Tensor, gram: Tensor) -> Tensor:
    """``Wᵀ G W``, the second moments of the outputs, with a ridge on ``G``."""
    inputs, _ = weight.shape
    if gram.shape != (inputs, inputs):
        raise CalibrationError(
            f"The Gram matrix is {tuple(gram.shape)} but the weight reads {inputs} features. Calibrate this model."
        )
    _require_finite(weight, "The weight")
    _require_finite(gram, "The Gram matrix")
    w = weight.double()
    g = gram.to(w)
    ridge = _RIDGE * g.diagonal().mean()
    return _symmetric(w.T @ (g @ w) + ridge * (w.T @ w))


def _roots(output_gram: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``F^½`` and ``F^-½`` of the damped ``F``, in float64 on the weight's device."""
    outputs = weight.shape[1]
    if output_gram.shape != (outputs, outputs):
        raise CalibrationError(
            f"The Gram matrix of the output gradients is {tuple(output_gram.shape)} but the weight makes {outputs} "
            f"features. Calibrate this model."
        )
    _require_finite(output_gram, "The Gram matrix of the output gradients")
    metric = output_gram.to(weight.device, torch.float64)
    mean = metric.diagonal().mean()
    if mean <= 0:
        raise CalibrationError("No output gradient differs from zero. Calibrate on other text.")
    identity = torch.eye(outputs, dtype=metric.dtype, device=metric.device)
    energies, vectors = torch.linalg.eigh(_symmetric(metric) + _DAMPING * mean * identity)
    if energies[0] <= 0:
        raise CalibrationError("The Gram matrix of the output gradients is not positive semi-definite.")
    return (vectors * energies.sqrt()) @ vectors.T, (vectors / energies.sqrt()) @ vectors.T


def _leading(energies: Tensor, keep: int) -> Tensor:
    """The ``keep`` largest of rising eigenvalues, falling; what rounding made negative is zero."""
    if -energies[0] > _INDEFINITE * energies[-1].clamp_min(0):
        raise CalibrationError("The Gram matrix is not positive semi-definite. Calibrate again.")
    return energies.flip(0)[:keep].clamp_min(0)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2


def _require_finite(tensor: Tensor, what: str) -> None:
    if not torch.isfinite(tensor).all():
        raise NonFiniteError(f"{what} holds NaN or Inf.")
