"""The reference: :func:`kvslim.quantizing.rotated.decode`, then the backbone, the gain and the dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.quantizing import rotated
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
    decoded = rotated.decode(rotated.RotatedCodes(codes, scales, bits, size, kind, seed))
    if backbone is not None:
        decoded = backbone.add_(decoded) if out_dtype == torch.float32 else decoded.add_(backbone)
    return decoded.mul_(gain).to(out_dtype)
