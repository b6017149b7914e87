"""One pass over the rows: subtract, rotate, fit the scale, quantize, pack."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvslim.kernels.launching import LaunchShape, launch_on
from kvslim.kernels.tables import ROWS, cells, half_codebook, plane_layout, sign_matrix
from kvslim.quantizing.codebook import LevelKind
from kvslim.quantizing.packing import packed_bytes

COMPARED_BITS = 3
"""Up to this width the nearest level is found by comparing with every threshold, above it by a lookup cell."""

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def residual_encode(
    x: Tensor,
    backbone: Tensor | None,
    gain: float,
    bits: int,
    kind: LevelKind,
    seed: int,
    lost: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`kvslim.kernels.residual_encode.residual_encode`."""
    slabs, tokens, size = x.shape
    signs = sign_matrix(size, seed, x.device)
    shape = launch_shape(signs.padded)
    codes = torch.empty(slabs, tokens, packed_bytes(size, bits), dtype=torch.uint8, device=x.device)
    scales = torch.empty(slabs, tokens, dtype=torch.float16, device=x.device)
    x = x if x.stride(2) == 1 else x.contiguous()
    taken_off = x if backbone is None else backbone if backbone.stride(2) == 1 else backbone.contiguous()
    half = half_codebook(bits, kind)
    lookup = cells(bits, kind, x.device) if bits > COMPARED_BITS else None
    tiles_per_slab = triton.cdiv(tokens, shape.rows)
    tiles = slabs * tiles_per_slab
    if tiles == 0:
        return codes, scales
    with launch_on(x.device):
        _encode[(shape.programs(x.device, tiles),)](
            x, taken_off, signs.signs, signs.norms,
            signs.signs if lookup is None else lookup.levels, signs.signs if lookup is None else lookup.indices,
            codes, scales, scales if lost is None else lost,
            1.0 / gain, signs.norm, tokens, tiles_per_slab, tiles,
            x.stride(0), x.stride(1), taken_off.stride(0), taken_off.stride(1),
            HAS_BACKBONE=backbone is not None,
            WANT_LOST=lost is not None,
            SIZE=size,
            PADDED=signs.padded,
            ROWS=shape.rows,
            BITS=bits,
            ROW_BYTES=codes.shape[2],
            PLANES=plane_layout(size, bits),
            LEVELS=half.levels if lookup is None else (),
            THRESHOLDS=half.thresholds if lookup is None else (),
            CELLS=0 if lookup is None else lookup.count,
            CELLS_PER_UNIT=0 if lookup is None else lookup.per_unit,
            STAGES=shape.stages,
            num_warps=shape.warps,
            maxnreg=shape.registers,
        )  # fmt: skip
    return codes, scales


def launch_shape(padded: int) -> LaunchShape:
    """The launch for rows of ``padded`` features."""
    if padded == 256:
        return LaunchShape(rows=ROWS, warps=8, stages=1, per_multiprocessor=1)
    if padded == 128:
        return LaunchShape(rows=ROWS, warps=4, stages=1, per_multiprocessor=3)
    return LaunchShape(rows=ROWS, warps=4, stages=1, per_multiprocessor=4)


