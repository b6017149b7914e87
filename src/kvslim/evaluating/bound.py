"""How far a cache is from the Gaussian rate-distortion bound on the same tensors.

For Gaussian channels of energies ``λ_i`` no code of ``R`` bits per vector has less distortion than reverse
water-filling gives: ``D = Σ min(θ, λ_i)`` with ``R = Σ max(0, ½ log2(λ_i / θ))``. The channels are those of the tensors
at hand, per layer the joint principal components of un-rotated keys and of values over all KV heads, one ``θ`` for all
layers and kinds. Distortion is each layer's squared error relative to its energy, as the papers sum it. Real data is
not Gaussian, so the bound is a yardstick, not a wall; side information is not charged to it, but is to the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvslim.calibrating.cached_moments import flatten_heads, rope_or_none

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvslim.evaluating.continuation import Reference

Energies = NDArray[np.float64]
_ROUNDS = 200


@dataclass(frozen=True)
class BoundGap:
    """A cache beside the bound.

    Attributes:
        bits_per_value: all measured bytes of the compressed layers, over their numbers.
        bits: bits per value that the bound would save at the cache's distortion.
        decibels: how much lower the bound's distortion is at the cache's bits.
    """

    bits_per_value: float
    bits: float
    decibels: float


def channel_energies(model: PreTrainedModel, reference: Reference) -> Energies:
    """Relative energies of the joint channels of every full-attention layer, keys and values: those of a cell sum to 1.

    A cell's mean over tokens is taken off: one vector per sequence, which costs next to nothing to store.
    """
    rope = rope_or_none(model)
    parts = []
    for layer in reference.filled.layers:
        if getattr(layer, "is_sliding", False):
            continue
        keys, values = layer.keys[0], layer.values[0]
        if rope is not None:
            keys = rope.rotate(keys.float(), torch.arange(keys.shape[1], device=keys.device), inverse=True)
        parts += [_energies(flatten_heads(keys)), _energies(flatten_heads(values))]
    return np.concatenate(parts)


def _energies(x: Tensor) -> Energies:
    centred = (x - x.mean(0)).double()
    found = torch.linalg.eigvalsh(centred.T @ centred).clamp_min(0) / x.double().square().sum().clamp_min(1e-300)
    energies: Energies = found.cpu().numpy()
    return energies


def distortion_at(energies: Energies, bits_per_value: float) -> float:
    """The least distortion at ``bits_per_value``, summed over all channels."""
    level = _search(energies, lambda theta: _rate(energies, theta) <= bits_per_value)
    return float(np.minimum(level, energies).sum())


def bits_at(energies: Energies, distortion: float) -> float:
    """The least bits per value at a summed ``distortion``; infinite at none."""
    if distortion <= 0:
        return math.inf
    if distortion >= energies.sum():
        return 0.0
    return _rate(energies, _search(energies, lambda theta: float(np.minimum(theta, energies).sum()) >= distortion))


def gap(energies: Energies, bits_per_value: float, relative_errors: Sequence[float]) -> BoundGap:
    """The distance of a cache that spends ``bits_per_value`` and makes these errors.

    Args:
        energies: of :func:`channel_energies`.
        bits_per_value: measured.
        relative_errors: squared error over energy of every layer's keys and values.
    """
    distortion = sum(relative_errors)
    least = distortion_at(energies, bits_per_value)
    decibels = 10 * math.log10(distortion / least) if distortion > 0 and least > 0 else math.inf
    return BoundGap(bits_per_value, bits_per_value - bits_at(energies, distortion), decibels)


def _rate(energies: Energies, theta: float) -> float:
    """Bits per value of reverse water-filling at the water level ``theta``."""
    above = energies[energies > theta]
    return float(0.5 * np.log2(above / theta).sum() / len(energies))


def _search(energies: Energies, enough: Callable[[float], bool]) -> float:
    """The lowest water level, on a logarithmic scale, at which ``enough`` holds."""
    low, high = 1e-40, float(energies.max())
    for _ in range(_ROUNDS):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
