"""Entropy coding of packed codes, without loss: for files and transfers, never for what attention reads.

Lloyd-Max levels are not used equally often: 4-bit codes of a Gaussian have 3.77 bits of entropy, 3-bit codes 2.83,
2-bit codes 1.91. An interleaved rANS coder (Duda, arXiv:1311.2540) takes the rest off. The symbols of a block, token by
token, go to as many states in turn as give each about two thousand symbols; all states take a step at once in numpy and
share one stream of 16-bit words. The frequencies are static: one table per run of channels, or one for all runs of a
width where the tables would cost more than they gain.

Little-endian layout of what :func:`encode_codes` gives::

    1 or 0                                                     uint8; 0: the packed codes follow as they are
    per width, widest first: 1 if each run has a table         uint8
    frequencies of 2^width symbols, out of 4096                uint16 each, table by table
    states                                                     uint32 each, at least 2^16
    words                                                      uint16 each, to the end
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvslim.errors import CheckpointError, ConfigError
from kvslim.quantizing.channels import ChannelLayout
from kvslim.quantizing.packing import pack, unpack

Array = np.ndarray[Any, np.dtype[Any]]

_PRECISION = 12  # bits of a frequency
_TOTAL = 1 << _PRECISION
_LEAST = 1 << 16  # a state stays in [2^16, 2^32), so that one 16-bit word per step is enough
_SYMBOLS_PER_STATE = 2048  # a state costs 4 bytes, of which 2 carry symbols
_MOST_STATES = 4096
_PLAIN, _CODED = b"\0", b"\1"


def encode_codes(codes: Tensor, layout: ChannelLayout) -> bytes:
    """Code ``(tokens, row_bytes)`` uint8 of :func:`kvslim.quantizing.channels.encode`, at most a byte more than it has.

    Raises:
        ConfigError: ``codes`` are not rows of ``layout``.
    """
    codes = codes.detach().cpu().contiguous()
    if codes.dtype != torch.uint8 or codes.dim() != 2 or codes.shape[1] != layout.row_bytes:
        raise ConfigError(
            f"codes are uint8 (tokens, {layout.row_bytes}) for this layout, not {tuple(codes.shape)} {codes.dtype}."
        )
    plain = _PLAIN + codes.numpy().tobytes()
    symbols = _unpacked(codes, layout)
    if not symbols.size or not torch.equal(_packed(symbols, layout), codes):  # bits beyond the last code are set
        return plain
    tables, flags = _fitted_tables(symbols, layout)
    table_of = _table_of(layout, flags)
    states, words = _encode(symbols, tables, table_of)
    used = zip(tables, _widths(layout, flags), strict=True)
    stored = b"".join(table[: 1 << width].astype("<u2").tobytes() for table, width in used)
    coded = _CODED + bytes(flags) + stored + states.astype("<u4").tobytes() + words.astype("<u2").tobytes()
    return coded if len(coded) < len(plain) else plain


def decode_codes(data: bytes, layout: ChannelLayout, tokens: int) -> Tensor:
    """Undo :func:`encode_codes`: ``(tokens, row_bytes)`` uint8 on the CPU.

    ``tokens`` says how much memory is taken, so it comes from where it has been checked; ``data`` has no say in it.

    Raises:
        CheckpointError: these are no bytes that :func:`encode_codes` gives for so many tokens of this layout.
    """
    if tokens < 0:
        raise ConfigError(f"tokens is a count ≥ 0, not {tokens}.")
    if data[:1] == _PLAIN:
        _require(len(data) == 1 + tokens * layout.row_bytes, "another length than its tokens")
        flat = torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8) if len(data) > 1 else torch.empty(0)
        return flat.to(torch.uint8).reshape(tokens, layout.row_bytes)
    _require(data[:1] == _CODED and tokens > 0 and bool(layout.kept), "no known form")
    flags, at = list(data[1 : 1 + len(layout.parts)]), 1 + len(layout.parts)
    _require(len(flags) == len(layout.parts) and max(flags) <= 1, "no tables of frequencies")
    tables, at = _read_tables(data, at, layout, flags)
    symbols = tokens * len(layout.kept)
    end = at + 4 * _states_for(symbols)
    _require(end <= len(data) and (len(data) - end) % 2 == 0, "fewer states than its tokens need")
    states = np.frombuffer(data[at:end], dtype="<u4").astype(np.uint64)
    words = np.frombuffer(data[end:], dtype="<u2").astype(np.uint64)
    _require(bool((states >= _LEAST).all()), "a state out of range")
    found = _decode(states, words, tables, _table_of(layout, flags), symbols)
    return _packed(found.reshape(tokens, -1), layout)


# ---- symbols and tables ----------------------------------------------------------------------------------------------


def _unpacked(codes: Tensor, layout: ChannelLayout) -> Array:
    """``(tokens, kept)`` uint8: one symbol per channel, in the order of the codes."""
    parts = [unpack(codes[:, place], width, columns.stop - columns.start) for width, columns, place in layout.parts]
    return torch.cat(parts, dim=1).numpy() if parts else np.zeros((codes.shape[0], 0), dtype=np.uint8)


def _packed(symbols: Array, layout: ChannelLayout) -> Tensor:
    whole = torch.from_numpy(np.ascontiguousarray(symbols))
    return torch.cat([pack(whole[:, columns], width) for width, columns, _ in layout.parts], dim=1)


def _runs(layout: ChannelLayout) -> list[list[int]]:
    """Per width the sizes of its runs, in the order of the codes."""
    return [[len(layout.members(at)) for at in runs] for _, runs in layout.groups]


def _table_of(layout: ChannelLayout, flags: list[int]) -> Array:
    """``(kept,)``: the table of each column."""
    numbers: list[int] = []
    first = 0
    for sizes, flag in zip(_runs(layout), flags, strict=True):
        for index, size in enumerate(sizes):
            numbers += [first + index * flag] * size
        first += len(sizes) if flag else 1
    return np.array(numbers, dtype=np.int64)


def _widths(layout: ChannelLayout, flags: list[int]) -> list[int]:
    """The width of each table."""
    return [width for (width, runs), flag in zip(layout.groups, flags, strict=True) for _ in (runs if flag else (0,))]


def _fitted_tables(symbols: Array, layout: ChannelLayout) -> tuple[Array, list[int]]:
    """``(tables, 256)`` frequencies, and per width whether each run has its own: what takes fewer bits altogether."""
    tables, flags = [], []
    for (width, columns, _), sizes in zip(layout.parts, _runs(layout), strict=True):
        part, ends = symbols[:, columns], np.cumsum(sizes)
        counts = np.stack([
            np.bincount(part[:, end - size : end].ravel(), minlength=256) for end, size in zip(ends, sizes, strict=True)
        ])  # fmt: skip
        shared, own = _frequencies(counts.sum(0)), np.stack([_frequencies(row) for row in counts])
        saved = _bits(counts.sum(0), shared) - sum(map(_bits, counts, own))
        flags.append(int(saved > 16 * (len(sizes) - 1) << width))
        tables.append(own if flags[-1] else shared[None])
    return np.concatenate(tables), flags


def _frequencies(counts: Array) -> Array:
    """Counts as shares of 4096, none of a symbol that occurs below 1."""
    shares = np.where(counts > 0, np.maximum(1, np.round(counts * (_TOTAL / counts.sum()))), 0).astype(np.int64)
    while surplus := int(shares.sum()) - _TOTAL:
        step = max(1, abs(surplus) // 2) if surplus < 0 else 1
        shares[shares.argmax()] += step if surplus < 0 else -step
    return shares


def _bits(counts: Array, shares: Array) -> float:
    used = counts > 0
    return float((counts[used] * (_PRECISION - np.log2(shares[used]))).sum())


def _read_tables(data: bytes, at: int, layout: ChannelLayout, flags: list[int]) -> tuple[Array, int]:
    widths = _widths(layout, flags)
    end = at + sum(2 << width for width in widths)
    _require(end <= len(data), "fewer frequencies than its channels need")
    tables = np.zeros((len(widths), 256), dtype=np.int64)
    for table, width in zip(tables, widths, strict=True):
        table[: 1 << width] = np.frombuffer(data[at : at + (2 << width)], dtype="<u2")
        at += 2 << width
    _require(bool((tables.sum(1) == _TOTAL).all()), "frequencies that do not add up")
    return tables, at


# ---- the coder -------------------------------------------------------------------------------------------------------


def _states_for(symbols: int) -> int:
    return min(_MOST_STATES, -(-symbols // _SYMBOLS_PER_STATE))


def _encode(symbols: Array, tables: Array, table_of: Array) -> tuple[Array, Array]:
    """States and words; symbols are taken from the last to the first, so that decoding goes forward."""
    at = (table_of * 256)[None] + symbols
    below = np.cumsum(tables, axis=1) - tables
    shares, starts = (each.ravel().astype(np.uint64)[at].ravel() for each in (tables, below))
    count = shares.size
    lanes = _states_for(count)
    states = np.full(lanes, _LEAST, dtype=np.uint64)
    words = []
    limit = np.uint64(32 - _PRECISION)
    for first in range((count - 1) // lanes * lanes, -1, -lanes):
        share, start = shares[first : first + lanes], starts[first : first + lanes]
        state = states[: share.size]  # a view: the last step may be shorter
        full = state >= share << limit
        words.append((state[full] & np.uint64(0xFFFF)).astype(np.uint16))
        state[full] >>= np.uint64(16)
        quotient, rest = np.divmod(state, share)
        state[:] = (quotient << np.uint64(_PRECISION)) + rest + start
    return states, np.concatenate(words[::-1])


def _decode(states: Array, words: Array, tables: Array, table_of: Array, count: int) -> Array:
    lanes, kept = states.size, table_of.size
    symbol_at, share_at, rest_at = _slots(tables)
    offsets = np.tile(table_of * _TOTAL, -(-(kept + lanes) // kept))
    found = np.empty(count, dtype=np.uint8)
    used, mask = 0, np.uint64(_TOTAL - 1)
    for first in range(0, count, lanes):
        state = states[: min(lanes, count - first)]
        column = first % kept
        slot = offsets[column : column + state.size] + (state & mask).astype(np.int64)
        found[first : first + lanes] = symbol_at[slot]
        state[:] = share_at[slot] * (state >> np.uint64(_PRECISION)) + rest_at[slot]
        empty = state < _LEAST
        needed = int(np.count_nonzero(empty))
        _require(used + needed <= words.size, "fewer words than its symbols need")
        state[empty] = state[empty] << np.uint64(16) | words[used : used + needed]
        used += needed
    _require(used == words.size and bool((states == _LEAST).all()), "an end that its symbols do not lead to")
    return found


def _slots(tables: Array) -> tuple[Array, Array, Array]:
    """Per table and slot: the symbol, its share, and the slot less where the symbol begins. Flat."""
    symbols = np.tile(np.arange(256, dtype=np.uint8), len(tables))
    symbol_at = np.repeat(symbols, tables.ravel())
    share_at = np.repeat(tables.ravel(), tables.ravel())
    starts = np.repeat((np.cumsum(tables, axis=1) - tables).ravel(), tables.ravel())
    rest_at = np.tile(np.arange(_TOTAL), len(tables)) - starts
    return symbol_at, share_at.astype(np.uint64), rest_at.astype(np.uint64)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckpointError(f"Entropy-coded data is damaged: it has {what}. Take another copy of it.")


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What the coder does to a block.

    Attributes:
        ratio: packed bytes over coded bytes.
        bits: coded bits per code, tables and states included.
        encode_rate, decode_rate: packed megabytes (10^6) per second.
        zlib_ratio: packed bytes over what zlib at level 9 makes of them.
    """

    ratio: float
    bits: float
    encode_rate: float
    decode_rate: float
    zlib_ratio: float


def measure(codes: Tensor, layout: ChannelLayout) -> Measured:
    """Code a block and back, once, on the clock."""
    started = time.perf_counter()
    data = encode_codes(codes, layout)
    encoded = time.perf_counter()
    decode_codes(data, layout, codes.shape[0])
    decoded = time.perf_counter()
    size = codes.numel()
    return Measured(
        ratio=size / len(data),
        bits=8 * len(data) / (codes.shape[0] * len(layout.kept)),
        encode_rate=size / 1e6 / (encoded - started),
        decode_rate=size / 1e6 / (decoded - encoded),
        zlib_ratio=size / len(zlib.compress(codes.cpu().numpy().tobytes(), 9)),
    )
