"""The storage form of graded latents: codes at a width per channel, on a basis that belongs to the model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvslim.caching.block import CodedBlock
from kvslim.decomposing.channel_basis import ChannelBasis, encoder
from kvslim.quantizing import channels
from kvslim.quantizing.channels import ChannelLayout

_HALF_RANGE = 6e4
_ROOT = math.sqrt(math.pi / 2)


def outlier_bytes(count: int, features: int) -> int:
    """Bytes of ``count`` exact tokens of one layer's keys or values: 16 bits per number, and where they are."""
    return count * (2 * features + 4)


def layout_words(layout: ChannelLayout, outliers: int) -> str:
    """A layout in words: the rank, the mean width, and exact tokens."""
    mean = sum(layout.widths) / len(layout.widths)
    exact = f", {outliers} exact" if outliers else ""
    return f"rank {len(layout.kept)}/{layout.channels}, {mean:.2f} bit{exact}"


class GradedBasis:
    """The channels of one layer's keys or values, on the devices where they are used. No block counts its bytes.

    Args:
        basis: as calibrated.
        kv_heads: KV heads of the layer.
    """

    def __init__(self, basis: ChannelBasis, kv_heads: int) -> None:
        self.basis, self.kv_heads = basis, kv_heads
        self._encoders: dict[torch.device, Tensor] = {}
        self._decoders: dict[tuple[torch.device, ChannelLayout], Tensor] = {}
        self._means: dict[torch.device, Tensor] = {}
        self._costs: dict[torch.device, Tensor] = {}

    def mean(self, device: torch.device) -> Tensor:
        """``(features,)`` float32."""
        if device not in self._means:
            self._means[device] = self.basis.mean.to(device)
        return self._means[device]

    def costs(self, device: torch.device) -> Tensor:
        """``(features,)`` float32."""
        if device not in self._costs:
            self._costs[device] = self.basis.costs.to(device)
        return self._costs[device]

    def latents(self, x: Tensor) -> Tensor:
        """``(kv_heads, tokens, head_dim)`` as float32 ``(tokens, features)`` of unit deviation over calibration."""
        device = x.device
        if device not in self._encoders:
            self._encoders[device] = encoder(self.basis).to(device)
        encode = self._encoders[device]
        flat = x.transpose(0, 1).flatten(1).to(torch.float32) - self.mean(device)
        parts = flat.view(flat.shape[0], encode.shape[0], encode.shape[1]).transpose(0, 1)
        return (parts @ encode).transpose(0, 1).flatten(1)

    def decoder(self, layout: ChannelLayout, device: torch.device) -> Tensor:
        """``(kept, features)`` float32: the rows of ``B`` for the channels that have codes, in their order."""
        key = (device, layout)
        if key not in self._decoders:
            directions = self.basis.directions
            groups, size, _ = directions.shape
            kept = torch.tensor(layout.kept, dtype=torch.long)
            rows = torch.zeros(len(kept), groups, size)
            group, place = kept // size, kept % size
            rows[torch.arange(len(kept)), group] = directions[group, place].float()
            whole = rows.flatten(1) * self.basis.deviations[kept][:, None]
            self._decoders[key] = whole.to(device)
        return self._decoders[key]

    def spread(self, flat: Tensor) -> Tensor:
        """``(tokens, features)`` as ``(kv_heads, tokens, head_dim)``."""
        tokens, features = flat.shape
        return flat.view(tokens, self.kv_heads, features // self.kv_heads).transpose(0, 1)


@dataclass(frozen=True)
class GradedBlock(CodedBlock):
    """Graded latents of one layer's keys or values.

    Attributes:
        codes: uint8 ``(tokens, row_bytes)``.
        scales: uint8 ``(kept,)``, see :mod:`kvslim.quantizing.channels`.
        outlier_at: int32 ``(outliers,)``, rising: tokens that are kept exact.
        outliers: 16-bit ``(outliers, features)``, these tokens as they were coded (pre-RoPE if keys are).
        layout: widths.
        basis: the model's, shared by all blocks of this layer and kind.
    """

    codes: Tensor
    scales: Tensor
    outlier_at: Tensor
    outliers: Tensor
    layout: ChannelLayout
    basis: GradedBasis

    @property
    def tokens(self) -> int:
        return int(self.codes.shape[0])

    @property
    def words(self) -> str:
        """What was chosen, for a report."""
        return layout_words(self.layout, len(self.outlier_at))

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        latents = channels.decode(self.codes[start:stop], self.scales, self.layout)
        decoder = self.basis.decoder(self.layout, latents.device)
        flat = latents @ decoder + self.basis.mean(latents.device)
        at, rows = self._outliers(start, stop)
        flat[at] = rows
        return self.basis.spread(flat)

    def crop(self, tokens: int) -> Self:
        kept = int((self.outlier_at < tokens).sum())
        return dataclasses.replace(
            self,
            codes=self.codes[:tokens].clone(),
            scales=self.scales.clone(),
            outlier_at=self.outlier_at[:kept].clone(),
            outliers=self.outliers[:kept].clone(),
        )

    def scores(self, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``query · X̂ᵀ`` without rebuilding ``X̂``: the query is projected once, then one product for all heads."""
        heads, count, _ = query.shape
        levels = channels.unscaled(self.codes[start:stop], self.layout)
        absorbed = torch.einsum("hnd,rhd->hnr", query, self._by_head(query.device))
        absorbed = absorbed * channels.scale_values(self.scales)
        constant = torch.einsum("hnd,hd->hn", query, self.basis.mean(query.device).view(heads, -1))
        scores = (absorbed.flatten(0, 1) @ levels.T).view(heads, count, -1) + constant[..., None]
        at, rows = self._outliers(start, stop)
        scores[..., at] = query @ self.basis.spread(rows).mT
        return scores

    def mix(self, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights · X̂`` without rebuilding ``X̂``: latents are summed, and decoded once per query."""
        heads, count, _ = weights.shape
        at, rows = self._outliers(start, stop)
        exact = weights[..., at] @ self.basis.spread(rows)
        coded = weights.clone()
        coded[..., at] = 0
        levels = channels.unscaled(self.codes[start:stop], self.layout)
        summed = (coded.flatten(0, 1) @ levels).view(heads, count, -1) * channels.scale_values(self.scales)
        mixed = torch.einsum("hnr,rhd->hnd", summed, self._by_head(weights.device))
        mean = self.basis.mean(weights.device).view(heads, 1, -1)
        return mixed + coded.sum(-1, keepdim=True) * mean + exact

    def _by_head(self, device: torch.device) -> Tensor:
        decoder = self.basis.decoder(self.layout, device)
        return self.basis.spread(decoder).transpose(0, 1)

    def _outliers(self, start: int, stop: int | None) -> tuple[Tensor, Tensor]:
        """Places relative to ``start`` and rows ``(n, features)`` float32 of the outliers between two tokens."""
        stop = self.tokens if stop is None else stop
        inside = (self.outlier_at >= start) & (self.outlier_at < stop)
        return self.outlier_at[inside].long() - start, self.outliers[inside].float()


@dataclass(frozen=True)
class GradedCoded:
    """What encoding one layer's keys or values gives.

    Attributes:
        block: the block.
        lost: ``‖X - X̂‖²``, a float64 scalar tensor.
        cost: expected loss of the errors, summed over tokens, likewise.
        drift: cost of the errors over what calibration predicts for these widths, likewise.
    """

    block: GradedBlock
    lost: Tensor
    cost: Tensor


def encode_graded(x: Tensor, basis: GradedBasis, layout: ChannelLayout, at: Tensor) -> GradedCoded:
    """Code ``(kv_heads, tokens, head_dim)`` and keep the tokens ``at`` (int64, rising) exact."""
    latents = basis.latents(x)
    kept = torch.tensor(layout.kept, dtype=torch.long, device=x.device)
    ordered, costs = latents[:, kept], basis.costs(x.device)
    inner = torch.ones(len(latents), dtype=torch.bool, device=x.device)
    inner[at] = False
    codes = torch.zeros(len(latents), layout.row_bytes, dtype=torch.uint8, device=x.device)
    codes[inner], scales = channels.encode(ordered[inner], layout)
    flat = x.transpose(0, 1).flatten(1)[at]
    fits = not flat.numel() or float(flat.abs().max()) < _HALF_RANGE
    block = GradedBlock(
        codes, scales, at.to(torch.int32), flat.to(torch.float16 if fits else torch.bfloat16), layout, basis
    )
    lost = torch.linalg.vector_norm(block.decode(0) - x, dtype=torch.float64) ** 2
    missed = latents[inner].square().sum(0)
    missed[kept] = (channels.decode(codes[inner], scales, layout) - ordered[inner]).square().sum(0)
    return GradedCoded(block, lost, (missed.double() @ costs.double()).reshape(()))


def clipping(latents: Tensor, layout: ChannelLayout, costs: Tensor) -> Tensor:
    """What each token's part beyond the outermost levels costs: ``(tokens,)``.

    Attention sinks that form late in a text lie far from all other tokens, and attention looks at them. What clipping
    does to them is not what the measured curves of the channels say.

    Args:
        latents: ``(tokens, features)`` of unit deviation over calibration.
        layout: widths.
        costs: ``(features,)``.
    """
    kept = torch.tensor(layout.kept, dtype=torch.long, device=latents.device)
    size = latents[:, kept].abs()
    reach = torch.empty_like(costs[kept])
    for width, columns, _ in layout.parts:
        reach[columns] = channels.outermost(width)
    if not size.numel():
        return size.new_zeros(len(latents))
    reach = reach * size.mean(0) * _ROOT  # the deviation from the mean magnitude, which outliers sway less
    excess: Tensor = (size - reach).clamp_min_(0).square() @ costs[kept]
    return excess
