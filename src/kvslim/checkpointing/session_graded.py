"""How a session keeps the cells of GradedCache: widths of the runs, codes, scales, and exact outliers.

A record is 37 bytes and the widths, little-endian::

    flags: 1 if the outliers are bfloat16                      uint8
    outliers                                                   uint32
    error, energy, cost, expected                              4 × float64
    width of each run, two in a byte, the first one low        ⌈runs / 2⌉ bytes, the rest of the last one zero

The channels themselves are in the calibration statistics, which the session names by their digest.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvslim.caching.block import Block
from kvslim.caching.graded_block import GradedBasis, GradedBlock, layout_words
from kvslim.caching.prefix import Stretch
from kvslim.caching.report import CellReport
from kvslim.checkpointing.session_blocks import Codec, Form
from kvslim.checkpointing.session_plan import PrefixPlan, Record, require
from kvslim.errors import CacheStateError, CheckpointError
from kvslim.quantizing.channels import ChannelLayout

_CELL = struct.Struct("<BIdddd")
_WIDE = 1  # flag; no writer sets another
_LARGEST = 1e100  # of error, cost and expectation, so that their squares and sums stay in float64
_WIDEST = 8


def width_bytes(channels: int, run: int) -> int:
    """Bytes that the widths of one cell take in a file."""
    return (-(-channels // run) + 1) // 2


@dataclass(frozen=True)
class GradedRecord:
    """One block of GradedCache, see :class:`~kvslim.checkpointing.session_plan.Record`.

    Attributes:
        layout: widths of the runs.
        outliers: tokens that are kept exact.
        wide: they are bfloat16, because float16 does not reach so far.
        error, energy, cost, expected: see there.
    """

    layout: ChannelLayout
    outliers: int = 0
    wide: bool = False
    error: float = 0.0
    energy: float = 0.0
    cost: float = 0.0
    expected: float = 0.0

    def words(self, head_dim: int) -> str:
        """See there."""
        return layout_words(self.layout, self.outliers)

    def to_bytes(self) -> bytes:
        widths = (*self.layout.widths, 0)
        pairs = bytes(low | high << 4 for low, high in zip(widths[::2], widths[1::2], strict=False))
        measured = (self.error, self.energy, self.cost, self.expected)
        return _CELL.pack(_WIDE * self.wide, self.outliers, *measured) + pairs


@dataclass(frozen=True)
class GradedRecords:
    """The kind of :class:`GradedRecord`.

    Attributes:
        channels: features of the keys or values of one layer.
        run: channels that share a width.
    """

    channels: int
    run: int

    @property
    def size(self) -> int:
        return _CELL.size + width_bytes(self.channels, self.run)

    def read(self, data: bytes) -> GradedRecord:
        """See :meth:`~kvslim.checkpointing.session_plan.RecordKind.read`."""
        flags, outliers, *measured = _CELL.unpack(data[: _CELL.size])
        require(not flags & ~_WIDE, "a cell of an unknown form")
        require(_measurable(*measured), "an error, energy or cost that is no number ≥ 0, or out of range")
        runs = -(-self.channels // self.run)
        widths = tuple(half for pair in data[_CELL.size :] for half in (pair & 15, pair >> 4))
        require(max(widths) <= _WIDEST and not any(widths[runs:]), "a width of more than 8 bits")
        return GradedRecord(ChannelLayout(widths[:runs], self.run, self.channels), outliers, bool(flags), *measured)


def _measurable(error: float, energy: float, cost: float, expected: float) -> bool:
    """Numbers ≥ 0 in the range of a record."""
    return all(0 <= x <= _LARGEST for x in (error, cost, expected)) and 0 <= energy < math.inf


class HasBases(Protocol):
    """A graded cache, as far as sessions look at one."""

    @property
    def bases(self) -> Mapping[tuple[int, int], GradedBasis]:
        """The channels per layer slot and kind (keys 0, values 1)."""
        ...


@dataclass(frozen=True)
class GradedCodec(Codec):
    """See :class:`~kvslim.checkpointing.session_blocks.Codec`.

    Attributes:
        bases: the channels per layer slot and kind (keys 0, values 1).
        run: channels that share a width.
    """

    bases: Mapping[tuple[int, int], GradedBasis]
    run: int

    @property
    def channels(self) -> int:
        """Features of the keys or values of one layer."""
        return self.shape.kv_heads * self.shape.head_dim

    def forms(self, record: Record, cell: int, tokens: int) -> dict[str, Form]:
        """See there."""
        assert isinstance(record, GradedRecord)  # the plan was read as this kind
        if record.outliers > tokens:
            raise CheckpointError("The plan of the session is damaged: it has more outliers than tokens.")
        return {
            "codes": (torch.uint8, (tokens, record.layout.row_bytes)),
            "scales": (torch.uint8, (record.layout.scale_bytes,)),
            "outlier_at": (torch.int32, (record.outliers,)),
            "outliers": (torch.bfloat16 if record.wide else torch.float16, (record.outliers, self.channels)),
        }

    def record(self, block: Block, report: CellReport, cell: int) -> GradedRecord:
        """See there."""
        if not isinstance(block, GradedBlock):
            raise CacheStateError(f"A session of GradedCache keeps its own blocks, not {type(block).__name__}.")
        layout = block.layout
        if block.basis is not self.bases[divmod(cell, 2)] or (layout.run, layout.channels) != (self.run, self.channels):
            raise CacheStateError("The cells of this cache are not coded as its settings and statistics say.")
        measured = (report.error, report.energy, report.cost, report.expected)
        if not _measurable(*measured):
            raise CacheStateError(f"The errors of this cache ({measured}) are beyond what a session keeps.")
        return GradedRecord(layout, len(block.outlier_at), block.outliers.dtype == torch.bfloat16, *measured)

    def parts(self, block: Block) -> dict[str, Tensor]:
        """See there."""
        assert isinstance(block, GradedBlock)  # record() has refused the others
        return {name: getattr(block, name) for name in ("codes", "scales", "outlier_at", "outliers")}

    def check(self, plan: PrefixPlan, stretches: Sequence[Stretch]) -> None:
        """Every block is written whole: nothing to check."""

    def block(self, record: Record, mine: Mapping[str, Tensor], basis: Block | None, cell: int, tokens: int) -> Block:
        """See there."""
        assert isinstance(record, GradedRecord)  # the plan was read as this kind
        at = mine["outlier_at"].tolist()
        rising = all(one < two for one, two in zip([-1, *at], [*at, tokens], strict=True))
        if not rising:
            raise CheckpointError("The session is damaged: its outliers are not at rising places within their tokens.")
        return GradedBlock(**mine, layout=record.layout, basis=self.bases[divmod(cell, 2)])
