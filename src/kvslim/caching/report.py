"""What a cache says about itself: measured bytes, ratio, and the error of every cell."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self


def header_bytes(cells: int) -> int:
    """Bytes that a budget sets aside for describing a row of ``cells`` cells in a file.

    The description of the whole file is up to 2 kB of settings, model and hashes. A cell has its record of 38 bytes,
    and may have a weight and half a share of the price, 12 bytes.
    """
    return 2048 + 50 * cells


def stretch_header_bytes(cells: int) -> int:
    """The same for one more stretch of ``cells`` cells behind a compressed prefix: where it is, and the records."""
    return 32 + 38 * cells


@dataclass(frozen=True)
class CellReport:
    """One cell of one row, after encoding.

    Attributes:
        row: batch row.
        layers: model layers of the group.
        kind: ``keys`` or ``values``.
        plan: what was chosen for it, in words (ranks and bits, or the codec's name).
        nbytes: bytes of the cell's storages.
        error: relative Frobenius error ``‖X - X̂‖ / ‖X‖``, measured.
        energy: ``‖X‖²``, so that errors of cells can be pooled.
        start: tokens of the row before the cell; later stretches are sealed ones.
        cost: what its errors cost by a calibration, summed over tokens; 0 for methods that have none.
        expected: what the calibration predicts for these errors, likewise.
    """

    row: int
    layers: tuple[int, ...]
    kind: str
    plan: str
    nbytes: int
    error: float
    energy: float
    start: int = 0
    cost: float = 0.0
    expected: float = 0.0


def pooled_error(cells: list[CellReport], kind: str) -> float:
    """Relative error over all cells of ``kind`` together: root of summed squared errors over summed energies."""
    chosen = [cell for cell in cells if cell.kind == kind]
    energy = sum(cell.energy for cell in chosen)
    return math.sqrt(sum(cell.error**2 * cell.energy for cell in chosen) / energy) if energy else 0.0


@dataclass(frozen=True)
class CacheReport:
    """Measured state of a compressed cache. Bytes come from the storages that are alive.

    Attributes:
        method: name of the cache class.
        rows: batch rows.
        prefix_tokens: real tokens in the compressed prefix, all rows together; rows that share storage count once.
        prefix_nbytes: bytes of the compressed prefix with sinks and window.
        dense_nbytes: bytes of the same tokens in bf16.
        tail_tokens: exact tokens per row behind the prefix.
        tail_nbytes: bytes of the exact tensors (tail, or the whole prefill before compression; sliding-window layers).
        exact_dense_nbytes: bytes of the same tensors in bf16.
        note: what stays exact and why, or empty.
        cells: one entry per cell.
    """

    method: str
    rows: int
    prefix_tokens: int
    prefix_nbytes: int
    dense_nbytes: int
    tail_tokens: int
    tail_nbytes: int
    exact_dense_nbytes: int
    note: str
    cells: tuple[CellReport, ...]

    @property
    def ratio(self) -> float:
        """bf16 bytes over measured bytes of the compressed prefix; 1.0 when nothing is compressed."""
        return self.dense_nbytes / self.prefix_nbytes if self.prefix_nbytes else 1.0

    @property
    def total_ratio(self) -> float:
        """bf16 bytes over measured bytes of everything cached, exact tokens and sliding-window layers included."""
        kept = self.prefix_nbytes + self.tail_nbytes
        return (self.dense_nbytes + self.exact_dense_nbytes) / kept if kept else 1.0

    @property
    def key_error(self) -> float:
        return pooled_error(list(self.cells), "keys")

    @property
    def value_error(self) -> float:
        return pooled_error(list(self.cells), "values")

    def with_note(self, note: str) -> Self:
        """The same with more to say."""
        return dataclasses.replace(self, note="; ".join(part for part in (self.note, note) if part))

    def to_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "ratio": self.ratio,
            "total_ratio": self.total_ratio,
            "key_error": self.key_error,
            "value_error": self.value_error,
        }

    def __str__(self) -> str:
        lines = [f"{self.method}: {self.rows} row(s)"]
        if self.note:
            lines.append(f"  {self.note}")
        if self.prefix_nbytes:
            lines.append(
                f"  compressed prefix: {self.prefix_tokens} tokens in {_mb(self.prefix_nbytes)}, "
                f"{_mb(self.dense_nbytes)} in bf16: {self.ratio:.2f}x smaller"
            )
            lines.append(f"  relative error: keys {self.key_error:.4f}, values {self.value_error:.4f}")
        lines.append(
            f"  exact: {self.tail_tokens} tokens per row, {_mb(self.tail_nbytes)}; "
            f"everything together {self.total_ratio:.2f}x smaller than bf16"
        )
        for cell in self.cells:
            where = _span(cell.layers) + (f", row {cell.row}" if self.rows > 1 else "") + f" +{cell.start}"
            lines.append(f"  {where:>12} {cell.kind:6} {cell.plan:34} {cell.nbytes:>10} B  error {cell.error:.4f}")
        return "\n".join(lines)


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _span(layers: tuple[int, ...]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
