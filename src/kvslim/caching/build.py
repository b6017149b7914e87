"""A prefix in the making: per row its exact and coded parts, collected layer group by layer group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvslim.caching.cells import Cell, Coded, Span, coded_stretch
from kvslim.caching.layer import CompressedLayer
from kvslim.caching.prefix import CompressedRow, ExactStretch, Stretch
from kvslim.types import KVShape, Rope


class PrefixBuild:
    """What is known of every row so far.

    Args:
        extents: column range of each row's real tokens.
        whole: rows that stay exact altogether.
        sinks, window: first and last tokens of the other rows that stay exact.
        columns: columns of the batch.
    """

    def __init__(
        self, extents: list[tuple[int, int]], whole: list[bool], sinks: int, window: int, columns: int
    ) -> None:
        self.extents = extents
        self.columns = columns
        self.spans: list[Span] = []
        for row, (first, end) in enumerate(extents):
            start = end if whole[row] else min(first + sinks, end)
            stop = max(start, end - window)
            self.spans.append(Span(row, start, stop, start - first, end - first))
        self.twins = list(range(len(extents)))
        self.coded: list[Coded] = []
        self._parts: list[list[Coded]] = [[] for _ in extents]
        self._exact: list[list[tuple[Tensor, Tensor]]] = [[] for _ in extents]

    def part_twins(self, first_equal: Callable[[int], int], *, first: bool) -> None:
        """Look again whether rows are still equal, layer group by layer group; once apart they stay apart."""
        self.twins = [
            row if not first and self.twins[row] == row else first_equal(row) for row in range(len(self.twins))
        ]

    def cells(self, group: tuple[int, ...]) -> list[Cell]:
        """What is to be coded of a layer group; equal rows once, rows that stay exact not at all."""
        own = [span for row, span in enumerate(self.spans) if self.twins[row] == row and span.tokens]
        return [Cell(span, group, kind) for span in own for kind in range(2)]

    def add(self, coded: Coded) -> None:
        self.coded.append(coded)
        for row, twin in enumerate(self.twins):
            if twin == coded.cell.span.row:
                self._parts[row].append(coded)

    def keep_exact(self, layer: CompressedLayer) -> None:
        """Copy the sinks and the window of one layer, keys and values stacked."""
        for row, (first, end) in enumerate(self.extents):
            span = self.spans[row]
            sinks, window = (
                torch.stack((layer.keys[row, :, start:stop], layer.values[row, :, start:stop]))
                for start, stop in ((first, span.start), (span.stop, end))
            )
            self._exact[row].append((sinks, window))

    def rows(self, shape: KVShape, rope: Rope | None) -> tuple[CompressedRow, ...]:
        """The finished rows; equal ones are one object."""
        made: dict[int, CompressedRow] = {}
        for row, twin in enumerate(self.twins):
            if twin == row:
                made[row] = self._row(row, shape, rope)
        return tuple(made[twin] for twin in self.twins)

    def _row(self, row: int, shape: KVShape, rope: Rope | None) -> CompressedRow:
        (first, _), span = self.extents[row], self.spans[row]
        sinks, window = (torch.stack([pair[side] for pair in self._exact[row]], dim=1) for side in range(2))
        stretches: list[Stretch] = []
        if sinks.shape[3]:
            stretches.append(ExactStretch(first, 0, sinks))
        if span.tokens:
            stretches.append(coded_stretch(span, span.start, self._parts[row], shape, rope))
        if window.shape[3]:
            stretches.append(ExactStretch(span.stop, span.stop - first, window))
        return CompressedRow(first, tuple(stretches))
