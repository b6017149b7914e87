"""One pass over the codes: unpack, look up, rotate back, scale, add the backbone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvslim.kernels.launching import LaunchShape, launch_on
from kvslim.kernels.tables import ROWS, levels_on, plane_layout, sign_matrix
from kvslim.quantizing.codebook import LevelKind


def residual_decode(
    codes: Tensor,
    scales: Tensor,
    bits: int,
    size: int,
    kind: LevelKind,
    seed: int,
    gain: float,
    out_dtype: torch.dtype,
    backbone: Tensor | None = None,
) -> Tensor:
    """See :func:`kvslim.kernels.residual_decode.residual_decode`."""
    slabs, tokens = scales.shape
    signs = sign_matrix(size, seed, codes.device, transposed=True)
    shape = launch_shape(signs.padded, backbone is not None)
    codes = codes if codes.stride(2) == 1 else codes.contiguous()
    if backbone is not None and out_dtype == torch.float32:
        out = backbone
    else:
        out = torch.empty(slabs, tokens, size, dtype=out_dtype, device=codes.device)
    added = out if backbone is None else backbone
    tiles_per_slab = triton.cdiv(tokens, shape.rows)
    tiles = slabs * tiles_per_slab
    if tiles == 0:
        return out
    with launch_on(codes.device):
        _decode[(shape.programs(codes.device, tiles),)](
            codes, scales, levels_on(bits, kind, codes.device), signs.signs, signs.norms, added, out,
            gain, signs.norm, tokens, tiles_per_slab, tiles,
            codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1),
            added.stride(0), added.stride(1), added.stride(2), out.stride(0), out.stride(1), out.stride(2),
            HAS_BACKBONE=backbone is not None,
            SIZE=size,
            PADDED=signs.padded,
            ROWS=shape.rows,
            LEVELS=1 << bits,
            PLANES=plane_layout(size, bits),
            STAGES=shape.stages,
            num_warps=shape.warps,
            maxnreg=shape.registers,
        )  # fmt: skip
    return out


def launch_shape(padded: int, with_backbone: bool) -> LaunchShape:
    """The launch for rows of ``padded`` features."""
    if padded == 256:
        return LaunchShape(rows=ROWS, warps=8, stages=1, per_multiprocessor=1)
    if padded == 128:
        return LaunchShape(rows=ROWS, warps=4, stages=1, per_multiprocessor=2 if with_backbone else 3)
    return LaunchShape(rows=ROWS, warps=4, stages=1, per_multiprocessor=4)


@triton.jit(do_not_specialize=["tokens", "tiles_per_slab", "tiles"])
def _decode(
    codes, scales, levels, signs, norms, backbone, out,
    gain, norm, tokens, tiles_per_slab, tiles, codes_slab, codes_token, scales_slab, scales_token,
    backbone_slab, backbone_token, backbone_column, out_slab, out_token, out_column,
    HAS_BACKBONE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    PLANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    matrix = tl.load(signs + column[:, None] * PADDED + column[None, :])
    table = tl.load(levels + tl.arange(0, LEVELS))
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        slab = (tile // tiles_per_slab).to(tl.int64)
        row = (tile % tiles_per_slab) * ROWS + tl.arange(0, ROWS)
        exists = row < tokens
        row = row.to(tl.int64)
        scale = tl.load(scales + slab * scales_slab + row * scales_token, mask=exists, other=0.0).to(tl.float32)
        code = _load_codes(codes + slab * codes_slab + row[:, None] * codes_token, exists, ROWS, PADDED, PLANES)
        level = tl.reshape(tl.gather(table, tl.reshape(code, (ROWS * PADDED,)), 0), (ROWS, PADDED))
        if SIZE < PADDED:
            level *= tl.load(norms + column)[None, :]  # zero in the padding
        high = level.to(tl.float16)
        low = (level - high.to(tl.float32)).to(tl.float16)
        rows = tl.dot(low, matrix, tl.dot(high, matrix)) * (scale * (norm * gain))[:, None]
        mask = exists[:, None] & inside[None, :]
        if HAS_BACKBONE:
            offsets = row[:, None] * backbone_token + column[None, :] * backbone_column
            rows += tl.load(backbone + slab * backbone_slab + offsets, mask=mask, other=0.0) * gain
        offsets = row[:, None] * out_token + column[None, :] * out_column
        tl.store(out + slab * out_slab + offsets, rows.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_codes(first, exists, ROWS: tl.constexpr, PADDED: tl.constexpr, PLANES: tl.constexpr):
    """Codes of a tile, int32 ``(ROWS, PADDED)``; ``first`` points at the rows' first bytes."""
    code = tl.zeros((ROWS, PADDED), tl.int32)
    for p in tl.static_range(len(PLANES)):
        code |= _load_plane(first + PLANES[p][2], exists, PADDED, PLANES[p][0], PLANES[p][3]) << PLANES[p][1]
    return code


@triton.jit
def _load_plane(first, exists, PADDED: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    per_byte: tl.constexpr = 8 // WIDTH
    byte = tl.arange(0, PADDED // per_byte)
    mask = exists[:, None] & (byte < BYTES)[None, :]
    packed = tl.load(first + byte[None, :], mask=mask, other=0).to(tl.int32)
    # Halving keeps a thread's codes beside each other, so that nothing moves between threads.
    if WIDTH <= 4:
        packed = tl.interleave(packed & 15, packed >> 4)
    if WIDTH <= 2:
        packed = tl.interleave(packed & 3, packed >> 2)
    if WIDTH == 1:
        packed = tl.interleave(packed & 1, packed >> 1)
    return packed
