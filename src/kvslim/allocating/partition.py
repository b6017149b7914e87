"""Cut a row of channels into contiguous pieces and give each a width: the exact optimum for every cost at once.

A *piece* is a range of channels with an error and a cost at each width. Dynamic programming over the ends of pieces
finds, for every whole cost, the cut and the widths of least error ("KV Cache Transform Coding", 2025, bit allocation).
Costs are small whole numbers (bytes per token), so the table is exact: no price, no gap between points of a hull.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvslim.errors import BudgetError, ConfigError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Piece:
    """Channels ``start`` to ``stop`` as one group.

    Attributes:
        start, stop: channels.
        errors: ``(widths,)`` error ≥ 0 at each width.
        costs: ``(widths,)`` whole cost ≥ 0 at each width.
    """

    start: int
    stop: int
    errors: FloatArray
    costs: IntArray


@dataclass(frozen=True)
class Chosen:
    """A piece of the best cut: channels ``start`` to ``stop`` at width number ``width``."""

    start: int
    stop: int
    width: int


class Partitions:
    """The best cuts of ``length`` channels.

    Attributes:
        errors: ``(most + 1,)`` float64, the least error at exactly that cost; infinite if no cut has it.

    Args:
        pieces: what can be chosen from, in any order.
        length: channels that the pieces of a cut cover together, from 0 on.

    Raises:
        ConfigError: a piece is outside the row, or no cut covers it.
    """

    def __init__(self, pieces: Sequence[Piece], length: int) -> None:
        if any(not 0 <= piece.start < piece.stop <= length for piece in pieces):
            raise ConfigError(f"Pieces lie inside the {length} channels and hold at least one.")
        self.length = length
        ordered = sorted(pieces, key=lambda piece: (piece.start, piece.stop))
        ends = sorted({0, *(piece.stop for piece in ordered)})
        if ends[-1] != length:
            raise ConfigError(f"No pieces end at channel {length}: they cover the row together.")
        most = _largest_cost(ordered, length)
        self._into: dict[int, list[tuple[int, int, int]]] = {end: [] for end in ends}
        """Per end what can lead there: (start, number of the width, cost)."""
        counts = {end: sum(len(p.costs) for p in ordered if p.stop == end) for end in ends}
        self._back = {end: np.zeros(most + 1, dtype=np.min_scalar_type(max(1, counts[end]))) for end in ends}
        least = {end: np.full(most + 1, np.inf) for end in ends}
        least[0][0] = 0.0
        for piece in ordered:
            if piece.start in least:
                self._extend(piece, least[piece.start], least[piece.stop])
        self.errors: FloatArray = least[length]
        if not np.isfinite(self.errors).any():
            raise ConfigError(f"No cut into these pieces covers the {length} channels.")

    def _extend(self, piece: Piece, before: FloatArray, after: FloatArray) -> None:
        """Lead to the piece's end from its start, at every width."""
        into, back = self._into[piece.stop], self._back[piece.stop]
        for width, (error, cost) in enumerate(zip(piece.errors.tolist(), piece.costs.tolist(), strict=True)):
            reached = before[: len(before) - cost] + error
            better = reached < after[cost:]
            np.copyto(after[cost:], reached, where=better)
            np.copyto(back[cost:], len(into), where=better)
            into.append((piece.start, width, cost))

    def best(self, cost: int) -> tuple[Chosen, ...]:
        """The pieces of the best cut of exactly ``cost``, in order.

        Raises:
            BudgetError: no cut costs that.
        """
        if not 0 <= cost < len(self.errors) or not np.isfinite(self.errors[cost]):
            raise BudgetError(f"No cut costs exactly {cost}. Take a cost at which errors is finite.")
        found, end = [], self.length
        while end:
            start, width, spent = self._into[end][int(self._back[end][cost])]
            found.append(Chosen(start, end, width))
            end, cost = start, cost - spent
        return tuple(reversed(found))


def _largest_cost(ordered: Sequence[Piece], length: int) -> int:
    """The cost of the most expensive cut; ``ordered`` by start."""
    reach = {0: 0}
    for piece in ordered:
        if piece.start in reach:
            reach[piece.stop] = max(reach.get(piece.stop, 0), reach[piece.start] + int(piece.costs.max()))
    return reach.get(length, 0)
