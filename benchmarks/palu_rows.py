"""Which configurations palu_table.py measures, and the Markdown tables made from its results."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from kvslim.palu import PaluConfig

KEPT = (0.7, 0.5, 0.3)
"""Shares of the latent channels that the paper's tables keep (it names what is removed: 30, 50, 70 %)."""


@dataclass(frozen=True)
class Row:
    """One configuration; ``public`` is the public implementation's perplexity at this kept rank, if measured.

    ``multiple`` is 32 where the public code rounded ranks to 32, which also keeps at least 32 in every group.
    """

    group_size: int
    ranks: str
    kept: float
    decomposition: str = "whitened"
    public: float | None = None
    multiple: int = 1
    floor: float = PaluConfig.rank_floor
    bits: int = 16
    hadamard: bool = True

    @property
    def config(self) -> PaluConfig:
        return PaluConfig(
            rate=1 - self.kept,
            group_size=self.group_size,
            ranks=self.ranks,
            decomposition=self.decomposition,
            rank_multiple=self.multiple,
            rank_floor=self.floor,
            bits=self.bits,
            hadamard=self.hadamard,
            fusion="none",  # the same function, and the fastest one for whole windows
        )


RULES = (
    ("uniform", "whitened"),
    ("fisher", "whitened"),
    ("fisher-rms", "whitened"),
    ("spectral", "whitened"),
    ("uniform", "loss-aware"),
    ("spectral", "loss-aware"),
    ("uniform", "svd"),
    ("fisher", "svd"),
    ("spectral", "svd"),
)
"""Ranks and decomposition of the rows at every size and share; the sixth is our best."""

BEST = ("spectral", "loss-aware")


def group_sizes(kv_heads: int) -> list[int]:
    """Joint first, per head last."""
    return [size for size in range(kv_heads, 0, -1) if kv_heads % size == 0]


def public_rows(kv_heads: int, windows: str) -> list[Row]:
    """The rows measured with the public implementation for this model, each followed by our best at the same size."""
    measured: list[Row] = []
    if kv_heads == 3 and windows == "all":
        measured = [
            Row(3, "uniform", 0.667, public=27.63),
            Row(3, "uniform", 0.50, public=31.20),
            Row(3, "fisher-rms", 0.697, public=24.68, multiple=32),
            Row(3, "fisher-rms", 0.50, public=31.83, multiple=32),
        ]
    elif kv_heads == 3:
        measured = [
            Row(3, "fisher-rms", 0.697, public=23.92, multiple=32),
            Row(3, "fisher-rms", 0.697, "svd", public=75.2, multiple=32),
            Row(1, "fisher-rms", 0.733, public=28.12, multiple=32),
            Row(1, "uniform", 0.50, public=48.8),
            Row(1, "fisher-rms", 0.603, public=36.5, multiple=32),
        ]
    elif kv_heads == 8:
        uniform = [(8, 0.688, 24.67), (8, 0.50, 24.76), (4, 0.699, 24.73), (4, 0.50, 24.98), (2, 0.75, 24.80),
                   (2, 0.50, 25.55), (1, 0.703, 25.17), (1, 0.50, 26.40)]  # fmt: skip
        fisher = [(8, 0.699, 24.67), (8, 0.504, 24.74), (4, 0.702, 24.71), (4, 0.50, 24.92), (2, 0.691, 24.82),
                  (2, 0.516, 25.16), (1, 0.707, 24.86)]  # fmt: skip
        measured = [Row(size, "uniform", kept, public=ppl) for size, kept, ppl in uniform]
        measured += [Row(size, "fisher-rms", kept, public=ppl) for size, kept, ppl in fisher]
        measured.append(Row(4, "fisher-rms", 0.711, "svd", public=24.75, multiple=32))
    ranks, decomposition = BEST
    return [
        row
        for one in measured
        for row in (one, replace(one, ranks=ranks, decomposition=decomposition, multiple=1))
        if one.decomposition != "svd" or row is one
    ]


def all_rows(kv_heads: int, windows: str) -> list[Row]:
    """The rows beside public figures and those with coded latents, then 30, 50, 70 % of every size by every rule."""
    grid = [
        Row(size, ranks, kept, decomposition)
        for kept in KEPT
        for size in group_sizes(kv_heads)
        for ranks, decomposition in RULES
    ]
    named = public_rows(kv_heads, windows) + (code_rows(kv_heads, windows) if windows == "all" else [])
    return list(dict.fromkeys(named + grid))


