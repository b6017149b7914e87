"""Subtract a backbone, rotate, scale, quantize and pack: JoLT's residual in one pass over the data."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.kernels.checks import check_gain, check_like, check_slabs
from kvslim.kernels.dispatch import runs_triton
from kvslim.kernels.residual_encode import reference
from kvslim.kernels.tables import rows_fit
from kvslim.quantizing.codebook import LevelKind


def residual_encode(
    x: Tensor,
    backbone: Tensor | None,
    gain: float,
    bits: int,
    kind: LevelKind,
    seed: int,
    lost: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Encode the rows of ``x / gain - backbone`` as packed codes of their rotation, and one scale each.

    The scale is fitted by least squares to the chosen levels, in two rounds, and rounded to float16; the codes are the
    levels nearest under the rounded scale: what :func:`kvslim.quantizing.rotated.encode` stores, in units of
    ``gain``. The Triton kernel rotates to within 1e-6 of a row's norm, so its codes differ from the reference's only
    at ties, and its scales where the rounding to float16 ties. Rows that do not fit a GPU's shared memory
    (more than 256 features, on small GPUs more than 128) are left to the reference.

    Args:
        x: ``(slabs, T, d)`` float32, bfloat16 or float16, finite.
        backbone: ``(slabs, T, d)`` float32 in units of ``gain``, or None for zeros.
        gain: a power of two between 2**-120 and 2**120; it has to bring the root mean squares of the rows into the
            normal range of float16, 2**-14 to 2**16.
        bits: code width, 1 to 8.
        kind: which codebook.
        seed: seed of the rotation.
        lost: float32 ``(slabs, T)``, contiguous; takes each row's squared error in units of ``gain``² if given.

    Returns:
        Codes, uint8 ``(slabs, T, packed_bytes(d, bits))``, and scales, float16 ``(slabs, T)``.

    Raises:
        ConfigError: a shape, dtype, gain, width or kind that is not as described.
    """
    check_slabs(x, "x")
    check_gain(gain)
    if backbone is not None:
        check_like(backbone, torch.float32, tuple(x.shape), x.device, "The backbone")
    if lost is not None:
        check_like(lost, torch.float32, tuple(x.shape[:2]), x.device, "The lost energies")
    if runs_triton(x) and rows_fit(x.shape[2], x.device):
        from kvslim.kernels.residual_encode import triton

        return triton.residual_encode(x, backbone, gain, bits, kind, seed, lost)
    return reference.residual_encode(x, backbone, gain, bits, kind, seed, lost)
