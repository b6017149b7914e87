"""JoLT's storage form: fp16 Tucker factors and a rotated low-bit residual, for one layer group's keys or values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvslim.caching.block import iter_tensors, map_tensors, storage_bytes
from kvslim.decomposing.tucker import Hosvd, TuckerFactors, truncate
from kvslim.kernels.residual_decode import residual_decode
from kvslim.kernels.residual_encode import residual_encode
from kvslim.quantizing import rotated
from kvslim.quantizing.codebook import LevelKind, gaussian_levels
from kvslim.quantizing.packing import unpack
from kvslim.quantizing.rotated import RotatedCodes
from kvslim.quantizing.rotation import rotation

_FACTOR_BYTES = 2
# The norm of a cell in units of the gain is between 2**14 and 2**15, which bounds token factors and residual scales. A
# residual of 2**-11 of the norm, spread evenly over 2**28 entries, still has scales in float16's normal range.
_HEADROOM = 15
_WIDEST_GAIN = 120  # gains are powers of two that float32 holds, and their inverses too


@dataclass(frozen=True)
class CellPlan:
    """What one cell gets: ranks of the two modes, bits of the residual.

    ``feature_rank = d`` means untruncated. With ``inherit`` the basis is that of an earlier block and costs nothing;
    ``token_rank`` is then how many of its directions are used. ``bits = 16`` is a plain copy, without factors.
    """

    token_rank: int
    feature_rank: int
    bits: int
    inherit: bool = False

    def __str__(self) -> str:
        if self.bits == COPY_BITS:
            return "exact copy"
        ranks = f"ranks {self.token_rank} x {self.feature_rank}" + (" inherited" if self.inherit else "")
        return f"{ranks}, residual {self.bits} bit"


COPY_BITS = 16


def cell_bytes(
    plan: CellPlan, slabs: int, tokens: int, features: int, item_bytes: int = 2, core_slabs: int | None = None
) -> int:
    """Bytes that a cell of shape ``(slabs, tokens, features)`` will take; ``item_bytes`` per element of a copy.

    ``core_slabs`` is given if the slab mode is truncated too.
    """
    if plan.bits == COPY_BITS:
        return slabs * tokens * features * item_bytes
    factors = 0
    if plan.token_rank:
        factors = tokens * plan.token_rank
        if not plan.inherit:
            factors += (core_slabs or slabs) * plan.token_rank * plan.feature_rank
            factors += slabs * core_slabs if core_slabs else 0
            if plan.feature_rank < features:
                factors += features * plan.feature_rank
    return _FACTOR_BYTES * factors + slabs * tokens * rotated.row_bytes(features, plan.bits)


@dataclass(frozen=True)
class TuckerResidual:
    """``X ≈ gain · (C ×_T U_T ×_d U_d + decoded residual)`` with ``X`` of shape ``(layers · kv_heads, T, d)``.

    Attributes:
        factors: float16 factors of the Tucker backbone, None at token rank 0. A block that inherits its basis shares
            the core and feature tensors of the block that owns it.
        residual: codes of ``(layers · kv_heads, T)`` rows in units of the gain, None at 0 bits.
        gain: a power of two that keeps factors and scales inside float16's normal range.
        kv_heads: heads per layer; slabs ``[layer · kv_heads, (layer + 1) · kv_heads)`` belong to one layer.
        shape: ``(layers · kv_heads, T, d)``.
        missed: share of the energy outside the basis when the block was made; 1 at token rank 0.
        inherited: the core and feature tensors belong to an earlier block of the row.
    """

    factors: TuckerFactors | None
    residual: RotatedCodes | None
    gain: float
    kv_heads: int
    shape: tuple[int, int, int]
    missed: float = 1.0
    inherited: bool = False

    exact = False

    @property
    def tokens(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of its storages; an inherited basis belongs to another block."""
        own = self.factors.token if self.inherited and self.factors is not None else self.factors
        return storage_bytes(iter_tensors((own, self.residual)))

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rebuild tokens of one layer of the group: ``(kv_heads, tokens, d)`` float32."""
        slabs, tokens = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads), slice(start, stop)
        backbone: Tensor | None = None
        if self.factors is not None:
            backbone = dataclasses.replace(self.factors, token=self.factors.token[tokens]).reconstruct(slabs)
        if (kept := self.residual) is not None:
            codes, scales, turn = kept.codes[slabs, tokens], kept.scales[slabs, tokens], (kept.kind, kept.seed)
            return residual_decode(codes, scales, kept.bits, kept.size, *turn, self.gain, torch.float32, backbone)
        if backbone is None:
            return torch.zeros(self.kv_heads, len(range(self.tokens)[tokens]), self.shape[2])
        return backbone.mul_(self.gain)

    def scores(self, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``q X̂ᵀ = gain · ((q U_d) Cᵀ U_Tᵀ + (q R) · codesᵀ)``, without X̂ as long as there are few queries."""
        if query.shape[1] >= self.shape[2]:  # rebuilding once is then less work than carrying every query through
            return query @ self.decode(layer, start, stop).to(query).mT
        slabs, tokens = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads), slice(start, stop)
        total = query.new_zeros(*query.shape[:2], stop - start)
        if self.factors is not None:
            core, feature, token = _wide(self.factors, slabs, tokens)
            turned = query if feature is None else query @ feature
            total = total + (turned @ core.mT) @ token.T
        if self.residual is not None:
            rows, scales, turn = _coordinates(map_tensors(self.residual, lambda x: x[slabs, tokens]))
            total = total + ((query @ turn) @ rows.mT) * scales[:, None]
        return total * self.gain

    def mix(self, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """``p X̂ = gain · ((p U_T) C U_dᵀ + (p · scales) codes Rᵀ)``, without X̂ as long as there are few queries."""
        if weights.shape[1] >= self.shape[2]:
            return weights @ self.decode(layer, start, stop).to(weights)
        slabs, tokens = slice(layer * self.kv_heads, (layer + 1) * self.kv_heads), slice(start, stop)
        total = weights.new_zeros(*weights.shape[:2], self.shape[2])
        if self.factors is not None:
            core, feature, token = _wide(self.factors, slabs, tokens)
            mixed = (weights @ token) @ core
            total = total + (mixed if feature is None else mixed @ feature.T)
        if self.residual is not None:
            rows, scales, turn = _coordinates(map_tensors(self.residual, lambda x: x[slabs, tokens]))
            total = total + ((weights * scales[:, None]) @ rows) @ turn.T
        return total * self.gain

    def crop(self, tokens: int) -> Self:
        """Keep the first ``tokens`` tokens; the core stays."""
        factors, residual = self.factors, self.residual
        if factors is not None:
            factors = dataclasses.replace(factors, token=factors.token[:tokens].clone())
        if residual is not None:
            residual = map_tensors(residual, lambda x: x[:, :tokens].clone())
        shape = (self.shape[0], tokens, self.shape[2])
        return dataclasses.replace(self, factors=factors, residual=residual, shape=shape)


def _wide(factors: TuckerFactors, slabs: slice, tokens: slice) -> tuple[Tensor, Tensor | None, Tensor]:
    """Core ``(kv_heads, r_T, r_d)``, feature ``(d, r_d)`` and token factors ``(tokens, r_T)`` of one layer, float32."""
    if factors.slab is None:
        core = factors.core[slabs].to(torch.float32)
    else:
        core = torch.einsum("mk,krd->mrd", factors.slab[slabs].to(torch.float32), factors.core.to(torch.float32))
    feature = None if factors.feature is None else factors.feature.to(torch.float32)
    return core, feature, factors.token[tokens].to(torch.float32)


def _coordinates(stored: RotatedCodes) -> tuple[Tensor, Tensor, Tensor]:
    """Levels ``(kv_heads, tokens, d)``, scales ``(kv_heads, tokens)`` and rotation ``R``: X ≈ levels · scales · Rᵀ."""
    levels = gaussian_levels(stored.bits, stored.kind).to(device=stored.codes.device, dtype=torch.float32)
    rows = levels[unpack(stored.codes, stored.bits, stored.size).int()]
    return rows, stored.scales.to(torch.float32), rotation(stored.size, stored.seed, rows.device)


@dataclass(frozen=True)
class Encoded:
    """A block and what it lost of the tensor that it codes: ``‖X - X̂‖²``, a scalar tensor on the block's device."""

    block: TuckerResidual
    lost: Tensor


def encode_cell(
    x: Tensor,
    plan: CellPlan,
    *,
    kv_heads: int,
    levels: LevelKind,
    seed: int,
    spectra: Hosvd | None = None,
    slab: Tensor | None = None,
    missed: float | None = None,
) -> Encoded:
    """Compress ``x`` of shape ``(layers · kv_heads, T, d)``, finite.

    The residual is taken against the *rounded* factors, so it also repairs their rounding. ``slab`` ``(m, r_m)`` with
    orthonormal columns truncates the first mode too; ``spectra`` are then those of the truncated tensor. ``missed`` is
    the share of the energy outside the basis, if it is known. Nothing waits for the device if it is, with ``spectra``.
    """
    factors: TuckerFactors | None = None
    if plan.token_rank:
        kept = x if slab is None else torch.einsum("mtd,mk->ktd", x.to(torch.float32), slab)
        factors = truncate(kept, plan.token_rank, plan.feature_rank, spectra)
        factors = factors if slab is None else dataclasses.replace(factors, slab=slab)
    energy = _energy(x) if spectra is None else spectra.energy
    if factors is not None and missed is None:
        missed = max(0.0, 1 - _energy(factors.token) / energy) if energy else 0.0
    return _finish(x, factors, plan.bits, energy, missed, kv_heads=kv_heads, levels=levels, seed=seed)


def encode_on(
    x: Tensor, basis: TuckerFactors, plan: CellPlan, missed: float, *, kv_heads: int, levels: LevelKind, seed: int
) -> Encoded:
    """Compress later tokens ``x`` by projection on the first ``plan.token_rank`` directions of an earlier basis.

    The new block shares the basis tensors; only its token factors and its residual are new. ``missed`` is the share of
    the energy of ``x`` outside these directions.
    """
    core = basis.core[:, : plan.token_rank]
    factors = dataclasses.replace(basis, core=core, token=project(x, basis)[:, : plan.token_rank])
    made = _finish(x, factors, plan.bits, _energy(x), missed, kv_heads=kv_heads, levels=levels, seed=seed)
    return Encoded(dataclasses.replace(made.block, inherited=True), made.lost)


def _energy(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def project(x: Tensor, basis: TuckerFactors) -> Tensor:
    """Coefficients ``(T, r)`` float32 of ``x`` ``(m, T, d)`` in the orthonormal directions of ``basis``."""
    wide = x.to(torch.float32)
    if basis.slab is not None:
        wide = torch.einsum("mtd,mk->ktd", wide, basis.slab.to(torch.float32))
    if basis.feature is not None:
        wide = wide @ basis.feature.to(torch.float32)
    return torch.einsum("mtd,mrd->tr", wide, basis.core.to(torch.float32))


def directions(basis: TuckerFactors) -> Tensor:
    """The token directions of a basis over all slabs and features: ``(m d, r)`` float32, nearly orthonormal."""
    core = basis.core.to(torch.float32)
    if basis.slab is not None:
        core = torch.einsum("mk,krd->mrd", basis.slab.to(torch.float32), core)
    if basis.feature is not None:
        core = core @ basis.feature.to(torch.float32).T
    return core.transpose(1, 2).flatten(0, 1)


def projected_tail(x: Tensor, basis: TuckerFactors) -> Tensor:
    """Share of the energy of ``x`` outside the first 0, 1, … directions of a basis: ``(r + 1,)`` float64."""
    energy = _energy(x)
    caught = project(x, basis).double().square().sum(0).cumsum(0)
    zero = caught.new_zeros(1)
    return (1 - torch.cat((zero, caught)) / energy).clamp_min(0) if energy else torch.cat((zero, 0 * caught))


def _finish(
    x: Tensor, factors: TuckerFactors | None, bits: int, energy: float, missed: float | None, *, kv_heads: int,
    levels: LevelKind, seed: int,
) -> Encoded:  # fmt: skip
    """Round the factors and code what they leave. ``factors.token`` is in units of ``x``."""
    power = math.ceil(math.log2(energy) / 2) - _HEADROOM if energy > 0 else 0
    gain = 2.0 ** max(-_WIDEST_GAIN, min(power, _WIDEST_GAIN))
    backbone = None
    if factors is not None:
        # Row-major always: a cache read from disk then decodes bit for bit as the one that was written. What is in
        # half precision already is an earlier block's, and stays shared.
        factors = map_tensors(
            dataclasses.replace(factors, token=factors.token / gain),
            lambda part: (
                part if part.dtype == torch.float16 else part.to(torch.float16, memory_format=torch.contiguous_format)
            ),
        )
        backbone = factors.reconstruct()
    residual = None
    if bits:
        lost = torch.empty(x.shape[:2], dtype=torch.float32, device=x.device)
        codes, scales = residual_encode(x, backbone, gain, bits, levels, seed, lost)
        residual = RotatedCodes(codes, scales, bits, x.shape[2], levels, seed)
    else:
        rest = x.to(torch.float32) / gain
        lost = torch.linalg.vector_norm(rest if backbone is None else rest.sub_(backbone), dim=-1).square_()
    missed = 1.0 if factors is None else missed or 0.0
    block = TuckerResidual(factors, residual, gain, kv_heads, (x.shape[0], x.shape[1], x.shape[2]), missed)
    return Encoded(block, lost.sum(dtype=torch.float64) * gain**2)
