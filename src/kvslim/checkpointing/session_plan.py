"""The plan of a compressed prefix in bytes: rows, stretches and one record per cell.

All that is needed to cut the arena, in which tensors lie end to end, into blocks: nothing is said twice, and offsets
follow from the plan. Little-endian throughout::

    columns, batch, distinct rows, distinct stretches          4 × uint32
    which distinct row each batch row is                       batch × uint8 (uint32 above 256), none if there is one
    per distinct row: first column, stretches, their numbers   uint32 each
    per distinct stretch: coded, column, place, tokens         4 × uint32
    per cell of a coded stretch: its record                    layer group by layer group, keys then values

A record is of one kind and size throughout a file: 38 bytes of a CellRecord here, and what
:mod:`kvslim.checkpointing.session_graded` has.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from kvslim.caching.tucker_residual import COPY_BITS, CellPlan
from kvslim.errors import CheckpointError

_CELL = struct.Struct("<BBIHHhhddd")
_EXACT, _FEATURE, _INHERITED, _NEVER = 1, 2, 4, 0xF8  # flags; no writer sets the others
MOST_POSITIONS = 1 << 30
"""Rows × columns beyond which a plan is refused: neither is backed by bytes of the file."""
_LARGEST_ERROR = 1e100  # relative errors are about 1 at most; beyond this their squares leave float64
_WIDEST_GAIN = 120  # powers of two: beyond what a float64 energy can give


class Record(Protocol):
    """What a plan keeps of one cell."""

    @property
    def error(self) -> float:
        """Relative error, measured when the cell was coded."""
        ...

    @property
    def energy(self) -> float:
        """Squared norm of the cell."""
        ...

    @property
    def cost(self) -> float:
        """What its errors cost by a calibration; 0 for methods that have none."""
        ...

    @property
    def expected(self) -> float:
        """What the calibration predicts for these errors, likewise."""
        ...

    def words(self, head_dim: int) -> str:
        """What was chosen for the cell, as its report has it."""
        ...

    def to_bytes(self) -> bytes: ...


class RecordKind(Protocol):
    """How one method's records are read."""

    @property
    def size(self) -> int:
        """Bytes of a record."""
        ...

    def read(self, data: bytes) -> Record:
        """Undo :meth:`Record.to_bytes`.

        Raises:
            CheckpointError: these are no such bytes.
        """
        ...


@dataclass(frozen=True)
class CellRecord:
    """One block of JoltCache: its form, and what the cell's report says beside it.

    Attributes:
        exact: a plain copy; the numbers up to ``missed`` are then 0.
        token_rank: columns of the token factor, 0 without factors.
        feature_rank: features of the core, 0 without factors.
        feature: the feature mode is truncated, so that there is a feature factor.
        slab_rank: slabs of the core if that mode is truncated too, else 0.
        inherited: core, feature and slab factors are those of an earlier block of the row.
        bits: width of the residual's codes, 0 without a residual.
        gain, code_gain: powers of two of the block and of its codes, as exponents.
        missed: share of the energy outside the basis.
        error: relative error, measured when the cell was coded.
        energy: squared norm of the cell.
    """

    exact: bool = False
    token_rank: int = 0
    feature_rank: int = 0
    feature: bool = False
    slab_rank: int = 0
    inherited: bool = False
    bits: int = 0
    gain: int = 0
    code_gain: int = 0
    missed: float = 0.0
    error: float = 0.0
    energy: float = 0.0

    cost = expected = 0.0  # no fields: JoltCache has no calibration

    def words(self, head_dim: int) -> str:
        """See :meth:`Record.words`."""
        bits = COPY_BITS if self.exact else self.bits
        return str(CellPlan(self.token_rank, self.feature_rank or head_dim, bits, self.inherited))

    def to_bytes(self) -> bytes:
        flags = _EXACT * self.exact | _FEATURE * self.feature | _INHERITED * self.inherited
        ranks = (self.token_rank, self.feature_rank, self.slab_rank)
        return _CELL.pack(flags, self.bits, *ranks, self.gain, self.code_gain, self.missed, self.error, self.energy)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        flags, bits, token_rank, feature_rank, slab_rank, gain, code_gain, *measured = _CELL.unpack(data)
        require(not flags & _NEVER and bits <= 8, "a cell of an unknown form")
        require(abs(gain) <= _WIDEST_GAIN and abs(code_gain) <= _WIDEST_GAIN, "a gain out of range")
        require(all(math.isfinite(x) and x >= 0 for x in measured), "an error or energy that is no number ≥ 0")
        require(max(measured[:2]) <= _LARGEST_ERROR, "an error out of range")
        exact, feature, inherited = (bool(flags & flag) for flag in (_EXACT, _FEATURE, _INHERITED))
        form = (token_rank, feature_rank, slab_rank, bits, feature, inherited)
        require(not any(form) if exact else bool(token_rank or bits), "a cell that stores nothing, or two things")
        require(token_rank > 0 or not any((feature_rank, slab_rank, feature, inherited)), "a basis of rank 0")
        require(not token_rank or feature_rank > 0, "a core without features")
        return cls(exact, token_rank, feature_rank, feature, slab_rank, inherited, bits, gain, code_gain, *measured)


class CellRecords:
    """The kind of :class:`CellRecord`."""

    size = _CELL.size

    def read(self, data: bytes) -> CellRecord:
        """See :meth:`RecordKind.read`."""
        return CellRecord.from_bytes(data)


CELL_RECORDS = CellRecords()


@dataclass(frozen=True)
class StretchRecord:
    """Consecutive tokens of a row; ``cells`` is empty if they are exact."""

    column: int
    place: int
    tokens: int
    cells: tuple[Record, ...]


