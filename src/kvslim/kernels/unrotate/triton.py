"""One pass: each program turns the same tokens of several slabs, so that sines are computed once for all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvslim.kernels.launching import launch_on

ROWS = 32
SLABS = 4
"""Slabs that share the sines of one program."""


def unrotate(
    keys: Tensor, inv_freq: Tensor, rotary_dim: int, start: int, inverse: bool, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`kvslim.kernels.unrotate.unrotate`."""
    slabs, tokens, size = keys.shape
    out = torch.empty(keys.shape, dtype=out_dtype, device=keys.device)
    if out.numel() == 0:
        return out
    keys = keys if keys.stride(2) == 1 else keys.contiguous()
    freq = inv_freq.to(device=keys.device, dtype=torch.float32).contiguous()
    passed = size - rotary_dim
    with launch_on(keys.device):
        _turn[(triton.cdiv(tokens, ROWS), triton.cdiv(slabs, SLABS))](
            keys, freq, out, start, slabs, tokens, keys.stride(0), keys.stride(1), out.stride(0), out.stride(1),
            INVERSE=inverse,
            HALF=rotary_dim // 2,
            PADDED_HALF=triton.next_power_of_2(max(1, rotary_dim // 2)),
            PASSED=passed,
            PADDED_PASSED=triton.next_power_of_2(max(1, passed)),
            ROWS=ROWS,
            SLABS=SLABS,
            num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["start", "slabs", "tokens"])
def _turn(
    keys, freq, out, start, slabs, tokens, keys_slab, keys_token, out_slab, out_token,
    INVERSE: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, PASSED: tl.constexpr,
    PADDED_PASSED: tl.constexpr, ROWS: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < tokens
    pair = tl.arange(0, PADDED_HALF)
    angle = (start + row).to(tl.float32)[:, None] * tl.load(freq + pair, mask=pair < HALF, other=0.0)[None, :]
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    if INVERSE:
        sin = -sin
    row = row.to(tl.int64)
    mask = exists[:, None] & (pair < HALF)[None, :]
    for k in tl.static_range(SLABS):
        slab = tl.program_id(1).to(tl.int64) * SLABS + k
        here = mask & (slab < slabs)
        source = keys + slab * keys_slab + row[:, None] * keys_token + pair[None, :]
        target = out + slab * out_slab + row[:, None] * out_token + pair[None, :]
        first = tl.load(source, mask=here, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=here, other=0.0).to(tl.float32)
        tl.store(target, (first * cos - second * sin).to(out.dtype.element_ty), mask=here)
        tl.store(target + HALF, (second * cos + first * sin).to(out.dtype.element_ty), mask=here)
        if PASSED:
            rest = tl.arange(0, PADDED_PASSED)
            here = exists[:, None] & (rest < PASSED)[None, :] & (slab < slabs)
            source = keys + slab * keys_slab + row[:, None] * keys_token + 2 * HALF + rest[None, :]
            target = out + slab * out_slab + row[:, None] * out_token + 2 * HALF + rest[None, :]
            tl.store(target, tl.load(source, mask=here, other=0.0).to(out.dtype.element_ty), mask=here)
