"""Ranks for all groups of all layers under one target rate (Palu, Sec. 3.3).

A *cell* is one group of KV heads of the keys, or of the values, of one layer. All cells share one budget of latent
channels. The paper gives each cell a share in proportion to its Fisher information; a uniform allocation is the same
rule with the cell's size as its score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvslim.errors import CalibrationError, ConfigError

_SCORE_FLOOR = 1e-12
"""Scores below this share of the largest count as this share, so that cells without any score split what is left."""


def uniform_ranks(caps: Sequence[int], rate: float, multiple: int = 1) -> list[int]:
    """Keep the same share of every cell. Arguments, result and errors as in :func:`proportional_ranks`."""
    return proportional_ranks([float(cap) for cap in caps], caps, rate, multiple)


def proportional_ranks(
    scores: Sequence[float], caps: Sequence[int], rate: float, multiple: int = 1, floor: float = 0.0
) -> list[int]:
    """Share ``(1 - rate) * sum(caps)`` channels among the cells in proportion to their scores.

    Each cell gets at least ``multiple`` channels and at least the share ``floor`` of its cap (but never more than its
    cap); what a cell cannot take goes to the others in proportion. Ranks are multiples of ``multiple`` or the cap.
    Rounding is re-balanced by largest remainder and never exceeds the budget; it leaves less than ``multiple`` channels
    of it unspent. Equal input gives equal output.

    Args:
        scores: one non-negative number per cell.
        caps: the full rank of each cell.
        rate: fraction of the latent channels to remove, ``0 <= rate < 1``.
        multiple: ranks are rounded to multiples of this.
        floor: least share of its cap that a cell keeps, cut to ``1 - rate``.

    Returns:
        One rank per cell.

    Raises:
        ConfigError: the rate or multiple is out of range, or leaves fewer channels than the least allowed ranks.
        CalibrationError: a score is negative, NaN or infinite, or all are zero.
    """
    largest = max(scores)
    if largest <= 0 or not all(math.isfinite(score) and score >= 0 for score in scores):
        raise CalibrationError("Scores must be finite, not negative and not all zero. Calibrate again.")
    budget, floors = budget_and_floors(caps, rate, multiple, floor)
    shares = _water_fill([max(score / largest, _SCORE_FLOOR) for score in scores], floors, caps, budget)
    return _round_to_budget(shares, caps, budget, multiple)


def budget_and_floors(caps: Sequence[int], rate: float, multiple: int, floor: float) -> tuple[int, list[int]]:
    """How many channels there are to share, and the least rank of each cell; the terms of every rule.

    The budget is ``(1 - rate) * sum(caps)``, rounded down. Other arguments and errors as in
    :func:`proportional_ranks`.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"rate must be at least 0 and below 1, not {rate}.")
    if multiple < 1:
        raise ConfigError(f"rank_multiple must be at least 1, not {multiple}.")
    budget = math.floor((1 - rate) * sum(caps) + 1e-6)
    share = min(floor, 1 - rate)
    floors = [min(cap, max(multiple, int(share * cap + 1e-6) // multiple * multiple)) for cap in caps]
    if budget < sum(floors):
        highest = 1 - sum(floors) / sum(caps)
        raise ConfigError(
            f"rate {rate} leaves {budget} latent channels, but {len(caps)} groups need at least {sum(floors)} with "
            f"rank_multiple {multiple}. The highest rate here is {highest:.4f}; lower rate or rank_multiple, or use "
            f"larger groups."
        )
    return budget, floors


def _water_fill(scores: list[float], floors: list[int], caps: Sequence[int], budget: int) -> list[float]:
    """The shares ``clip(level * score, floor, cap)`` whose sum is the budget, approached from below."""

    def shares(level: float) -> list[float]:
        return [min(max(level * s, low), high) for s, low, high in zip(scores, floors, caps, strict=True)]

    low, high = 0.0, max(caps) / min(scores)
    if sum(shares(high)) <= budget:
        return shares(high)
    for _ in range(200):  # the score floor bounds the range, so this reaches the last bit
        middle = (low + high) / 2
        if sum(shares(middle)) <= budget:
            low = middle
        else:
            high = middle
    return shares(low)


def _round_to_budget(shares: list[float], caps: Sequence[int], budget: int, multiple: int) -> list[int]:
    """Round down to allowed ranks, then hand out the rest in steps, largest remainder first."""
    ranks = [
        cap if share >= cap else max(int(share // multiple) * multiple, min(multiple, cap))
        for share, cap in zip(shares, caps, strict=True)
    ]
    order = sorted(range(len(ranks)), key=lambda i: (ranks[i] - shares[i], i))
    left = budget - sum(ranks)
    granted = True
    while left > 0 and granted:
        granted = False
        for i in order:
            step = min(multiple, caps[i] - ranks[i])
            if 0 < step <= left:
                ranks[i] += step
                left -= step
                granted = True
    return ranks