@dataclass(frozen=True)
class RowRecord:
    """A distinct row: its first real column, and the numbers of its stretches."""

    start: int
    stretches: tuple[int, ...]


@dataclass(frozen=True)
class PrefixPlan:
    """A compressed prefix without its tensors.

    Attributes:
        columns: positions of the batch.
        batch: per batch row the number of its distinct row.
        rows, stretches: the distinct ones, in order of first use.
    """

    columns: int
    batch: tuple[int, ...]
    rows: tuple[RowRecord, ...]
    stretches: tuple[StretchRecord, ...]

    @property
    def tokens(self) -> int:
        """Real tokens, rows that share storage once."""
        return sum(self.stretches[number].tokens for row in self.rows for number in row.stretches)

    def to_bytes(self) -> bytes:
        data = struct.pack("<4I", self.columns, len(self.batch), len(self.rows), len(self.stretches))
        if len(self.rows) > 1:
            data += struct.pack(_batch_format(len(self.batch), len(self.rows)), *self.batch)
        for row in self.rows:
            data += struct.pack(f"<{2 + len(row.stretches)}I", row.start, len(row.stretches), *row.stretches)
        for part in self.stretches:
            data += struct.pack("<4I", bool(part.cells), part.column, part.place, part.tokens)
            data += b"".join(cell.to_bytes() for cell in part.cells)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, cells: int, kind: RecordKind = CELL_RECORDS) -> tuple[Self, bytes]:
        """Undo :meth:`to_bytes`; ``cells`` is the number per coded stretch. Also what follows in ``data``.

        Raises:
            CheckpointError: this is no plan that :meth:`to_bytes` makes.
        """
        cursor = _Cursor(data)
        columns, batch_rows, row_count, stretch_count = cursor.take("<4I")
        require(0 < row_count <= batch_rows and columns > 0, "a prefix without rows or tokens")
        require(batch_rows * columns <= MOST_POSITIONS, "more rows and columns than anyone has memory for")
        require(max(row_count, stretch_count) <= len(data), "more parts than the plan has bytes")
        batch: tuple[int, ...] = (0,) * batch_rows
        if row_count > 1:
            batch = cursor.take(_batch_format(batch_rows, row_count))
        rows = []
        for _ in range(row_count):
            start, count = cursor.take("<2I")
            rows.append(RowRecord(start, cursor.take(f"<{count}I")))
        stretches = []
        for _ in range(stretch_count):
            coded, column, place, tokens = cursor.take("<4I")
            require(coded <= 1 and tokens > 0, "a stretch of an unknown form")
            records = tuple(kind.read(cursor.piece(kind.size)) for _ in range(coded * cells))
            stretches.append(StretchRecord(column, place, tokens, records))
        plan = cls(columns, batch, tuple(rows), tuple(stretches))
        _check_order(plan)
        return plan, cursor.rest()

    def owners(self) -> Iterator[tuple[int, int, int]]:
        """For every inherited cell ``(stretch, cell, stretch that owns its basis)``: the newest owner before it.

        Raises:
            CheckpointError: there is none, or it depends on the row.
        """
        found: dict[tuple[int, int], int] = {}
        for row in self.rows:
            newest: dict[int, int] = {}
            for number in row.stretches:
                for index, cell in enumerate(self.stretches[number].cells):
                    if not isinstance(cell, CellRecord):
                        continue  # of a method whose cells share no basis
                    if cell.inherited:
                        owner = newest.get(index)
                        require(owner is not None, "a cell that inherits a basis from nothing")
                        assert owner is not None
                        require(found.setdefault((number, index), owner) == owner, "a basis that depends on the row")
                    elif cell.token_rank:
                        newest[index] = number
        for (number, index), owner in found.items():
            cell, basis = self.stretches[number].cells[index], self.stretches[owner].cells[index]
            assert isinstance(cell, CellRecord)
            assert isinstance(basis, CellRecord)
            same = (cell.feature_rank, cell.feature, cell.slab_rank)
            require(same == (basis.feature_rank, basis.feature, basis.slab_rank), "a basis of another shape")
            require(cell.token_rank <= basis.token_rank, "more directions than the inherited basis has")
            yield number, index, owner


def _check_order(plan: PrefixPlan) -> None:
    """Rows, stretches, places and columns fit together, and everything is used."""
    require(set(plan.batch) == set(range(len(plan.rows))), "a batch row that is not there")
    used: set[int] = set()
    for row in plan.rows:
        place, column = 0, row.start
        for number in row.stretches:
            require(number < len(plan.stretches), "a stretch that is not there")
            part = plan.stretches[number]
            require(part.place == place and part.column >= column, "stretches that do not follow each other")
            place, column = place + part.tokens, part.column + part.tokens
        require(column <= plan.columns or not row.stretches, "more tokens than columns")
        used |= set(row.stretches)
    require(len(used) == len(plan.stretches), "a stretch that no row uses")


def _batch_format(batch: int, rows: int) -> str:
    return f"<{batch}{'B' if rows <= 256 else 'I'}"


class _Cursor:
    """Reads one field after the other, never past the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def piece(self, count: int) -> bytes:
        piece = self._data[self._at : self._at + count]
        require(len(piece) == count, "a plan that ends too early")
        self._at += count
        return piece

    def take(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.piece(struct.calcsize(layout)))

    def rest(self) -> bytes:
        return self._data[self._at :]


def require(holds: bool, what: str) -> None:
    """Refuse a plan that ``what`` says is wrong.

    Raises:
        CheckpointError: it does not hold.
    """
    if not holds:
        raise CheckpointError(f"The plan of the session is damaged: it has {what}.")
