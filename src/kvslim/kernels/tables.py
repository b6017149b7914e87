"""Constants of the residual codec in the form its kernels use: signs, column norms, half codebooks, lookup cells.

Codebooks are symmetric, so the kernels look only at magnitudes: the middle threshold is 0, and the code of ``-v``
mirrors the code of ``v``. For many levels the magnitude axis is cut into equal cells that hold at most one threshold
each; the cell of a magnitude and one comparison then give its code, which is a binary search with all but the last
step done in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvslim.quantizing.codebook import LevelKind, gaussian_levels, midpoints
from kvslim.quantizing.packing import packed_bytes, planes
from kvslim.quantizing.rotation import rotation

LARGEST_SIZE = 256
"""Most features per row that the kernels take."""

ROWS = 64
"""Rows that a program holds at once."""


def padded_size(size: int) -> int:
    """The power of two that rows are padded to; tensor cores multiply blocks of 16."""
    return max(16, 1 << (size - 1).bit_length())


def rows_fit(size: int, device: torch.device) -> bool:
    """Whether the kernels take rows of ``size`` features: sign matrix and a tile of rows have to fit shared memory."""
    if size > LARGEST_SIZE or device.type != "cuda":
        return size <= LARGEST_SIZE
    properties = torch.cuda.get_device_properties(device)
    available = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return padded_size(size) * (2 * padded_size(size) + 4 * ROWS) <= available  # two float16 copies of the rows


@dataclass(frozen=True)
class SignMatrix:
    """``rotation(size, seed)`` as signs times one norm per column, padded to a power of two.

    Attributes:
        signs: float16 ``(padded, padded)`` of −1, 0 and 1, exact.
        norms: float32 ``(padded,)``; ``rotation == signs * norms`` inside, zeros outside.
        norm: the common norm when ``padded == size``, else 1.0.
    """

    signs: Tensor
    norms: Tensor
    norm: float

    @property
    def padded(self) -> int:
        return self.signs.shape[0]


@lru_cache(maxsize=128)
def sign_matrix(size: int, seed: int, device: torch.device, transposed: bool = False) -> SignMatrix:
    """The seeded rotation of ``size`` features for a kernel; ``transposed`` gives the signs of its inverse."""
    padded = padded_size(size)
    matrix = rotation(size, seed)
    signs, norms = torch.zeros(padded, padded), torch.zeros(padded)
    signs[:size, :size], norms[:size] = matrix.sign(), matrix.abs().amax(0)
    signs = signs.T if transposed else signs
    norm = float(norms[0]) if padded == size else 1.0
    return SignMatrix(signs.to(device, torch.float16).contiguous(), norms.to(device), norm)


@dataclass(frozen=True)
class HalfCodebook:
    """The upper half of a symmetric codebook, float32 values as Python floats.

    Attributes:
        levels: ``2**(bits - 1)`` positive reproduction levels, ascending.
        thresholds: the positive decision thresholds, one fewer.
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]


@lru_cache(maxsize=32)
def half_codebook(bits: int, kind: LevelKind) -> HalfCodebook:
    """The half codebook of ``gaussian_levels(bits, kind)``, with thresholds computed as the reference does."""
    levels = gaussian_levels(bits, kind).to(torch.float32)
    thresholds = midpoints(levels)
    half = len(levels) // 2
    return HalfCodebook(tuple(levels[half:].tolist()), tuple(thresholds[half:].tolist()))


@dataclass(frozen=True)
class Cells:
    """Lookup cells over the magnitude axis: magnitude ``a`` lies in cell ``round(a * per_unit)``, ties to even.

    An entry is two 32-bit halves in one int64, because one wide read of shared memory costs less than two narrow ones.

    Attributes:
        levels: int64 ``(count,)``. Low half: the threshold inside the cell, float32, infinite where there is none. High
            half: the level below it, float32; the level above mirrors it.
        indices: int64 ``(count,)``. Low half likewise; high half: how many thresholds lie in earlier cells, int32.
        per_unit: cells per unit of magnitude, a power of two.
    """

    levels: Tensor
    indices: Tensor
    per_unit: int

    @property
    def count(self) -> int:
        """A power of two; the last cell holds no threshold and stands for everything above."""
        return self.levels.shape[0]


@lru_cache(maxsize=32)
def cells(bits: int, kind: LevelKind, device: torch.device) -> Cells:
    """Cells fine enough that none holds two thresholds of the half codebook; 2 bits and more."""
    half = half_codebook(bits, kind)
    per_unit = 1
    while len({round(t * per_unit) for t in half.thresholds}) < len(half.thresholds):
        per_unit *= 2
    inside = {round(t * per_unit): t for t in half.thresholds}
    count = 1 << (max(inside) + 1).bit_length()
    thresholds = torch.tensor([inside.get(cell, math.inf) for cell in range(count)])
    earlier = torch.tensor([sum(other < cell for other in inside) for cell in range(count)], dtype=torch.int32)
    levels = torch.tensor(half.levels)[earlier]
    return Cells(_halves(thresholds, levels).to(device), _halves(thresholds, earlier).to(device), per_unit)


def _halves(low: Tensor, high: Tensor) -> Tensor:
    return low.view(torch.int32).to(torch.int64) & 0xFFFFFFFF | high.view(torch.int32).to(torch.int64) << 32


@lru_cache(maxsize=32)
def levels_on(bits: int, kind: LevelKind, device: torch.device) -> Tensor:
    """``gaussian_levels(bits, kind)`` as float32 on ``device``."""
    return gaussian_levels(bits, kind).to(device=device, dtype=torch.float32)


def plane_layout(size: int, bits: int) -> tuple[tuple[int, int, int, int], ...]:
    """Of each plane of a packed row: bits per code, place of the lowest one in the code, first byte, count of bytes."""
    layout, shift, start = [], bits, 0
    for width in planes(bits):
        shift -= width
        count = packed_bytes(size, width)
        layout.append((width, shift, start, count))
        start += count
    return tuple(layout)
