"""Which axes of a tensor hold redundancy: energy per mode, and the rank that a given error needs (JoLT, Sec. 3).

The energies of a mode are the squared singular values of the tensor unfolded along it. Truncating that mode alone to
rank ``r`` loses the energies behind the first ``r``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mode_energies(x: Tensor, mode: int) -> Tensor:
    """Squared singular values of ``x`` unfolded along ``mode``, falling: ``(min(size, rest),)`` float64.

    Args:
        x: any number of axes, finite.
        mode: the axis; ``size`` is its length and ``rest`` the product of the others.

    The Gram matrix on the smaller side is decomposed in float64. Energies below about 1e-16 of the largest are
    rounding, not spectrum.
    """
    unfolded = x.movedim(mode, 0).flatten(1).to(torch.float64)
    small = unfolded if unfolded.shape[0] <= unfolded.shape[1] else unfolded.T
    energies: Tensor = torch.linalg.eigvalsh(small @ small.T)
    return energies.flip(0).clamp_min(0)


def cumulative_share(energies: Tensor) -> Tensor:
    """Share of the energy in the first 1, 2, … components: same shape, rising to 1; all ones without any energy."""
    total = energies.sum()
    return energies.cumsum(0) / total if total > 0 else torch.ones_like(energies)


def rank_for_error(energies: Tensor, error: float) -> int:
    """The least rank whose truncation has a relative Frobenius error of at most ``error``; 0 to ``len(energies)``."""
    tails = torch.cat((energies.flip(0).cumsum(0).flip(0), energies.new_zeros(1)))
    allowed = error**2 * float(tails[0])
    return int((tails > allowed).sum())
