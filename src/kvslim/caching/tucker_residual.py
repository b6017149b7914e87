"""JoLT's storage form: fp16 Tucker factors and a rotated low-bit residual, for one layer group's keys or values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvslim.decomposing.tucker import Hosvd, TuckerFactors, truncate
from kvslim.quantizing import rotated
from kvslim.quantizing.codebook import LevelKind
from kvslim.quantizing.rotated import RotatedCodes

_FACTOR_BYTES = 2
# The largest token coefficient is at most 2**_HEADROOM after scaling by the gain. That leaves both these and the
# smallest residual scales of a cell with 2**29 entries inside the normal range of float16.
_HEADROOM = 12


@dataclass(frozen=True)
class CellPlan:
    """What one cell gets: ranks of the two modes, bits of the residual. ``feature_rank = d`` means untruncated."""

    token_rank: int
    feature_rank: int
    bits: int


def cell_bytes(plan: CellPlan, slabs: int, tokens: int, features: int) -> int:
    """Bytes that :class:`TuckerResidual` will hold for a cell of shape ``(slabs, tokens, features)``."""
    factors = 0
    if plan.token_rank:
        factors = slabs * plan.token_rank * plan.feature_rank + tokens * plan.token_rank
        if plan.feature_rank < features:
            factors += features * plan.feature_rank
    return _FACTOR_BYTES * factors + slabs * tokens * rotated.row_bytes(features, plan.bits)


@dataclass(frozen=True)
class TuckerResidual:
    """``X ≈ gain · (C ×_T U_T ×_d U_d + decoded residual)`` with ``X`` of shape ``(layers · kv_heads, T, d)``.

    Attributes:
        factors: float16 factors of the Tucker backbone, None at token rank 0.
        residual: codes of ``(layers · kv_heads, T)`` rows, None at 0 bits.
        gain: a power of two that keeps factors and scales inside float16's normal range.
        kv_heads: heads per layer; slabs ``[layer · kv_heads, (layer + 1) · kv_heads)`` belong to one layer.
        shape: ``(layers · kv_heads, T, d)``.
    """

    factors: TuckerFactors | None
    residual: RotatedCodes | None
    gain: float
    kv_heads: int
    shape: tuple[int, int, int]

    @property
    def tokens(self) -> int:
        return self.shape[1]

    def decode(self, layer: int) -> Tensor:
        """Rebuild one layer of the group: ``(kv_heads, T, d)`` float32."""
        slabs = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads)
        backbone = None if self.factors is None else self.factors.reconstruct(slabs)
        if self.residual is not None:
            part = dataclasses.replace(
                self.residual, codes=self.residual.codes[slabs], scales=self.residual.scales[slabs]
            )
            decoded = rotated.decode(part)
            backbone = decoded if backbone is None else backbone.add_(decoded)
        if backbone is None:
            return torch.zeros(self.kv_heads, *self.shape[1:])
        return backbone.mul_(self.gain)

    def crop(self, tokens: int) -> Self:
        """Keep the first ``tokens`` tokens; the core stays."""
        factors, residual = self.factors, self.residual
        if factors is not None:
            factors = dataclasses.replace(factors, token=factors.token[:tokens].clone())
        if residual is not None:
            residual = dataclasses.replace(
                residual, codes=residual.codes[:, :tokens].clone(), scales=residual.scales[:, :tokens].clone()
            )
        shape = (self.shape[0], tokens, self.shape[2])
        return dataclasses.replace(self, factors=factors, residual=residual, shape=shape)


def encode_cell(
    x: Tensor, plan: CellPlan, *, kv_heads: int, levels: LevelKind, seed: int, spectra: Hosvd | None = None
) -> TuckerResidual:
    """Compress ``x`` of shape ``(layers · kv_heads, T, d)``, float32 and finite.

    The residual is taken against the *rounded* factors, so it also repairs their rounding.
    """
    gain = _gain(x)
    factors: TuckerFactors | None = None
    rest = x / gain
    if plan.token_rank:
        exact = truncate(x, plan.token_rank, plan.feature_rank, spectra)
        factors = TuckerFactors(
            exact.core.to(torch.float16),
            (exact.token / gain).to(torch.float16),
            None if exact.feature is None else exact.feature.to(torch.float16),
        )
        rest = rest.sub_(factors.reconstruct())
    residual = rotated.encode(rest, plan.bits, kind=levels, seed=seed) if plan.bits else None
    return TuckerResidual(factors, residual, gain, kv_heads, (x.shape[0], x.shape[1], x.shape[2]))


def _gain(x: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return 2.0 ** (math.ceil(math.log2(norm)) - _HEADROOM) if norm > 0 else 1.0
