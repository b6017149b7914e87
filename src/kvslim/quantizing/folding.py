"""Rotate the latent channels of a factored projection, so that none of them is an outlier (Palu, Sec. 3.4).

A decomposition orders channels by energy, so the first ones are far larger than the rest, and one step for all of them
is coarse for most. With an orthogonal ``R``, ``(A R)(Rᵀ B) = A B``: the map is the same, the latents ``h R`` are spread
evenly, and nothing is computed at run time.
"""

from __future__ import annotations

from torch import Tensor

from kvslim.quantizing.rotation import rotation
from kvslim.types import LowRankFactors

_SEED = 0


def latent_rotation(rank: int) -> Tensor:
    """The orthogonal ``(rank, rank)`` float64 matrix: signed Walsh-Hadamard blocks, for any rank from 1 on."""
    # All entries of a block are of one size, so dividing by the column's norm takes off the float32 rounding.
    matrix = rotation(rank, _SEED).double()
    return matrix / matrix.norm(dim=0)


def rotated_factors(factors: LowRankFactors) -> LowRankFactors:
    """Fold the rotation into both factors, in float64."""
    turn = latent_rotation(factors.rank).to(factors.a.device)
    return LowRankFactors(a=factors.a.double() @ turn, b=turn.T @ factors.b.double())
