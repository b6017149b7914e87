"""Every method at many ratios on the same windows: figures against measured bytes, and where graded caches lose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvslim.evaluating.compare import MethodResult
from kvslim.evaluating.plots import COLOURS, MARKERS, new_figure, points_of, save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATIOS = (2, 2.5, 3, 3.5, 4, 5, 6, 8)
"""Ratios of the methods that have one."""

FIXED = ("none", "int8", "int4", "int3", "int2", "rot6", "rot5", "rot4", "rot3", "rot2", "fp8", "kivi-4", "kivi-2",
         "kvquant-4", "kvquant-3")  # fmt: skip
"""Methods whose widths decide their ratio."""

FAMILIES = ("jolt-{}x", "jolt-{}x:paper", "graded-{}x", "graded-{}x:speed")
OURS = ("graded", "graded, rotated keys")
"""Families that must not lose to any other at equal bytes."""

PANELS = (
    ("kl", "KL from the uncompressed model, nats per token", True),
    ("disagreement", "share of other top predictions", True),
    ("perplexity", "perplexity of the scored tokens", False),
    ("value_error", "relative error of values", True),
)


def sweep_methods(ratios: Sequence[float] = RATIOS) -> list[str]:
    """The names of all methods of a sweep."""
    return [*FIXED, *(family.format(f"{ratio:g}") for family in FAMILIES for ratio in ratios)]


def beaten(methods: Sequence[MethodResult]) -> list[str]:
    """Where a method diverges less than every graded cache of at least its ratio, in words; empty if nowhere.

    A graded cache between two measured ratios is read off the line between their logarithms.
    """
    ours = sorted((one.ratio, one.kl) for one in methods if one.family in OURS and one.kl > 0)
    found = []
    for one in points_of(methods):
        if one.family in OURS or not ours:
            continue
        at = kl_at(ours, one.ratio)
        if at is None:
            found.append(f"{one.method} at {one.ratio:.2f}x has KL {one.kl:.5f}; no graded cache was measured there.")
        elif one.kl < at:
            found.append(f"{one.method} at {one.ratio:.2f}x has KL {one.kl:.5f}, the graded cache {at:.5f}.")
    return found


def kl_at(points: Sequence[tuple[float, float]], ratio: float) -> float | None:
    """KL at ``ratio`` by the lower envelope of ``(ratio, KL)`` points; None beyond the largest ratio.

    Below the smallest ratio it is that of the smallest: a cache may be smaller than asked.
    """
    best: list[tuple[float, float]] = []
    for at, kl in sorted(points, reverse=True):  # a cache of a higher ratio serves a lower one
        if not best or kl < best[-1][1]:
            best.append((at, kl))
    best.reverse()
    if not best or ratio > best[-1][0]:
        return None
    if ratio <= best[0][0]:
        return best[0][1]
    for (low, one), (high, two) in itertools.pairwise(best):
        if low <= ratio <= high:
            share = (ratio - low) / (high - low)
            return math.exp((1 - share) * math.log(one) + share * math.log(two))
    return None


def near_lossless(methods: Sequence[MethodResult], kl: float = 1e-3, agreement: float = 0.99) -> MethodResult | None:
    """The smallest graded cache with at most this divergence and at least this agreement."""
    fine = [one for one in methods if one.family in OURS and one.kl <= kl and one.agreement >= agreement]
    return max(fine, key=lambda one: one.ratio, default=None)


def plot_sweep(methods: Sequence[MethodResult], path: Path, title: str) -> None:
    """Draw divergence, disagreement, perplexity and error against the measured ratio, one colour per family."""
    figure, panels = new_figure(12, 9, 2, 2)
    families = list(dict.fromkeys(one.family for one in points_of(methods)))
    for axes, (name, label, logarithmic) in zip(panels, PANELS, strict=True):
        for index, family in enumerate(families):
            _draw(axes, [one for one in methods if one.family == family], name, index)
        if logarithmic:
            axes.set_yscale("log")
        axes.set_xlabel("bf16 bytes over measured bytes")
        axes.set_ylabel(label, fontsize=9)
        axes.grid(True, which="both", alpha=0.2)
    for one in methods:
        if one.family == "none":
            panels[2].axhline(one.perplexity, color="grey", linestyle=":")
    highest = max(one.perplexity for one in methods if one.family == "none") if methods else 1.0
    panels[2].set_ylim(top=highest * 1.2, bottom=highest * 0.99)
    panels[0].legend(fontsize=7)
    figure.suptitle(title, fontsize=11)
    save_png(figure, path)


def _draw(axes: Axes, chosen: list[MethodResult], name: str, index: int) -> None:
    points = sorted((one.ratio, 1 - one.agreement if name == "disagreement" else getattr(one, name)) for one in chosen)
    points = [(ratio, value) for ratio, value in points if value > 0]
    axes.plot(
        [ratio for ratio, _ in points],
        [value for _, value in points],
        linewidth=1,
        linestyle="-" if len(points) > 1 else "none",
        marker=MARKERS[index % len(MARKERS)],
        markersize=4,
        color=COLOURS[index % len(COLOURS)],
        label=chosen[0].family,
    )
