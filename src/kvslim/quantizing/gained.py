"""Latents of one token at widths per channel, coded when the token arrives: one gain for all its channels.

The channels have deviation 1 over calibration, so their scales need not be stored. What a token has of its own is its
*gain*, by which all its channels are larger or smaller than that: one byte, the logarithm in steps of a sixteenth of an
octave, fitted. Each token is coded on its own, so it does not matter in which portions the tokens come.

The gain makes ``Σ 4^b (x - g x̂)²`` least, over channels of ``b`` bits: reverse water-filling gives ``b`` bits to a
channel whose errors cost about ``4^b`` times as much as those of a channel that gets none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvslim.quantizing.channels import ChannelLayout
from kvslim.quantizing.codebook import gaussian_levels, gaussian_mse, midpoints
from kvslim.quantizing.packing import pack, unpack

OUTLYING = 20.0
"""A token is an outlier if its error weighs more than this many times what calibration predicts for its widths."""

_STEPS = 16  # of the gain, per octave
_CENTRE = 128  # code of the gain 1; 0 is a token of zeros, 255 one of NaN or Inf
_NOT_FINITE = 255
_OFFSETS = ((-16, -8, 0, 8, 16), (-4, 0, 4), (-2, 0, 2))
"""Steps by which gains are tried away from the best one so far."""
_PORTION = 1 << 20  # numbers worked on at a time: 4 MB, however many tokens there are
_LARGEST = 1e18
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class GainedCodes:
    """Packed codes of ``tokens`` tokens.

    Attributes:
        codes: uint8 ``(batch, tokens, row_bytes)``, places as in the layout.
        gains: uint8 ``(batch, tokens)``.
    """

    codes: Tensor
    gains: Tensor


def token_bytes(layout: ChannelLayout) -> int:
    """Bytes of one token: packed codes and the gain."""
    return layout.row_bytes + 1


@lru_cache(maxsize=64)
def unit_error(width: int) -> float:
    """Mean squared error of a standard normal variable at a width of 0 to 8 bits; 1 at none."""
    return gaussian_mse(gaussian_levels(width)) if width else 1.0


def encode(latents: Tensor, layout: ChannelLayout) -> tuple[GainedCodes, Tensor]:
    """Encode latents ``(batch, tokens, channels)`` of any float dtype, of deviation 1 over calibration.

    A token that holds NaN or Inf comes back as NaN, so that it shows.

    Returns:
        The codes, and how many tokens are outliers (:data:`OUTLYING`), an int64 scalar.
    """
    rows = _kept(latents, layout)
    gains, errors = _fitted(rows, layout)
    scaled = rows / _divisors(gains)
    codes = rows.new_empty(rows.shape[0], layout.row_bytes, dtype=torch.uint8)
    for width, columns, place in layout.parts:
        codes[:, place] = pack(_nearest(scaled[:, columns].contiguous(), width), width)
    shape = latents.shape[:2]
    outliers = (errors > OUTLYING * _weights(layout, rows.device)[1]).sum()
    return GainedCodes(codes.unflatten(0, shape), gains.unflatten(0, shape)), outliers


def decode(stored: GainedCodes, layout: ChannelLayout) -> Tensor:
    """Undo :func:`encode`: float32 ``(batch, tokens, channels)``, zeros in channels of no bits."""
    rows, gains = stored.codes.flatten(0, 1), stored.gains.flatten()
    full = torch.zeros(rows.shape[0], layout.channels, dtype=torch.float32, device=rows.device)
    values = gain_values(gains)[:, None]
    for (width, columns, place), channels in zip(layout.parts, _places(layout, rows.device), strict=True):
        codes = unpack(rows[:, place], width, columns.stop - columns.start)
        full[:, channels] = _levels(width, rows.device)[codes.int()] * values
    latents: Tensor = full.unflatten(0, stored.codes.shape[:2])
    return latents


def join(first: GainedCodes, second: GainedCodes) -> GainedCodes:
    """The tokens of both, one behind the other."""
    return GainedCodes(torch.cat([first.codes, second.codes], dim=1), torch.cat([first.gains, second.gains], dim=1))


def gain_values(codes: Tensor) -> Tensor:
    """Gains from their codes, float32: 0 for a token of zeros, NaN for one that was not finite."""
    gains = ((codes.to(torch.float32) - _CENTRE) / _STEPS).exp2()
    return torch.where(codes > 0, gains, 0.0).masked_fill(codes == _NOT_FINITE, float("nan"))


def _gain_codes(gains: Tensor) -> Tensor:
    steps = gains.clamp_min(_TINY).log2().mul(_STEPS).round_().add_(_CENTRE).clamp_(1, _NOT_FINITE - 1)
    steps = torch.where(gains > 0, steps, 0.0)
    return steps.nan_to_num(0.0).to(torch.uint8).masked_fill(gains.isnan(), _NOT_FINITE)


def _kept(latents: Tensor, layout: ChannelLayout) -> Tensor:
    """The channels that get codes, in their order, ``(batch * tokens, kept)`` float32; what is not finite is NaN."""
    rows = latents.flatten(0, 1)[:, _order(layout, latents.device)].to(torch.float32)
    return rows.clamp(-_LARGEST, _LARGEST) + (rows - rows)


def _fitted(rows: Tensor, layout: ChannelLayout) -> tuple[Tensor, Tensor]:
    """The gain code of each of ``(tokens, kept)``, searched around the token's own size, and the weighed error then.

    The error has several minima in the gain, and least squares alone stops in a near one. Sums are taken in float64, so
    that the order in which a device adds does not tip a code.
    """
    weights, _ = _weights(layout, rows.device)
    total = weights.sum(dtype=torch.float64).clamp_min(_TINY)
    portions = rows.split(max(1, _PORTION // (len(_OFFSETS[0]) * max(1, rows.shape[1]))))
    found = [_searched(part, (_sum(part.square() * weights) / total).sqrt(), layout) for part in portions]
    codes, errors = (torch.cat(parts) for parts in zip(*found, strict=True))
    return codes, errors


def _searched(rows: Tensor, sizes: Tensor, layout: ChannelLayout) -> tuple[Tensor, Tensor]:
    """:func:`_fitted` of rows whose weighed sizes are given; the codes of zeros and NaN stay."""
    codes = _gain_codes(sizes)
    least = torch.zeros_like(sizes)
    fits = (codes > 0) & (codes < _NOT_FINITE)
    for offsets in _OFFSETS:
        tried = codes.int() + torch.tensor(offsets, dtype=torch.int32, device=codes.device)[:, None]
        tried = tried.clamp_(1, _NOT_FINITE - 1).to(torch.uint8)
        least, best = _errors(rows, tried, layout).min(0, keepdim=True)
        codes = torch.where(fits, tried.gather(0, best)[0], codes)
    return codes, least.view_as(sizes)


def _errors(rows: Tensor, gains: Tensor, layout: ChannelLayout) -> Tensor:
    """The weighed squared errors of tokens ``(tokens, kept)`` under gains ``(candidates, tokens)``: that, float64."""
    weights, _ = _weights(layout, rows.device)
    values = _divisors(gains)
    summed = torch.zeros(gains.shape, dtype=torch.float64, device=rows.device)
    for width, columns, _ in layout.parts:
        scaled = rows[:, columns] / values
        missed = scaled - _levels(width, rows.device)[_nearest(scaled, width)]
        summed += _sum(missed.square_().mul_(weights[columns]))
    return summed * values[..., 0].double().square()


def _divisors(gains: Tensor) -> Tensor:
    """Gains ``(..., 1)`` that can be divided by."""
    return gain_values(gains).nan_to_num(1.0).clamp_min(_TINY)[..., None]


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, dtype=torch.float64)


def _nearest(scaled: Tensor, width: int) -> Tensor:
    return torch.bucketize(scaled, _thresholds(width, scaled.device))


@lru_cache(maxsize=64)
def _levels(width: int, device: torch.device) -> Tensor:
    return gaussian_levels(width).to(device=device, dtype=torch.float32)


@lru_cache(maxsize=64)
def _thresholds(width: int, device: torch.device) -> Tensor:
    return midpoints(_levels(width, device))


@lru_cache(maxsize=1024)
def _order(layout: ChannelLayout, device: torch.device) -> Tensor:
    return torch.tensor(layout.kept, dtype=torch.long, device=device)


@lru_cache(maxsize=1024)
def _places(layout: ChannelLayout, device: torch.device) -> tuple[Tensor, ...]:
    """The channels of each part of the layout."""
    order = _order(layout, device)
    return tuple(order[columns] for _, columns, _ in layout.parts)


@lru_cache(maxsize=1024)
def _weights(layout: ChannelLayout, device: torch.device) -> tuple[Tensor, float]:
    """What an error weighs in each kept channel, ``(kept,)`` float32, and the weighed error of one token by itself."""
    widths = [(width, columns.stop - columns.start) for width, columns, _ in layout.parts]
    weights = torch.tensor([4.0 ** (width - 8) for width, count in widths for _ in range(count)], device=device)
    return weights, sum(4.0 ** (width - 8) * count * unit_error(width) for width, count in widths)
