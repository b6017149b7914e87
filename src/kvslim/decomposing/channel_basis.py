"""Latent channels of cached vectors: uncorrelated over calibration, in the order of what their loss costs.

A cached vector ``x`` (the keys or values of some KV heads of one token, side by side) is written as

    ``x = mean + y B``,

with channels ``y`` that have deviation 1 over the calibration tokens and no correlation. With ``C`` the covariance of
``x`` and ``F`` the second moments of the loss gradients by ``x`` (damped), ``B`` comes from the eigenvectors ``V`` of
``F^½ C F^½``: ``B = Λ^½ Vᵀ F^-½``. An error ``e`` of channel ``i`` then costs ``λ_i e²`` whatever the other channels
do, so that bits can be given out channel by channel (reverse water-filling). With ``F`` the identity this is PCA, the
basis that Palu's whitened decomposition finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvslim.errors import CalibrationError, NonFiniteError

Metric = Literal["loss", "diagonal", "layer", "energy"]
METRICS: tuple[Metric, ...] = ("loss", "diagonal", "layer", "energy")
"""What an error costs: the whole ``F``; its diagonal; its mean alone, so that layers and kinds are weighed but their
directions are not; or the error relative to the energy of its layer and kind (the papers' sum)."""

DAMPING = 0.1
"""Share of the mean of the diagonal added to it: a direction that a few windows do not show to matter is not free."""

_FAINTEST = 1e-6
"""Deviations below this share of the largest are raised to it, so that encoding has an inverse."""

_INDEFINITE = 1e-6


@dataclass(frozen=True)
class ChannelBasis:
    """The channels of one layer's keys or values.

    Attributes:
        directions: float16 ``(groups, size, size)``: per group of KV heads the unit vector of every channel, one row
            each; ``groups · size`` are the features of all heads.
        deviations: ``(features,)`` float32, the deviation of each channel over calibration, group by group. Row ``i``
            of ``B`` is ``deviations[i] · directions[i]``.
        mean: ``(features,)`` float32.
        costs: ``(features,)`` float32, what a channel costs per token if it is dropped (``λ``), falling within a group.
    """

    directions: Tensor
    deviations: Tensor
    mean: Tensor
    costs: Tensor

    @property
    def features(self) -> int:
        return int(self.mean.shape[0])


def channel_basis(
    squares: Tensor, sums: Tensor, gradients: Tensor, tokens: int, *, groups: int, metric: Metric = "loss"
) -> ChannelBasis:
    """Find the channels from sums over ``tokens`` calibration tokens.

    Args:
        squares: ``(features, features)``, the sum of ``x xᵀ``.
        sums: ``(features,)``, the sum of ``x``.
        gradients: ``(features, features)``, the sum of ``g gᵀ`` over the gradients of the loss by ``x``.
        tokens: how many tokens were summed.
        groups: groups of KV heads that get channels of their own; 1 is joint.
        metric: what an error costs.

    Raises:
        CalibrationError: a sum is not positive semi-definite, or no gradient differs from zero.
        NonFiniteError: a sum holds NaN or Inf.
    """
    for name, part in (("squares", squares), ("gradients", gradients)):
        if not torch.isfinite(part).all():
            raise NonFiniteError(f"The sum of the {name} of cached vectors holds NaN or Inf. Calibrate again.")
    mean = (sums / tokens).double()
    second = squares.double() / tokens
    covariance = second - torch.outer(mean, mean)
    cost = _cost(gradients.double() / tokens, second, metric)
    size = covariance.shape[0] // groups
    parts = [
        _group(covariance[at : at + size, at : at + size], cost[at : at + size, at : at + size])
        for at in range(0, groups * size, size)
    ]
    directions, deviations, costs = (torch.stack(part) for part in zip(*parts, strict=True))
    return ChannelBasis(
        directions.to(torch.float16).contiguous(), deviations.flatten().float(), mean.float(), costs.flatten().float()
    )


def _cost(gradients: Tensor, second: Tensor, metric: Metric) -> Tensor:
    """The metric of errors, symmetric and positive definite."""
    identity = torch.eye(len(second), dtype=second.dtype, device=second.device)
    if metric == "energy":
        energy = second.diagonal().sum()
        return identity / energy if energy > 0 else identity
    mean = gradients.diagonal().mean()
    if not mean > 0:
        raise CalibrationError("No gradient by the cached vectors differs from zero. Calibrate on other text.")
    if metric == "layer":
        return identity * mean
    damped = gradients + DAMPING * mean * identity
    return torch.diag(damped.diagonal()) if metric == "diagonal" else damped


def _group(covariance: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit directions, deviations and costs of one group, by falling cost."""
    strengths, axes = torch.linalg.eigh(_symmetric(cost))
    if strengths[0] <= 0:
        raise CalibrationError("The second moments of the gradients are not positive semi-definite. Calibrate again.")
    root, inverse = ((axes * power) @ axes.T for power in (strengths.sqrt(), strengths.rsqrt()))
    energies, vectors = torch.linalg.eigh(_symmetric(root @ covariance @ root))
    if -energies[0] > _INDEFINITE * energies[-1].clamp_min(0):
        raise CalibrationError("The covariance of cached vectors is not positive semi-definite. Calibrate again.")
    energies, vectors = energies.flip(0).clamp_min(0), vectors.flip(1)
    rows = vectors.T @ inverse
    norms = rows.norm(dim=1)
    deviations = energies.sqrt() * norms
    floor = _FAINTEST * deviations.max() if deviations.max() > 0 else deviations.new_ones(())
    return rows / norms[:, None], deviations.clamp_min(float(floor)), energies


def encoder(basis: ChannelBasis) -> Tensor:
    """``E`` float32 ``(groups, size, size)`` with ``y = (x - mean) E``: the exact inverse of ``B`` as it is stored."""
    groups, size, _ = basis.directions.shape
    rows = basis.directions.double()
    inverse = torch.linalg.inv(rows)
    scaled: Tensor = (inverse / basis.deviations.double().view(groups, 1, size)).float()
    return scaled


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.T) / 2
