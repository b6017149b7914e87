"""Plots as PNG files, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvslim.errors import ConfigError
from kvslim.evaluating.compare import MethodResult
from kvslim.files import write_atomically
from kvslim.palu_config import PaluPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import BboxBase

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette: told apart with every kind of colour vision."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of ``width`` × ``height`` inches with axes, row by row, bound to no display and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure to ``path``, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_atomically(path, buffer.getvalue())


def points_of(methods: Sequence[MethodResult]) -> list[MethodResult]:
    """Those that :func:`plot_quality` can draw: the others do not differ from the uncompressed model."""
    return [one for one in methods if one.kl > 0]


def plot_quality(methods: Sequence[MethodResult], path: Path, title: str) -> None:
    """Draw divergence (logarithmic) against measured bytes per token, one colour per family, every point labelled.

    The uncompressed cache, at divergence zero, is a vertical line: a logarithmic axis has no zero.

    Raises:
        ConfigError: nothing is left to draw, or the file cannot be written.
    """
    points = points_of(methods)
    if not points:
        raise ConfigError("No method differs from the uncompressed model, so there is nothing to plot.")
    figure, (axes,) = new_figure(7.5, 5)
    for index, family in enumerate(dict.fromkeys(one.family for one in points)):
        chosen = sorted((one for one in points if one.family == family), key=lambda one: one.bytes_per_token)
        axes.plot(
            [one.bytes_per_token / 1000 for one in chosen],
            [one.kl for one in chosen],
            linestyle="-" if len(chosen) > 1 else "none",
            linewidth=1,
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=family,
        )
    for one in methods:
        if one.family == "none":
            axes.axvline(one.bytes_per_token / 1000, color="grey", linestyle=":", label="uncompressed (KL = 0)")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.margins(x=0.15, y=0.1)
    axes.set_xlabel("measured cache size, kB per token (smaller is better)")
    axes.set_ylabel("KL from the uncompressed model, nats per token (lower is better)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    _label(figure, axes, {f"{one.method} ({one.ratio:.2f}x)": (one.bytes_per_token / 1000, one.kl) for one in points})
    save_png(figure, path)


def plot_ranks(plans: Mapping[str, PaluPlan], path: Path, title: str) -> None:
    """Draw the kept share of each layer's keys and values, one panel per plan (Palu, Fig. 7).

    Args:
        plans: what was chosen, by name; the names become the panels' titles.
        path: the PNG file.
        title: of the figure.

    Raises:
        ConfigError: there is no plan to draw, or the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    if not plans:
        raise ConfigError("There are no ranks to plot. Compress a model first.")
    figure, panels = new_figure(4.5 * len(plans) + 0.5, 3.5, len(plans))
    for axes, (name, plan) in zip(panels, plans.items(), strict=True):
        for side, (kind, layers) in enumerate((("keys", plan.key_ranks), ("values", plan.value_ranks))):
            shares = [sum(ranks) / (len(ranks) * plan.full_rank) for ranks in layers]
            places = [layer + 0.4 * (side - 0.5) for layer in range(len(layers))]
            axes.bar(places, shares, width=0.4, color=COLOURS[side], label=kind)
        axes.axhline(plan.kept, color="grey", linestyle=":", label=f"all together: {plan.kept:.1%}")
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_title(name, fontsize=9)
    panels[0].set_ylabel("latent channels kept, share of full rank")
    panels[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    save_png(figure, path)


def _label(figure: Figure, axes: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Write each point's name beside it, on the side where it covers the least of what is there already."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # settles the limits, so that data can be placed in pixels
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in axes.transData.transform(list(points.values()))]
    for text, where in points.items():
        sides = (("left", 7, 4), ("left", 7, -11), ("right", -7, 4), ("right", -7, -11))
        notes = [
            axes.annotate(text, where, (dx, dy), textcoords="offset points", fontsize=8, ha=side)
            for side, dx, dy in sides
        ]
        boxes = [note.get_window_extent() for note in notes]
        inside = axes.get_window_extent()
        costs = [sum(_overlap(box, other) for other in taken) + _area(box) - _overlap(box, inside) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        for index, note in enumerate(notes):
            if index != best:
                note.remove()


def _area(box: BboxBase) -> float:
    return float(box.width * box.height)


def _overlap(one: BboxBase, other: BboxBase) -> float:
    from matplotlib.transforms import Bbox

    common = Bbox.intersection(one, other)
    return 0.0 if common is None else _area(common)
