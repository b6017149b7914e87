"""Seeded orthogonal rotations: signed Walsh-Hadamard, block-diagonal for sizes that are no power of two.

The rotation spreads the energy of a vector evenly over its coordinates (the Johnson-Lindenstrauss step of JoLT), so
that one scalar codebook fits all of them. The signs come from an integer hash, not from a framework's random
generator, so the same seed gives the same rotation on every device and version.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def hadamard_blocks(size: int) -> tuple[int, ...]:
    """Power-of-two block sizes that add up to ``size``, largest first. ``hadamard_blocks(192) == (128, 64)``."""
    return tuple(1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1)


def rotation(size: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """An orthogonal ``(size, size)`` float32 matrix ``R``: rotate rows by ``x @ R``, undo by ``x @ R.T``."""
    return _rotation_on(size, seed, str(device))


@lru_cache(maxsize=128)
def _rotation_on(size: int, seed: int, device: str) -> Tensor:
    blocks = [_hadamard(block) for block in hadamard_blocks(size)]
    matrix: Tensor = torch.block_diag(*blocks) * _signs(size, seed)[:, None]
    return matrix.to(device)


@lru_cache(maxsize=32)
def _hadamard(size: int) -> Tensor:
    matrix: Tensor = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix.div(size**0.5)


def _signs(size: int, seed: int) -> Tensor:
    """``size`` values of ±1 from the SplitMix64 hash of ``seed``."""
    state, signs = seed & _MASK64, []
    for _ in range(size):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        signs.append(1.0 if (z ^ (z >> 31)) & 1 else -1.0)
    return torch.tensor(signs)
