"""Non-uniform codes with exact outliers, per channel or per token: KVQuant's "nuq" in dense-and-sparse form.

A vector is one channel over all tokens, or one token over all channels. Its outliers, a fixed count of the numbers
farthest from its median, are kept as they are; the rest is mapped linearly to [-1, 1] and coded by levels that all
vectors share (Hooper et al., "KVQuant", 2024, Sec. 3.3 and 3.4). The paper finds levels on calibration data, weighted
by the loss's sensitivity. Here they are found online, on the tensor itself: k-means over all normalized numbers, each
weighted by the squared half-range of its vector, so that it is the squared error of the tensor that is minimized.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvslim.quantizing.codebook import midpoints
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.packing import pack, packed_bytes, unpack

_BINS = 4096
"""Bins of the histogram that k-means runs on: 256 times finer than 16 uniform levels."""
_ROUNDS = 200
_ABSENT = -1
_INT16_HOLDS = 1 << 15


@dataclass(frozen=True)
class NonUniformCodes:
    """Codes of ``(tokens, channels)``.

    Attributes:
        codes: uint8 ``(tokens, packed_bytes(channels, bits))``, also with a scale per channel: cropping cuts rows.
        middles, halves: float16, middle and half of each vector's range without outliers; ``(channels,)`` per channel,
            ``(tokens,)`` per token.
        levels: float16 ``(2**bits,)``, ascending, from -1 to 1.
        places: int16, or int32 where that is too narrow, ``(vectors, outliers)``: where in its vector each outlier is,
            ascending; -1, at the end, for those that a crop has removed.
        outliers: float16 ``(vectors, outliers)``.
        per_channel: whether vectors are channels.
        bits: code width, 1 to 8.
        channels: of the tensor.
        gain: a power of two that was taken off, so that what is stored fits float16.
    """

    codes: Tensor
    middles: Tensor
    halves: Tensor
    levels: Tensor
    places: Tensor
    outliers: Tensor
    per_channel: bool
    bits: int
    channels: int
    gain: float

    @property
    def tokens(self) -> int:
        return int(self.codes.shape[0])

    def crop(self, tokens: int) -> Self:
        """Keep the first ``tokens`` tokens, in storage of their own: they decode to what they did before."""
        per_vector = (self.middles, self.halves, self.places, self.outliers)
        if not self.per_channel:
            middles, halves, places, outliers = (kept[:tokens].clone() for kept in per_vector)
        else:
            stays = self.places < tokens  # absent ones too
            places = self.places.masked_fill(~stays, _ABSENT)
            width = int((places != _ABSENT).sum(1).max()) if places.numel() else 0
            middles, halves = self.middles.clone(), self.halves.clone()
            places, outliers = places[:, :width].clone(), self.outliers[:, :width].clone()
        return dataclasses.replace(
            self, codes=self.codes[:tokens].clone(), levels=self.levels.clone(), middles=middles, halves=halves,
            places=places, outliers=outliers,
        )  # fmt: skip


def outlier_count(share: float, size: int) -> int:
    """How many numbers of a vector of ``size`` are kept exact: the nearest whole number, halves up."""
    return int(share * size + 0.5)


def stored_bytes(tokens: int, channels: int, bits: int, per_channel: bool, share: float) -> int:
    """Bytes of :class:`NonUniformCodes` with ``share`` of the numbers exact."""
    vectors, size = (channels, tokens) if per_channel else (tokens, channels)
    index = 2 if size <= _INT16_HOLDS else 4
    codes = tokens * packed_bytes(channels, bits)
    return codes + vectors * (4 + outlier_count(share, size) * (2 + index)) + 2 * (1 << bits)


def encode(
    x: Tensor, bits: int, *, per_channel: bool, share: float = 0.01, levels: Tensor | None = None
) -> NonUniformCodes:
    """Encode ``x`` ``(tokens, channels)``, float32 and finite.

    Args:
        x: the tensor.
        bits: code width, 1 to 8.
        per_channel: a vector is a channel, otherwise a token.
        share: of each vector's numbers that are kept exact.
        levels: ``(2**bits,)``, ascending, in [-1, 1]; None finds them on ``x``.
    """
    gain = power_of_two_gain(x)
    vectors = (x / gain).T if per_channel else x / gain
    size = vectors.shape[1]
    centres = vectors.median(1, keepdim=True).values
    places = (vectors - centres).abs().topk(outlier_count(share, size), dim=1).indices.sort(1).values
    outliers = vectors.gather(1, places).to(torch.float16)
    inside = torch.ones_like(vectors, dtype=torch.bool).scatter_(1, places, False)
    rest = torch.where(inside, vectors, centres)
    low, high = rest.aminmax(dim=1)
    middles = ((low + high) / 2).to(torch.float16)
    middle = middles.to(torch.float32)
    halves = torch.maximum(high - middle, middle - low).to(torch.float16)
    half = halves.to(torch.float32)[:, None]
    normal = torch.where(half > 0, (rest - middle[:, None]) / half, 0.0).clamp_(-1, 1).contiguous()
    if levels is None:
        levels = fit_levels(normal, half.square() * inside, bits)
    stored = levels.to(torch.float16)
    codes = torch.bucketize(normal, midpoints(stored.to(torch.float32)))
    narrow = torch.int16 if size <= _INT16_HOLDS else torch.int32
    return NonUniformCodes(
        pack(codes.T if per_channel else codes, bits), middles, halves, stored, places.to(narrow), outliers,
        per_channel, bits, x.shape[1], gain,
    )  # fmt: skip


def decode(stored: NonUniformCodes, start: int = 0, stop: int | None = None) -> Tensor:
    """Undo :func:`encode` for tokens ``start`` to ``stop``: float32 ``(tokens, channels)``."""
    start, stop, _ = slice(start, stop).indices(stored.tokens)
    codes = unpack(stored.codes[start:stop], stored.bits, stored.channels)
    normal = stored.levels.to(torch.float32)[codes.int()]
    middles, halves = stored.middles.to(torch.float32), stored.halves.to(torch.float32)
    if stored.per_channel:
        rows = normal * halves + middles
        here = (stored.places >= start) & (stored.places < stop)
        channels, which = here.nonzero(as_tuple=True)
        rows[stored.places[channels, which].long() - start, channels] = stored.outliers[channels, which].float()
    else:
        rows = normal * halves[start:stop, None] + middles[start:stop, None]
        rows.scatter_(1, stored.places[start:stop].long(), stored.outliers[start:stop].float())
    return rows * stored.gain


def fit_levels(normal: Tensor, weights: Tensor, bits: int) -> Tensor:
    """Weighted k-means in one dimension: ``(2**bits,)`` float32 levels, ascending, in [-1, 1].

    Args:
        normal: numbers in [-1, 1].
        weights: of their squared errors, of a shape that broadcasts to that of ``normal``.
        bits: code width, 1 to 8.

    Lloyd's iteration on a histogram, from levels whose density is that of the numbers to the power 1/3 (Panter and
    Dite), the optimum for many levels. Without any weight the levels are uniform.
    """
    count = 1 << bits
    bins = ((normal + 1) * (_BINS / 2)).long().clamp_(0, _BINS - 1).flatten()
    spread = weights.expand_as(normal).flatten().double()
    mass = torch.bincount(bins, spread, _BINS)
    moment = torch.bincount(bins, spread * normal.flatten(), _BINS)
    edges = torch.linspace(-1, 1, _BINS + 1, dtype=torch.float64, device=normal.device)
    if not bool(mass.sum() > 0):
        return torch.linspace(-1, 1, count, device=normal.device)
    density = mass.pow(1 / 3).cumsum(0)
    shares = (torch.arange(count, dtype=torch.float64, device=normal.device) + 0.5) / count
    levels = edges[torch.searchsorted(density, shares * density[-1])] + 1 / _BINS
    below = [torch.cat((total.new_zeros(1), total.cumsum(0))) for total in (mass, moment)]
    for _ in range(_ROUNDS):
        cuts = torch.searchsorted(edges[:-1], midpoints(levels)) if count > 1 else levels.new_zeros(0)
        ends = torch.cat((cuts.new_zeros(1), cuts, cuts.new_full((1,), _BINS)))
        held, summed = (total[ends].diff() for total in below)
        moved = torch.where(held > 0, summed / held.clamp_min(torch.finfo(torch.float64).tiny), levels)
        done = bool((moved - levels).abs().max() < 1 / _BINS / 16)
        levels = moved
        if done:
            break
    return levels.sort().values.clamp(-1, 1).to(torch.float32)
