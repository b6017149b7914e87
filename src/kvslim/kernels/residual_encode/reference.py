"""The reference: what :func:`kvslim.quantizing.rotated.encode` does, with the gain given instead of searched for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.quantizing.codebook import LevelKind, gaussian_levels, midpoints
from kvslim.quantizing.packing import pack
from kvslim.quantizing.rotation import rotation

_TINY = torch.finfo(torch.float32).tiny


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
    rest = x.to(torch.float32) / gain
    if backbone is not None:
        rest = rest.sub_(backbone)
    rows = rest @ rotation(x.shape[-1], seed, x.device)
    levels = gaussian_levels(bits, kind).to(device=x.device, dtype=torch.float32)
    thresholds = midpoints(levels)
    scale = rows.square().mean(-1, keepdim=True).sqrt()
    for _ in range(2):
        chosen = levels[_nearest(rows, scale, thresholds)]
        fitted = (rows * chosen).sum(-1, keepdim=True) / chosen.square().sum(-1, keepdim=True).clamp_min(_TINY)
        scale = torch.where(fitted > 0, fitted, scale)
    stored = scale.squeeze(-1).to(torch.float16)
    codes = _nearest(rows, stored[..., None].to(torch.float32), thresholds)
    if lost is not None:
        lost.copy_((rows - levels[codes] * stored[..., None].to(torch.float32)).square_().sum(-1))
    return pack(codes, bits), stored


def _nearest(rows: Tensor, scale: Tensor, thresholds: Tensor) -> Tensor:
    return torch.bucketize(rows / scale.clamp_min(_TINY), thresholds)
