"""Rotate, scale, quantize, pack: the low-bit residual of JoLT, and with nothing in front of it a codec of its own.

One row is one token of one head. Its scale is fitted by least squares to the chosen levels, which costs nothing to
store and is never worse than the row's root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvslim.quantizing.codebook import LevelKind, gaussian_levels, midpoints
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.packing import pack, packed_bytes, unpack
from kvslim.quantizing.rotation import rotation

SCALE_BYTES = 2


@dataclass(frozen=True)
class RotatedCodes:
    """Packed codes of rotated rows.

    Attributes:
        codes: uint8 ``(..., packed_bytes(size, bits))``.
        scales: float16 ``(...)``, one per row.
        bits: code width, 1 to 8.
        size: coordinates per row before packing.
        kind: which codebook.
        seed: seed of the rotation.
        gain: a power of two that was taken off all rows, so that their scales fit float16.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    size: int
    kind: LevelKind
    seed: int
    gain: float = 1.0


def row_bytes(size: int, bits: int) -> int:
    """Bytes that one row of ``size`` coordinates costs: codes and scale. Zero bits cost nothing."""
    return packed_bytes(size, bits) + SCALE_BYTES if bits else 0


def encode(x: Tensor, bits: int, *, kind: LevelKind = "lloyd_max", seed: int = 0) -> RotatedCodes:
    """Encode ``x`` of shape ``(..., size)``, float32 and finite."""
    gain = power_of_two_gain(x)
    rows = (x / gain) @ rotation(x.shape[-1], seed, x.device)
    levels = gaussian_levels(bits, kind).to(device=x.device, dtype=torch.float32)
    thresholds = midpoints(levels)
    scale = rows.square().mean(-1, keepdim=True).sqrt()
    for _ in range(2):
        codes = _nearest(rows, scale, thresholds)
        scale = _fit_scale(rows, levels[codes], scale)
    stored = scale.squeeze(-1).to(torch.float16)
    codes = _nearest(rows, stored[..., None].to(torch.float32), thresholds)
    return RotatedCodes(pack(codes, bits), stored, bits, x.shape[-1], kind, seed, gain)


def decode(stored: RotatedCodes) -> Tensor:
    """Undo :func:`encode`: float32 ``(..., size)``."""
    levels = gaussian_levels(stored.bits, stored.kind).to(device=stored.codes.device, dtype=torch.float32)
    rows = levels[unpack(stored.codes, stored.bits, stored.size).int()]
    rows = rows * (stored.scales[..., None].to(torch.float32) * stored.gain)
    return rows @ rotation(stored.size, stored.seed, rows.device).T


@lru_cache(maxsize=256)
def distortion(bits: int, size: int, kind: LevelKind = "lloyd_max") -> float:
    """Relative squared error ε²(bits) of this codec on Gaussian rows, measured once on a seeded sample.

    Zero bits lose everything: 1.0.
    """
    if bits == 0:
        return 1.0
    sample = torch.randn(2048, size, generator=torch.Generator().manual_seed(size))
    error = decode(encode(sample, bits, kind=kind)) - sample
    return float(error.square().sum() / sample.square().sum())


def _nearest(rows: Tensor, scale: Tensor, thresholds: Tensor) -> Tensor:
    return torch.bucketize(rows / scale.clamp_min(torch.finfo(torch.float32).tiny), thresholds)


def _fit_scale(rows: Tensor, chosen: Tensor, fallback: Tensor) -> Tensor:
    energy = chosen.square().sum(-1, keepdim=True)
    fitted = (rows * chosen).sum(-1, keepdim=True) / energy.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(fitted > 0, fitted, fallback)