@triton.jit(do_not_specialize=["tokens", "tiles_per_slab", "tiles"])
def _encode(
    x, backbone, signs, norms, cell_levels, cell_indices, codes, scales, lost,
    inverse_gain, norm, tokens, tiles_per_slab, tiles, x_slab, x_token, backbone_slab, backbone_token,
    HAS_BACKBONE: tl.constexpr, WANT_LOST: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr,
    ROW_BYTES: tl.constexpr, PLANES: tl.constexpr, LEVELS: tl.constexpr, THRESHOLDS: tl.constexpr,
    CELLS: tl.constexpr, CELLS_PER_UNIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    matrix = tl.load(signs + column[:, None] * PADDED + column[None, :])
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        slab = (tile // tiles_per_slab).to(tl.int64)
        row = (tile % tiles_per_slab) * ROWS + tl.arange(0, ROWS)
        exists = row < tokens
        mask = exists[:, None] & inside[None, :]
        offsets = row.to(tl.int64)[:, None] * x_token + column[None, :]
        rest = tl.load(x + slab * x_slab + offsets, mask=mask, other=0.0).to(tl.float32) * inverse_gain
        if HAS_BACKBONE:
            offsets = row.to(tl.int64)[:, None] * backbone_token + column[None, :]
            rest -= tl.load(backbone + slab * backbone_slab + offsets, mask=mask, other=0.0)
        rotated, unit = _rotate(rest, matrix)
        unit *= norm  # rows are `unit * rotated`
        if SIZE < PADDED:
            rotated *= tl.load(norms + column)[None, :]
        magnitude = tl.abs(rotated)
        scale = tl.sqrt(tl.sum(rotated * rotated, axis=1) / SIZE)
        for _ in tl.static_range(2):
            ratio = magnitude * (1.0 / tl.maximum(scale, _TINY))[:, None]
            level = _level_of(ratio, cell_levels, LEVELS, THRESHOLDS, CELLS, CELLS_PER_UNIT)
            if SIZE < PADDED:
                level = tl.where(inside[None, :], level, 0.0)
            # The ratio is in units of the old scale, and so is the new scale that this gives.
            scale *= tl.sum(ratio * level, axis=1) / tl.sum(level * level, axis=1)
        stored = (scale * unit).to(tl.float16)
        tl.store(scales + slab * tokens + row, stored, mask=exists)
        ratio = magnitude * (unit / tl.maximum(stored.to(tl.float32), _TINY))[:, None]
        if WANT_LOST:
            level = _level_of(ratio, cell_levels, LEVELS, THRESHOLDS, CELLS, CELLS_PER_UNIT)
            gap = magnitude * unit[:, None] - level * stored.to(tl.float32)[:, None]
            if SIZE < PADDED:
                gap = tl.where(inside[None, :], gap, 0.0)
            tl.store(lost + slab * tokens + row, tl.sum(gap * gap, axis=1), mask=exists)
        index = _index_of(ratio, cell_indices, THRESHOLDS, CELLS, CELLS_PER_UNIT)
        half: tl.constexpr = 1 << (BITS - 1)
        code = tl.where(rotated > 0, half + index, half - 1 - index)
        if SIZE < PADDED:
            code = tl.where(inside[None, :], code, 0)
        _store_planes(codes + slab * tokens * ROW_BYTES, code, row, exists, ROW_BYTES, PLANES)


@triton.jit
def _rotate(rows, matrix):
    """``rows @ matrix`` up to one factor per row, from two float16 products: the matrix is exact, rows keep 22 bits."""
    largest = tl.max(tl.abs(rows), axis=1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 32), 250)
    up = ((262 - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two that brings the row to below 2**9
    down = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    rows *= up[:, None]
    high = rows.to(tl.float16)
    low = (rows - high.to(tl.float32)).to(tl.float16)
    return tl.dot(low, matrix, tl.dot(high, matrix)), down


@triton.jit
def _cell_of(ratio, CELLS: tl.constexpr, CELLS_PER_UNIT: tl.constexpr):
    """Round to the nearest integer by adding 2**23: its low bits are then the integer."""
    shifted = tl.minimum(ratio, (CELLS - 1.0) / CELLS_PER_UNIT) * CELLS_PER_UNIT + 8388608.0
    return shifted.to(tl.int32, bitcast=True) - 0x4B000000


@triton.jit
def _look_up(table, cell, CELLS: tl.constexpr):
    """Both halves of the entries of a small table, through shared memory: float32 and int32."""
    flat = tl.reshape(cell, (cell.shape[0] * cell.shape[1],))
    entry = tl.reshape(tl.gather(tl.load(table + tl.arange(0, CELLS)), flat, 0), cell.shape)
    return entry.to(tl.int32).to(tl.float32, bitcast=True), (entry >> 32).to(tl.int32)


@triton.jit
def _level_of(
    ratio, table, LEVELS: tl.constexpr, THRESHOLDS: tl.constexpr, CELLS: tl.constexpr, CELLS_PER_UNIT: tl.constexpr
):
    """The level nearest to each magnitude."""
    if CELLS:
        threshold, below = _look_up(table, _cell_of(ratio, CELLS, CELLS_PER_UNIT), CELLS)
        below = below.to(tl.float32, bitcast=True)
        level = tl.where(ratio > threshold, 2 * threshold - below, below)
    else:
        level = tl.full(ratio.shape, LEVELS[0], tl.float32)
        for k in tl.static_range(len(THRESHOLDS)):
            level = tl.where(ratio > THRESHOLDS[k], LEVELS[k + 1], level)
    return level


@triton.jit
def _index_of(ratio, table, THRESHOLDS: tl.constexpr, CELLS: tl.constexpr, CELLS_PER_UNIT: tl.constexpr):
    """How many thresholds lie below each magnitude."""
    if CELLS:
        threshold, earlier = _look_up(table, _cell_of(ratio, CELLS, CELLS_PER_UNIT), CELLS)
        index = earlier + (ratio > threshold).to(tl.int32)
    else:
        index = tl.zeros(ratio.shape, tl.int32)
        for k in tl.static_range(len(THRESHOLDS)):
            index = tl.where(ratio > THRESHOLDS[k], k + 1, index)
    return index


@triton.jit
def _store_planes(codes, code, row, exists, ROW_BYTES: tl.constexpr, PLANES: tl.constexpr):
    """Pack and store each power-of-two plane of the codes; a row of all planes is contiguous."""
    for p in tl.static_range(len(PLANES)):
        plane = _pack((code >> PLANES[p][1]) & ((1 << PLANES[p][0]) - 1), PLANES[p][0])
        byte = tl.arange(0, plane.shape[1])
        where = codes + row.to(tl.int64)[:, None] * ROW_BYTES + PLANES[p][2] + byte[None, :]
        tl.store(where, plane.to(tl.uint8), mask=exists[:, None] & (byte < PLANES[p][3])[None, :])


@triton.jit
def _pack(part, WIDTH: tl.constexpr):
    if WIDTH == 8:
        return part
    per_byte: tl.constexpr = 8 // WIDTH
    slots = tl.reshape(part, (part.shape[0], part.shape[1] // per_byte, per_byte))
    return tl.sum(slots << (tl.arange(0, per_byte) * WIDTH)[None, None, :], axis=2)
