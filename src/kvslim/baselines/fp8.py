"""Eight-bit floats (e4m3): what serving engines offer as ``kv_cache_dtype="fp8"``.

Each number is a ``torch.float8_e4m3fn``: four exponent and three mantissa bits, magnitudes up to 448. Each layer and KV
head has one float32 scale, its largest magnitude in the sequence over 448, for keys (rotated) and values alike. Engines
have a scale per layer, from calibration or 1; one per head and sequence is never coarser.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kvslim.baselines.base import BaselineCache
from kvslim.caching.block import Block, CodedBlock
from kvslim.caching.cells import Cell

LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)


@dataclass(frozen=True)
class Float8Block(CodedBlock):
    """Keys or values of one layer.

    Attributes:
        codes: ``(kv_heads, tokens, head_dim)`` float8_e4m3fn.
        scales: ``(kv_heads,)`` float32.
    """

    codes: Tensor
    scales: Tensor

    @property
    def tokens(self) -> int:
        return int(self.codes.shape[1])

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        return self.codes[:, start:stop].to(torch.float32) * self.scales[:, None, None]

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, codes=self.codes[:, :tokens].clone(), scales=self.scales.clone())


def encode(x: Tensor) -> Float8Block:
    """Code ``x`` ``(kv_heads, tokens, head_dim)``, float32 and finite."""
    # A scale in float32's normal range, also for zeros.
    scales = (x.abs().amax((1, 2)) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (x / scales[:, None, None]).clamp_(-LARGEST, LARGEST)
    return Float8Block(scaled.to(torch.float8_e4m3fn), scales)


class Float8Cache(BaselineCache):
    """Keys and values as e4m3 floats; arguments and errors as for :class:`~kvslim.baselines.base.BaselineCache`."""

    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        return encode(x), "e4m3"
