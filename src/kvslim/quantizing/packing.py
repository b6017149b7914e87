"""Pack integer codes of 1 to 8 bits into bytes, and back.

A width that is not a power of two is split into power-of-two planes, high bits first (3 = 2 + 1, 5 = 4 + 1,
6 = 4 + 2, 7 = 4 + 2 + 1), and each plane is packed tightly on its own. So every byte holds codes of one plane, and
unpacking is shifts and masks. Codes are packed along the last axis: each row (a token) stays a whole number of bytes,
and cropping tokens is slicing rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.errors import ConfigError


def planes(bits: int) -> tuple[int, ...]:
    """The power-of-two planes of a code width, widest first. ``planes(6) == (4, 2)``.

    Raises:
        ConfigError: ``bits`` is outside 1…8.
    """
    if not 1 <= bits <= 8:
        raise ConfigError(f"Codes have 1 to 8 bits, not {bits}.")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that one packed row of ``count`` codes occupies. Zero bits occupy nothing."""
    return sum(-(-count * width // 8) for width in planes(bits)) if bits else 0


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` ``(..., n)`` with values in ``[0, 2**bits)`` into uint8 ``(..., packed_bytes(n, bits))``."""
    codes = codes.to(torch.uint8)
    packed, shift = [], bits
    for width in planes(bits):
        shift -= width
        packed.append(_pack_plane((codes >> shift) & ((1 << width) - 1), width))
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo :func:`pack`: uint8 codes of shape ``(..., count)``."""
    codes: Tensor | None = None
    start = 0
    for width in planes(bits):
        size = -(-count * width // 8)
        plane = _unpack_plane(packed[..., start : start + size], width, count)
        codes = plane if codes is None else (codes << width) | plane
        start += size
    assert codes is not None  # planes() is never empty
    return codes


def _pack_plane(codes: Tensor, width: int) -> Tensor:
    if width == 8:
        return codes.contiguous()
    per_byte = 8 // width
    missing = -codes.shape[-1] % per_byte
    if missing:
        codes = torch.nn.functional.pad(codes, (0, missing))
    groups = codes.unflatten(-1, (-1, per_byte))
    packed: Tensor = groups[..., 0].clone()
    for slot in range(1, per_byte):
        packed |= groups[..., slot] << (slot * width)
    return packed


def _unpack_plane(packed: Tensor, width: int, count: int) -> Tensor:
    if width == 8:
        return packed
    shifts = torch.arange(0, 8, width, device=packed.device, dtype=torch.uint8)
    codes = (packed[..., None] >> shifts) & ((1 << width) - 1)
    return codes.flatten(-2)[..., :count]