def table_rows(table: int, kv_heads: int, windows: str = "all") -> list[Row]:
    """The rows that repeat one of the paper's tables with this model's group sizes.

    1: joint, grouped (size 4, as the paper's) and per head, by the paper's rule and by our best. 8: every group size at
    50 %. 10: uniform ranks against automatic ones, at size 4 or, where there is none, joint. 3 and 9 (one run): latents
    at 16, 4, 3 and 2 bits with and without Hadamard, by the public rule beside the public figures, and by our best.
    """
    if table in (3, 9):
        return code_rows(kv_heads, windows)
    sizes = group_sizes(kv_heads)
    grouped = 4 if 4 in sizes else kv_heads
    ours = (("fisher", "whitened"), BEST)
    if table == 1:
        named = [size for size in sizes if size in (kv_heads, grouped, 1)]
        return [Row(size, ranks, kept, how) for kept in KEPT for size in named for ranks, how in ours]
    if table == 8:
        return [Row(size, ranks, 0.5, how) for size in sizes for ranks, how in ours]
    return [Row(grouped, ranks, kept, how) for kept in KEPT for ranks, how in RULES if how != "svd"]


def code_rows(kv_heads: int, windows: str) -> list[Row]:
    """Coded latents. The public figures are those of its simulated quantization, at the rank it kept."""
    public: dict[tuple[float, int, bool], float] = {}
    size, cells = (3, ((0.697, 32), (0.50, 32))) if kv_heads == 3 else (min(4, kv_heads), ((0.711, 32), (0.50, 1)))
    if kv_heads == 3 and windows == "all":
        public = _code_figures(0.697, (24.68, 25.69, 28.43, 70.6), (25.16, 26.56, 43.7))
        public |= _code_figures(0.50, (31.83, 32.71, 36.31, 81.3), (32.40, 34.70, 58.6))
    elif kv_heads == 8 and windows == "all":
        public = _code_figures(0.711, (24.72, 24.98, 25.88, 31.44), (24.83, 25.31, 28.65))
        public |= _code_figures(0.50, (24.90, 25.17, 26.07, 31.65), (25.03, 25.59, 29.40))
    codes = [(16, True), *((bits, turned) for bits in (4, 3, 2) for turned in (False, True))]
    ranks, decomposition = BEST
    rows = []
    for kept, multiple in cells:
        theirs = Row(size, "fisher-rms", kept, multiple=multiple)
        ours = Row(size, ranks, kept, decomposition)
        for row in (theirs, ours):
            figures = public if row is theirs else {}
            rows += [replace(row, bits=b, hadamard=h, public=figures.get((kept, b, h))) for b, h in codes]
    return rows


def _code_figures(kept: float, plain: tuple[float, ...], turned: tuple[float, ...]) -> dict[Any, float]:
    """Public perplexities by (kept, bits, Hadamard): 16, 4, 3, 2 bits plain, then 4, 3, 2 bits rotated."""
    figures = {(kept, bits, bits == 16): value for bits, value in zip((16, 4, 3, 2), plain, strict=True)}
    return figures | {(kept, bits, True): value for bits, value in zip((4, 3, 2), turned, strict=True)}


def markdown(result: dict[str, Any]) -> str:
    """The perplexities of a result file: removed share by group size, then what stands beside public figures."""
    rows = [row for row in result["rows"] if row["public"] is None and row["bits"] == 16]
    sizes = sorted({row["group_size"] for row in rows}, reverse=True)
    found: dict[tuple[float, str, str], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row["kept"], row["ranks"], row["decomposition"]), {})[row["group_size"]] = row["perplexity"]
    lines = []
    if found:
        lines = [
            "| removed | ranks, decomposition | " + " | ".join(_size_name(size, max(sizes)) for size in sizes) + " |",
            "|---" * (2 + len(sizes)) + "|",
        ]
    for (kept, ranks, decomposition), by_size in found.items():
        cells = [f"{by_size[size]:.2f}" if size in by_size else "" for size in sizes]
        lines.append(f"| {1 - kept:.0%} | {ranks}, {decomposition} | " + " | ".join(cells) + " |")
    beside = [row for row in result["rows"] if row["public"] is not None or row["bits"] < 16]
    if beside:
        lines += [
            "",
            "| group | ranks | decomposition | bits | kept | K / V | PPL | public | ours / public |",
            "|---" * 9 + "|",
        ]
    for row in beside:
        bits = f"{row['bits']}{'' if row['hadamard'] else ', no Hadamard'}"
        figures = f"{row['public']} | {row['perplexity'] / row['public']:.4f}" if row["public"] else "|"
        lines.append(
            f"| {row['group_size']} | {row['ranks']} | {row['decomposition']} | {bits} | {row['achieved']:.3f} | "
            f"{row['kept_k']:.2f} / {row['kept_v']:.2f} | {row['perplexity']:.3f} | {figures} |"
        )
    lines += [
        "",
        f"Uncompressed: {result['uncompressed']:.3f}. Calibration: {result['calibration_tokens']} tokens, "
        f"{result['fisher_windows']} Fisher windows.",
    ]
    return "\n".join(lines).lstrip("\n")


def _size_name(size: int, joint: int) -> str:
    return f"gs {size}" + (" (joint)" if size == joint else " (per head)" if size == 1 else "")


def same_row(row: Row, measured: dict[str, Any]) -> bool:
    """Whether an entry of a result file is of this configuration."""
    return all(measured.get(name) == value for name, value in asdict(row).items())
