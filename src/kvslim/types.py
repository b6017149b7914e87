"""Frozen value types that travel between the rooms. No policy lives here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRankFactors:
    """A linear map ``y = x W`` factored as ``h = x A``, ``y ≈ h B`` (Palu, Eq. 4).

    Attributes:
        a: ``(in_features, rank)``, the down projection that makes the latent.
        b: ``(rank, out_features)``, the reconstruction.
    """

    a: Tensor
    b: Tensor

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding as a fixed rotation per position (rotate-half convention).

    Attributes:
        inv_freq: ``(rotary_dim / 2,)`` float32, radians per position.
        rotary_dim: how many leading features of a head are rotated; the rest pass through.
    """

    inv_freq: Tensor
    rotary_dim: int

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of integer ``positions``: each ``(*positions.shape, rotary_dim / 2)`` float32."""
        freq = self.inv_freq.to(device=positions.device, dtype=torch.float32)
        phase = positions.to(torch.float32)[..., None] * freq
        return phase.cos(), phase.sin()

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate ``x`` of shape ``(..., T, head_dim)`` by ``positions`` broadcastable to ``x.shape[:-1]``.

        The arithmetic is float32 and the result has the dtype of ``x``. ``inverse=True`` undoes the rotation;
        both use the same cosines, so a round trip in float32 is exact within rounding.
        """
        cos, sin = self.angles(positions)
        if inverse:
            sin = -sin
        half = self.rotary_dim // 2
        x1 = x[..., :half].to(torch.float32)
        x2 = x[..., half : self.rotary_dim].to(torch.float32)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)
        return turned if self.rotary_dim == x.shape[-1] else torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)


@dataclass(frozen=True)
class KVShape:
    """What a model caches: one number per axis.

    Attributes:
        layers: number of decoder layers that keep a KV cache.
        kv_heads: KV heads per layer.
        head_dim: features per head.
    """

    layers: int
    kv_heads: int
    head_dim: int

    def dense_bytes(self, tokens: int) -> int:
        """Bytes of ``tokens`` tokens in an uncompressed bf16 cache, K and V together."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim * tokens
