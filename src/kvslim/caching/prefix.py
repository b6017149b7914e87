"""A compressed prefix: per batch row a chain of stretches, exact or coded; one object that all layers share.

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
class ExactStretch:
    """Consecutive tokens of a row as the model made them.

    Attributes:
        column: batch column of the first token.
        place: tokens of the row before it.
        kept: ``(2, layers, kv_heads, tokens, head_dim)``, keys then values.
    """

    column: int
    place: int
    kept: Tensor

    @property
    def tokens(self) -> int:
        return int(self.kept.shape[3])

    def on(self, layer: int, device: torch.device) -> Self:
        """The same with layer ``layer`` on ``device``; nothing is copied that is there already."""
        return self if self.kept.device == device else dataclasses.replace(self, kept=self.kept.to(device))

    def dense(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens ``start`` to ``stop`` of the stretch: ``(kv_heads, stop - start, head_dim)``."""
        return self.kept[0, layer, :, start:stop], self.kept[1, layer, :, start:stop]

    def scores(self, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``query`` ``(kv_heads, n, head_dim)`` float32 on keys ``start`` to ``stop``: ``(kv_heads, n, tokens)``."""
        return query @ self.kept[0, layer, :, start:stop].to(query).mT

    def mix(self, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """Values ``start`` to ``stop`` weighted by ``(kv_heads, n, tokens)`` float32: ``(kv_heads, n, head_dim)``."""
        return weights @ self.kept[1, layer, :, start:stop].to(weights)

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, kept=self.kept[:, :, :, :tokens].clone())


@dataclass(frozen=True)
class CodedStretch:
    """Consecutive tokens of a row, compressed.

    Attributes:
        column: batch column of the first token.
        place: tokens of the row before it.
        keys: per layer; un-rotated when ``rope`` is given, unless the block is exact.
        values: per layer.
        rope: rotation that was taken off the keys (pre-RoPE), or None (post-RoPE).
    """

    column: int
    place: int
    keys: tuple[PlacedBlock, ...]
    values: tuple[PlacedBlock, ...]
    rope: Rope | None

    @property
    def tokens(self) -> int:
        return self.keys[0].block.tokens

    def on(self, layer: int, device: torch.device) -> Self:
        """The same with layer ``layer`` on ``device``; nothing is copied that is there already."""
        pair = (self.keys[layer], self.values[layer])
        if all(tensor.device == device for tensor in iter_tensors(pair)):
            return self
        key, value = map_tensors(pair, lambda tensor: tensor.to(device))
        keys = (*self.keys[:layer], key, *self.keys[layer + 1 :])
        values = (*self.values[:layer], value, *self.values[layer + 1 :])
        return dataclasses.replace(self, keys=keys, values=values)

    def dense(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of tokens ``start`` to ``stop``: ``(kv_heads, stop - start, head_dim)``."""
        values = self.values[layer]
        return self._dense_keys(layer, start, stop), values.block.decode(values.layer, start, stop)

    def scores(self, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``query`` ``(kv_heads, n, head_dim)`` float32 on keys ``start`` to ``stop``: ``(kv_heads, n, tokens)``.

        Post-RoPE keys are multiplied as they are stored; pre-RoPE keys are rebuilt and rotated first.
        """
        if self._rotates(layer):
            return query @ self._dense_keys(layer, start, stop).to(query).mT
        keys = self.keys[layer]
        return keys.block.scores(keys.layer, query, start, stop)

    def mix(self, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """Values ``start`` to ``stop`` weighted by ``(kv_heads, n, tokens)`` float32: ``(kv_heads, n, head_dim)``."""
        values = self.values[layer]
        return values.block.mix(values.layer, weights, start, stop)

    def _rotates(self, layer: int) -> bool:
        return self.rope is not None and not self.keys[layer].block.exact

    def _dense_keys(self, layer: int, start: int, stop: int) -> Tensor:
        keys = self.keys[layer]
        rebuilt = keys.block.decode(keys.layer, start, stop)
        if self.rope is not None and self._rotates(layer):
            places = torch.arange(self.place + start, self.place + stop, device=rebuilt.device)
            rebuilt = self.rope.rotate(rebuilt, places)
        return rebuilt

    def crop(self, tokens: int) -> Self:
        cropped: dict[int, Block] = {}

        def crop_block(placed: PlacedBlock) -> PlacedBlock:
            key = id(placed.block)
            if key not in cropped:
                cropped[key] = placed.block.crop(tokens)
            return PlacedBlock(cropped[key], placed.layer)

        keys, values = tuple(map(crop_block, self.keys)), tuple(map(crop_block, self.values))
        return dataclasses.replace(self, keys=keys, values=values)


Stretch = ExactStretch | CodedStretch


@dataclass(frozen=True)
class CompressedRow:
    """All layers of one sequence.

    Attributes:
        start: column of the first real token in the batch (left padding before it).
        stretches: in order: exact sinks, the coded prefill, the exact recent window, then sealed blocks of later
            tokens. None is empty.
    """

    start: int
    stretches: tuple[Stretch, ...]

    @property
    def length(self) -> int:
        """Real tokens of the row."""
        return sum(stretch.tokens for stretch in self.stretches)

    @property
    def coded(self) -> int:
        """Tokens of the row that are compressed."""
        return sum(stretch.tokens for stretch in self.stretches if isinstance(stretch, CodedStretch))

    def tiles(self, layer: int, device: torch.device, size: int | None = None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Decode layer ``layer`` piece by piece: ``(column, keys, values)`` of at most ``size`` tokens each.

        What is stored elsewhere (offloaded) travels to ``device`` compressed, this layer only.
        """
        for stored in self.stretches:
            stretch, step = stored.on(layer, device), size or stored.tokens
            for start in range(0, stretch.tokens, step):
                stop = min(start + step, stretch.tokens)
                yield (stretch.column + start, *stretch.dense(layer, start, stop))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Decode layer ``layer`` into ``keys`` and ``values``, each ``(kv_heads, columns, head_dim)``."""
        for column, tile_keys, tile_values in self.tiles(layer, keys.device):
            stop = column + tile_keys.shape[1]
            keys[:, column:stop], values[:, column:stop] = tile_keys, tile_values

    def append(self, stretch: Stretch) -> Self:
        return dataclasses.replace(self, stretches=(*self.stretches, stretch))

    def crop(self, columns: int, made: dict[int, Stretch]) -> Self:
        """Keep what lies before batch column ``columns``; ``made`` collects what was cropped, by the id it had."""
        kept: list[Stretch] = []
        for stretch in self.stretches:
            tokens = min(stretch.tokens, columns - stretch.column)
            if tokens > 0:
                if id(stretch) not in made:
                    made[id(stretch)] = stretch if tokens == stretch.tokens else stretch.crop(tokens)
                kept.append(made[id(stretch)])
        return dataclasses.replace(self, stretches=tuple(kept))


@dataclass(frozen=True)
class Prefix:
    """The compressed prefix of a batch: ``columns`` positions, right-aligned or left-aligned rows inside them.

    ``like`` is an empty ``(kv_heads, 0, head_dim)`` tensor of the model's dtype and device.
    """

    rows: tuple[CompressedRow, ...]
    columns: int
    like: Tensor

    def dense(self, layer: int, extra: int) -> tuple[Tensor, Tensor]:
        """Rebuild one layer: keys and values ``(batch, kv_heads, columns + extra, head_dim)``, padding zero.

        The last ``extra`` columns are left for the caller to fill.
        """
        shape = (len(self.rows), self.like.shape[0], self.columns + extra, self.like.shape[2])
        keys, values = self.like.new_zeros(shape), self.like.new_zeros(shape)
        done: dict[int, int] = {}
        for index, row in enumerate(self.rows):
            if id(row) in done:  # beams of one prompt share the row object
                keys[index], values[index] = keys[done[id(row)]], values[done[id(row)]]
            else:
                row.write(layer, keys[index], values[index])
                done[id(row)] = index
        return keys, values

    def groups(self) -> list[list[int]]:
        """Batch indices of the rows that are one object: beams and repeats of one prompt."""
        found: dict[int, list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(id(row), []).append(index)
        return list(found.values())

    def crop(self, columns: int) -> Prefix:
        made: dict[int, Stretch] = {}  # diverged beams share their first stretches, and still do afterwards
        cropped = {id(row): row.crop(columns, made) for row in self.rows}
        rows = tuple(cropped[id(row)] for row in self.rows)
        return dataclasses.replace(self, rows=rows, columns=min(columns, self.columns))

    def select(self, indices: list[int]) -> Prefix:
        """Rows by index, with repetition allowed; no storage is copied."""
        return dataclasses.replace(self, rows=tuple(self.rows[i] for i in indices))

    def map(self, change: Callable[[Tensor], Tensor]) -> Prefix:
        """The same prefix with ``change`` applied to every tensor, such as a move to another device."""
        return map_tensors(self, change)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that is kept for these tokens; the rotary frequencies belong to the model."""
        for row in self.rows:
            for stretch in row.stretches:
                if isinstance(stretch, ExactStretch):
                    yield stretch.kept
                else:
                    yield from iter_tensors((stretch.keys, stretch.values))

    @property
    def nbytes(self) -> int:
        return storage_bytes(self.tensors())
