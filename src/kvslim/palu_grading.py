"""Palu's widths: bits for every run of latent channels of all layers, by one reverse water-filling.

A channel costs its squared singular value if it is dropped, and that times the error of a standard normal variable if
it is coded at some bits. A channel that gets none is a rank cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvslim.allocating.water_filling import FloatArray, IntArray, fill
from kvslim.caching.latent_graded import RUN
from kvslim.errors import BudgetError
from kvslim.palu_config import PaluPlan, Widths
from kvslim.quantizing.channels import WIDTHS
from kvslim.quantizing.gained import unit_error
from kvslim.quantizing.packing import packed_bytes

_GAIN_BITS, _POSITION_BITS = 8, 32


def graded_plan(
    chosen: PaluPlan,
    energies: Sequence[Sequence[float]],
    scores: Sequence[float],
    bits: float,
    channels: int,
    *,
    rotary: bool,
) -> PaluPlan:
    """Choose the widths of all runs of channels, and cut off the ranks that get no bits.

    Args:
        chosen: the ranks, at most.
        energies: per layer, keys and values, and group, the squared singular values.
        scores: in the same order, the cost of a unit of energy.
        bits: mean bits per channel of the uncompressed keys and values, gains and positions included.
        channels: these channels, of all layers.
        rotary: whether the cache keeps positions.

    Raises:
        BudgetError: the bits do not even pay for gains and positions.
    """
    layers = len(chosen.key_ranks)
    fixed = 2 * layers * _GAIN_BITS + (_POSITION_BITS if rotary else 0)
    budget = int(bits * channels) - fixed
    if budget < 0:
        raise BudgetError(
            f"graded={bits:g} gives {int(bits * channels)} bits per token, and gains and positions take {fixed}. Raise "
            f"it to more than {fixed / channels:.3f}."
        )
    cells = [groups for pair in zip(chosen.key_ranks, chosen.value_ranks, strict=True) for groups in pair]
    ranks = [rank for groups in cells for rank in groups]
    offers = [_offer(*one) for one in zip(ranks, energies, scores, strict=True)]
    errors, costs = (np.concatenate(parts) for parts in zip(*offers, strict=True))
    choices = fill(errors, costs, budget).choices
    widths = iter(np.split(choices, np.cumsum([len(table) for table, _ in offers])[:-1]))
    cut = [[_trimmed(rank, [WIDTHS[i] for i in next(widths)]) for rank in groups] for groups in cells]
    key, value = (_apart(cut[kind::2]) for kind in (0, 1))
    return replace(chosen, key_ranks=key[0], value_ranks=value[0], key_widths=key[1], value_widths=value[1])


def _offer(rank: int, energies: Sequence[float], score: float) -> tuple[FloatArray, IntArray]:
    """Per run and width, what the errors of a group of channels cost, and bits per token."""
    starts = np.arange(0, rank, RUN)
    costs = score * np.add.reduceat(np.asarray(energies[:rank], dtype=np.float64), starts)
    sizes = np.diff(np.append(starts, rank))
    errors = costs[:, None] * np.array([unit_error(width) for width in WIDTHS])
    bits = np.array([[8 * packed_bytes(int(size), w) for w in WIDTHS] for size in sizes], dtype=np.int64)
    return errors, np.maximum.accumulate(bits, axis=1)  # of a short run, 3 bits in two planes take more than 4 in one


def _trimmed(rank: int, widths: list[int]) -> tuple[int, tuple[int, ...]]:
    """The rank without the runs of no bits at its end, at least one run, and the widths of what is left."""
    kept = max([at + 1 for at, width in enumerate(widths) if width] or [1])
    return min(rank, kept * RUN), tuple(widths[:kept])


def _apart(cells: list[list[tuple[int, tuple[int, ...]]]]) -> tuple[tuple[tuple[int, ...], ...], Widths]:
    """Ranks and widths of each layer and group."""
    ranks = tuple(tuple(rank for rank, _ in groups) for groups in cells)
    return ranks, tuple(tuple(widths for _, widths in groups) for groups in cells)
