"""Unpack, look up, rotate back, scale and add the backbone: JoLT's residual, undone in one pass over the data."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.errors import ConfigError
from kvslim.kernels.checks import FLOATS, check_gain, check_like
from kvslim.kernels.dispatch import runs_triton
from kvslim.kernels.residual_decode import reference
from kvslim.kernels.tables import rows_fit
from kvslim.quantizing.codebook import LevelKind
from kvslim.quantizing.packing import packed_bytes


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
    """Undo :func:`~kvslim.kernels.residual_encode.residual_encode`: ``gain * (backbone + decoded rows)``.

    The arithmetic is float32; the Triton kernel rotates to within 1e-6 of a row's norm. Rows that do
    not fit a GPU's shared memory (more than 256 features, on small GPUs more than 128) are left to the reference.

    Args:
        codes: uint8 ``(slabs, T, packed_bytes(size, bits))``.
        scales: float16 ``(slabs, T)``.
        bits: code width, 1 to 8.
        size: features per row.
        kind: which codebook.
        seed: seed of the rotation.
        gain: the power of two that the rows were divided by.
        out_dtype: float32, bfloat16 or float16.
        backbone: ``(slabs, T, size)`` float32 in units of ``gain``, or None for zeros. With ``out_dtype`` float32
            the result is written into it.

    Returns:
        ``(slabs, T, size)`` of ``out_dtype``; the backbone itself if there is one and ``out_dtype`` is float32.

    Raises:
        ConfigError: a shape, dtype, gain, width or kind that is not as described.
    """
    check_gain(gain)
    check_like(codes, torch.uint8, (*scales.shape, packed_bytes(size, bits)), codes.device, "The codes")
    check_like(scales, torch.float16, tuple(codes.shape[:2]), codes.device, "The scales")
    if out_dtype not in FLOATS:
        raise ConfigError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}.")
    if backbone is not None:
        check_like(backbone, torch.float32, (*scales.shape, size), codes.device, "The backbone")
    if runs_triton(codes) and rows_fit(size, codes.device):
        from kvslim.kernels.residual_decode import triton

        return triton.residual_decode(codes, scales, bits, size, kind, seed, gain, out_dtype, backbone)
    return reference.residual_decode(codes, scales, bits, size, kind, seed, gain, out_dtype, backbone)
