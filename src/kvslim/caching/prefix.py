"""A compressed prefix: per batch row exact sinks, compressed middle, exact recent window; one object for all layers.

Rows are immutable and independent of each other: what a row stores does not depend on its neighbours in the batch, and
reordering, repeating or selecting rows only moves references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvslim.caching.block import Block, iter_tensors, map_tensors, storage_bytes
from kvslim.types import Rope


@dataclass(frozen=True)
class PlacedBlock:
    """Where a layer's keys or values are found: layer ``layer`` of the group that ``block`` stores."""

    block: Block
    layer: int


@dataclass(frozen=True)
class EmptyBlock:
    """No middle tokens: a row that fits into sinks and window. Keeps nothing."""

    kv_heads: int
    head_dim: int
    tokens: int = 0

    def decode(self, layer: int) -> Tensor:
        return torch.zeros(self.kv_heads, 0, self.head_dim)

    def crop(self, tokens: int) -> Self:
        return self


@dataclass(frozen=True)
class CompressedRow:
    """All layers of one sequence.

    Attributes:
        start: column of the first real token in the batch (left padding before it).
        sinks: ``(2, layers, kv_heads, n_sinks, head_dim)``, keys then values, as the model made them.
        window: ``(2, layers, kv_heads, n_window, head_dim)``, likewise.
        keys: per layer, the middle tokens; un-rotated when ``rope`` is given.
        values: per layer, the middle tokens.
        rope: rotation that was taken off the middle keys (pre-RoPE), or None (post-RoPE).
    """

    start: int
    sinks: Tensor
    window: Tensor
    keys: tuple[PlacedBlock, ...]
    values: tuple[PlacedBlock, ...]
    rope: Rope | None

    @property
    def middle(self) -> int:
        return self.keys[0].block.tokens

    @property
    def length(self) -> int:
        """Real tokens of the row."""
        return self.sinks.shape[3] + self.middle + self.window.shape[3]

    @property
    def end(self) -> int:
        return self.start + self.length

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Decode layer ``layer`` into ``keys`` and ``values``, each ``(kv_heads, columns, head_dim)``."""
        n_sinks, middle_end = self.sinks.shape[3], self.sinks.shape[3] + self.middle
        for which, (dense, stored) in enumerate(((keys, self.keys), (values, self.values))):
            row = dense[:, self.start : self.end]
            row[:, :n_sinks] = self.sinks[which, layer]
            row[:, middle_end:] = self.window[which, layer]
            decoded = stored[layer].block.decode(stored[layer].layer)
            if which == 0 and self.rope is not None:
                positions = torch.arange(n_sinks, middle_end, device=decoded.device)
                decoded = self.rope.rotate(decoded, positions)
            row[:, n_sinks:middle_end] = decoded

    def crop(self, columns: int) -> Self:
        """Keep what lies before batch column ``columns``."""
        keep = max(0, min(columns, self.end) - self.start)
        n_sinks, middle_end = self.sinks.shape[3], self.sinks.shape[3] + self.middle
        if keep >= self.length:
            return self
        middle = max(0, min(keep, middle_end) - n_sinks)
        cropped: dict[int, Block] = {}

        def crop_block(placed: PlacedBlock) -> PlacedBlock:
            key = id(placed.block)
            if key not in cropped:
                cropped[key] = placed.block if middle == self.middle else placed.block.crop(middle)
            return PlacedBlock(cropped[key], placed.layer)

        return dataclasses.replace(
            self,
            sinks=self.sinks[:, :, :, : min(keep, n_sinks)].clone(),
            window=self.window[:, :, :, : max(0, keep - middle_end)].clone(),
            keys=tuple(map(crop_block, self.keys)),
            values=tuple(map(crop_block, self.values)),
        )


@dataclass(frozen=True)
class Prefix:
    """The compressed prefix of a batch: ``columns`` positions, right-aligned or left-aligned rows inside them."""

    rows: tuple[CompressedRow, ...]
    columns: int

    def dense(self, layer: int, extra: int) -> tuple[Tensor, Tensor]:
        """Rebuild one layer: keys and values ``(batch, kv_heads, columns + extra, head_dim)``, padding zero.

        The last ``extra`` columns are left for the caller to fill.
        """
        like = self.rows[0].sinks
        shape = (len(self.rows), like.shape[2], self.columns + extra, like.shape[4])
        keys, values = like.new_zeros(shape), like.new_zeros(shape)
        done: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            if id(row) in done:  # beams of one prompt share the row object
                keys[index], values[index] = keys[done[id(row)]], values[done[id(row)]]
            else:
                row.write(layer, keys[index], values[index])
                done[id(row)] = index
        return keys, values

    def crop(self, columns: int) -> Prefix:
        cropped = {id(row): row.crop(columns) for row in self.rows}
        return Prefix(tuple(cropped[id(row)] for row in self.rows), min(columns, self.columns))

    def select(self, indices: list[int]) -> Prefix:
        """Rows by index, with repetition allowed; no storage is copied."""
        return Prefix(tuple(self.rows[i] for i in indices), self.columns)

    def map(self, change: Callable[[Tensor], Tensor]) -> Prefix:
        return map_tensors(self, change)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is kept for these tokens; the rotary frequencies belong to the model."""
        for row in self.rows:
            yield from iter_tensors((row.sinks, row.window, row.keys, row.values))

    @property
    def nbytes(self) -> int:
        return storage_bytes(self.tensors())
