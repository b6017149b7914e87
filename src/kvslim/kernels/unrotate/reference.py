"""The reference: :meth:`kvslim.types.Rope.rotate` in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvslim.types import Rope


def unrotate(
    keys: Tensor, inv_freq: Tensor, rotary_dim: int, start: int, inverse: bool, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`kvslim.kernels.unrotate.unrotate`."""
    positions = torch.arange(start, start + keys.shape[1], device=keys.device)
    return Rope(inv_freq, rotary_dim).rotate(keys.to(torch.float32), positions, inverse=inverse).to(out_dtype)
