"""Rotate the latent channels of a factored projection, so that none of them is an outlier (Palu, Sec. 3.4).

A decomposition orders channels by energy, so the first ones are far larger than the rest, and one step for all of them
is coarse for most. With an orthogonal ``R``, ``(A R)(Rᵀ B) = A B``: the map is the same, the latents ``h R`` are spread
evenly, and nothing is computed at run time.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from kvslim.quantizing.rotation import hadamard_blocks, rotation
from kvslim.types import LowRankFactors

_SEED = 0


def latent_rotation(rank: int) -> Tensor:
    """The orthogonal ``(rank, rank)`` float64 matrix: signed Walsh-Hadamard blocks, for any rank from 1 on.

    Channels come in falling order of energy, and are dealt to the blocks in turn, each block its share: otherwise the
    first block would get the largest ones, and set the step for all.
    """
    # All entries of a block are of one size, so dividing by the column's norm takes off the float32 rounding.
    matrix = rotation(rank, _SEED).double()
    dealt: Tensor = (matrix / matrix.norm(dim=0))[_dealt(rank)]
    return dealt


def _dealt(rank: int) -> list[int]:
    """The row of the block-diagonal matrix that each channel takes: always in the block that is filled least."""
    blocks = hadamard_blocks(rank)
    starts = list(itertools.accumulate(blocks, initial=0))
    filled, rows = [0] * len(blocks), []
    for _ in range(rank):
        block = min(range(len(blocks)), key=lambda one: (filled[one] + 0.5) / blocks[one])
        rows.append(starts[block] + filled[block])
        filled[block] += 1
    return rows


def rotated_factors(factors: LowRankFactors) -> LowRankFactors:
    """Fold the rotation into both factors, in float64."""
    turn = latent_rotation(factors.rank).to(factors.a.device)
    return LowRankFactors(a=factors.a.double() @ turn, b=turn.T @ factors.b.double())
