"""Scalar codebooks for a standard normal variable: Lloyd-Max levels, and uniform levels at the optimal step.

A rotated residual is close to Gaussian in every coordinate, so one fixed codebook per width serves all of them
(JoLT's residual; TurboQuant uses the same idea). Symmetric absmax levels nearly fail at 2 bits; both kinds here clip
at the point of least mean squared error.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvslim.errors import ConfigError

LevelKind = Literal["lloyd_max", "uniform"]
LEVEL_KINDS: tuple[LevelKind, ...] = ("lloyd_max", "uniform")


@lru_cache(maxsize=64)
def gaussian_levels(bits: int, kind: LevelKind = "lloyd_max") -> Tensor:
    """Reproduction levels for N(0, 1) at 1 to 8 bits: ``(2**bits,)`` float64, ascending and symmetric.

    Raises:
        ConfigError: unknown kind, or a width outside 1…8.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"Codebooks have 1 to 8 bits, not {bits}.")
    if kind == "uniform":
        return _uniform_levels(bits)
    if kind == "lloyd_max":
        return _lloyd_max_levels(bits)
    raise ConfigError(f"Unknown level kind {kind!r}. Known kinds: {', '.join(LEVEL_KINDS)}.")


def midpoints(levels: Tensor) -> Tensor:
    """Decision thresholds between neighbouring levels: ``(n - 1,)``."""
    return (levels[1:] + levels[:-1]) / 2


def _density(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2).div(math.sqrt(2 * math.pi))


def _mass_below(x: Tensor) -> Tensor:
    below: Tensor = torch.special.ndtr(x)
    return below


def _centroids(edges: Tensor) -> Tensor:
    """Mean of N(0, 1) inside each cell between consecutive ``edges`` (which start at -inf and end at +inf)."""
    density = _density(edges)
    return (density[:-1] - density[1:]).div(_mass_below(edges[1:]) - _mass_below(edges[:-1]))


def _with_tails(thresholds: Tensor) -> Tensor:
    inf = torch.tensor([math.inf], dtype=torch.float64)
    return torch.cat((-inf, thresholds, inf))


def _lloyd_max_levels(bits: int) -> Tensor:
    count = 1 << bits
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    # Panter-Dite: the optimal point density goes as the cube root of the density, a normal three times as wide.
    levels: Tensor = torch.special.ndtri(quantiles) * math.sqrt(3)
    for _ in range(30):  # Lloyd's iteration alone needs thousands of rounds at 8 bits; Newton finishes in a few
        levels = _centroids(_with_tails(midpoints(levels)))
    for _ in range(50):
        step = torch.linalg.solve(_fixed_point_jacobian(levels), levels - _centroids(_with_tails(midpoints(levels))))
        levels = levels - step
        levels = (levels - levels.flip(0)) / 2
        if step.abs().max() < 1e-12:
            break
    return levels


def _fixed_point_jacobian(levels: Tensor) -> Tensor:
    """Derivative of ``levels - centroids(levels)``: tridiagonal, since a centroid sees only its two thresholds."""
    edges = midpoints(levels)
    centroids = _centroids(_with_tails(edges))
    mass = _mass_below(_with_tails(edges)[1:]) - _mass_below(_with_tails(edges)[:-1])
    left = _density(edges) * (centroids[1:] - edges) / mass[1:]  # d centroid[i] / d its lower threshold, i ≥ 1
    right = _density(edges) * (edges - centroids[:-1]) / mass[:-1]  # d centroid[i] / d its upper threshold
    jacobian = torch.eye(len(levels), dtype=torch.float64)
    jacobian[1:, 1:] -= torch.diag(left) / 2
    jacobian[:-1, :-1] -= torch.diag(right) / 2
    return jacobian - torch.diag(left, -1) / 2 - torch.diag(right, 1) / 2


def gaussian_mse(levels: Tensor) -> float:
    """Mean squared error of N(0, 1) coded by the nearest of ``levels`` (float64, ascending), by exact integration."""
    edges = _with_tails(midpoints(levels))
    mass = _mass_below(edges[1:]) - _mass_below(edges[:-1])
    density = _density(edges)
    first_moment = density[:-1] - density[1:]
    return float(1 + (levels**2 * mass).sum() - 2 * (levels * first_moment).sum())


def _uniform_levels(bits: int) -> Tensor:
    count = 1 << bits
    grid = torch.arange(count, dtype=torch.float64) - (count - 1) / 2
    low, high = 1e-3, 4.0 / math.sqrt(count)
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(80):  # golden-section search for the step of least error, which is unimodal
        left, right = high - golden * (high - low), low + golden * (high - low)
        if gaussian_mse(grid * left) < gaussian_mse(grid * right):
            high = right
        else:
            low = left
    return grid * ((low + high) / 2)
