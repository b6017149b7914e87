"""Take the rotary embedding off keys at consecutive positions, or put it back, in one pass over the data."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.errors import ConfigError
from kvslim.kernels.checks import FLOATS, check_slabs
from kvslim.kernels.dispatch import runs_triton
from kvslim.kernels.unrotate import reference


def unrotate(
    keys: Tensor,
    inv_freq: Tensor,
    rotary_dim: int,
    start: int,
    inverse: bool = True,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Turn keys at positions ``start … start + T - 1``, as :meth:`kvslim.types.Rope.rotate` does.

    Args:
        keys: ``(slabs, T, d)`` float32, bfloat16 or float16.
        inv_freq: ``(rotary_dim / 2,)``, radians per position; used in float32.
        rotary_dim: how many leading features are turned, even, at most ``d``; the rest pass through.
        start: position of the first token.
        inverse: True takes the rotation off, False puts it on.
        out_dtype: float32, bfloat16 or float16; the arithmetic is float32.

    Returns:
        ``(slabs, T, d)`` of ``out_dtype``, contiguous.

    Raises:
        ConfigError: a shape or dtype that is not as described.
    """
    check_slabs(keys, "keys")
    if rotary_dim % 2 or not 0 <= rotary_dim <= keys.shape[2] or inv_freq.shape != (rotary_dim // 2,):
        raise ConfigError(
            f"rotary_dim must be even and at most {keys.shape[2]}, with rotary_dim / 2 frequencies, "
            f"not {rotary_dim} with {tuple(inv_freq.shape)}."
        )
    if out_dtype not in FLOATS:
        raise ConfigError(f"out_dtype must be float32, bfloat16 or float16, not {out_dtype}.")
    if runs_triton(keys):
        from kvslim.kernels.unrotate import triton

        return triton.unrotate(keys, inv_freq, rotary_dim, start, inverse, out_dtype)
    return reference.unrotate(keys, inv_freq, rotary_dim, start, inverse, out_dtype)
