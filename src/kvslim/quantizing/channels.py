"""Latent channels at widths of their own: Lloyd-Max codes with one scale per channel, packed token by token.

A *run* of neighbouring channels shares a width; runs of one width are packed together, so that a token is one row of
whole bytes at fixed places, and cropping tokens is slicing rows. The scale of a channel is one byte, its logarithm
relative to the deviation that calibration found: steps of a sixteenth of an octave, within 2.2 % of the best scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvslim.errors import ConfigError
from kvslim.quantizing.codebook import gaussian_levels, midpoints
from kvslim.quantizing.packing import pack, packed_bytes, unpack

WIDTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8)
"""Code widths in bits; zero drops the channel."""

KERNEL_WIDTHS = (0, 2, 4, 8)
"""Widths that unpack without crossing bit planes."""

_STEPS = 16  # scale steps per octave
_CENTRE = 128  # code of a scale that is what calibration found; 0 is for a channel of zeros
_FITS = 2
_REACH, _FINE = 6, 1024  # deviations and points per deviation of the grid that codes are looked up in
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ChannelLayout:
    """Where the codes of one row lie: fixed by the widths, the same for every token and sequence.

    Attributes:
        widths: bits of each run, in channel order.
        run: channels per run; the last one may have fewer.
        channels: channels, dropped ones included.
    """

    widths: tuple[int, ...]
    run: int
    channels: int

    def __post_init__(self) -> None:
        if self.run < 1 or any(width not in WIDTHS for width in self.widths):
            raise ConfigError(f"Runs of at least one channel have widths of 0 to 8 bits, not {self.widths!r}.")
        if len(self.widths) != -(-self.channels // self.run) or self.channels < 1:
            raise ConfigError(f"{self.channels} channels in runs of {self.run} do not make {len(self.widths)} runs.")

    def members(self, at: int) -> range:
        """The channels of run ``at``."""
        return range(at * self.run, min((at + 1) * self.run, self.channels))

    @cached_property
    def groups(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """``(width, runs)`` for every width above zero that occurs, widest first: the order in a row of codes."""
        found = sorted({width for width in self.widths if width}, reverse=True)
        return tuple((width, tuple(i for i, w in enumerate(self.widths) if w == width)) for width in found)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The channels that have codes, in the order of the codes."""
        return tuple(channel for _, runs in self.groups for at in runs for channel in self.members(at))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.parts[-1][2].stop if self.parts else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one block, whatever its tokens."""
        return len(self.kept)

    def nbytes(self, tokens: int) -> int:
        """Bytes of a block of ``tokens`` tokens: codes and scales."""
        return tokens * self.row_bytes + self.scale_bytes

    @cached_property
    def parts(self) -> tuple[tuple[int, slice, slice], ...]:
        """``(width, columns, bytes)`` of each width: its slice of the kept channels and of a row."""
        parts, column, byte = [], 0, 0
        for width, runs in self.groups:
            count = sum(len(self.members(at)) for at in runs)
            size = packed_bytes(count, width)
            parts.append((width, slice(column, column + count), slice(byte, byte + size)))
            column, byte = column + count, byte + size
        return tuple(parts)


def layout_of(widths: Sequence[int], run: int, channels: int) -> ChannelLayout:
    """The layout of these widths; layouts are compared and hashed by their numbers."""
    return ChannelLayout(tuple(int(width) for width in widths), run, channels)


def encode(latents: Tensor, layout: ChannelLayout) -> tuple[Tensor, Tensor]:
    """Code ``(tokens, kept)`` float32 latents of unit deviation over calibration, channels in the order of the codes.

    The scale of a channel is fitted by least squares to its own tokens.

    Returns:
        ``(tokens, row_bytes)`` uint8 codes and ``(kept,)`` uint8 scales.
    """
    tokens = latents.shape[0]
    codes = latents.new_empty(tokens, layout.row_bytes, dtype=torch.uint8)
    scales = latents.new_empty(len(layout.kept), dtype=torch.uint8)
    for width, columns, place in layout.parts:
        part = latents[:, columns]
        scales[columns] = scale_codes(fitted_scales(part, width))
        codes[:, place] = pack(_nearest(part, scale_values(scales[columns]), width), width)
    return codes, scales


def decode(codes: Tensor, scales: Tensor, layout: ChannelLayout) -> Tensor:
    """Undo :func:`encode`: float32 ``(tokens, kept)``."""
    latents = unscaled(codes, layout)
    return latents.mul_(scale_values(scales)) if latents.numel() else latents


def unscaled(codes: Tensor, layout: ChannelLayout) -> Tensor:
    """The levels behind the codes, before the scales: float32 ``(tokens, kept)``."""
    levels = [
        _levels(width, codes.device)[unpack(codes[:, place], width, columns.stop - columns.start).int()]
        for width, columns, place in layout.parts
    ]
    return torch.cat(levels, dim=1) if levels else codes.new_zeros(codes.shape[0], 0, dtype=torch.float32)


def outermost(width: int) -> float:
    """The largest level of a width, in deviations."""
    return float(gaussian_levels(width)[-1])


def fitted_scales(latents: Tensor, width: int) -> Tensor:
    """The scale of each column of ``(tokens, channels)`` that its levels fit best: ``(channels,)`` float32."""
    scale = latents.square().mean(0).sqrt()
    for _ in range(_FITS):
        chosen = _rounded(latents, scale, width)
        fitted = (latents * chosen).sum(0) / chosen.square().sum(0).clamp_min(_TINY)
        scale = torch.where(fitted > 0, fitted, scale)
    return scale


def scale_codes(scales: Tensor) -> Tensor:
    """Scales ≥ 0 as bytes, see the module's head; what lies beyond eight octaves takes the last step."""
    steps = scales.clamp_min(_TINY).log2().mul(_STEPS).round_().add_(_CENTRE).clamp_(1, 255)
    return torch.where(scales > 0, steps, 0).to(torch.uint8)


def scale_values(codes: Tensor) -> Tensor:
    """Undo :func:`scale_codes`: float32, relative to the calibrated deviation."""
    exponents = (codes.to(torch.float32) - _CENTRE) / _STEPS
    return torch.where(codes > 0, exponents.exp2(), 0.0)


def curve(latents: Tensor, widths: tuple[int, ...] = WIDTHS) -> Tensor:
    """Measured squared error of each column of ``(tokens, channels)`` at each width: ``(channels, widths)`` float32."""
    errors = []
    for width in widths:
        if not width:
            errors.append(latents.square().sum(0))
            continue
        scale = scale_values(scale_codes(fitted_scales(latents, width)))
        found = _rounded(latents, scale, width) * scale
        errors.append((found - latents).square().sum(0))
    return torch.stack(errors, dim=1)


def _nearest(latents: Tensor, scale: Tensor, width: int) -> Tensor:
    """uint8 codes of ``(tokens, channels)`` latents."""
    return _grid(width, latents.device).index_select(0, _grid_places(latents, scale)).view(latents.shape)


def _rounded(latents: Tensor, scale: Tensor, width: int) -> Tensor:
    """The levels of these codes, before the scale: float32."""
    levels = _levels(width, latents.device)[_grid(width, latents.device).int()]
    return levels.index_select(0, _grid_places(latents, scale)).view(latents.shape)


def _grid_places(latents: Tensor, scale: Tensor) -> Tensor:
    """Where each latent falls in the grid, as a flat int32 tensor: ten times faster than a search among thresholds."""
    scaled = latents / scale.clamp_min(_TINY)
    return scaled.mul_(_FINE).add_(_REACH * _FINE + 0.5).clamp_(0, 2 * _REACH * _FINE).to(torch.int32).flatten()


@lru_cache(maxsize=64)
def _grid(width: int, device: torch.device) -> Tensor:
    """The code of each of the evenly spaced points from -6 to 6 deviations, beyond which all codes are the last ones.

    A latent takes the code of its nearest point; where that is not the nearest level, the two are equally far to within
    a thousandth of a deviation.
    """
    points = (torch.arange(2 * _REACH * _FINE + 1, dtype=torch.float64) / _FINE) - _REACH
    return torch.bucketize(points, midpoints(gaussian_levels(width))).to(device=device, dtype=torch.uint8)


@lru_cache(maxsize=64)
def _levels(width: int, device: torch.device) -> Tensor:
    return gaussian_levels(width).to(device=device, dtype=torch.float32)
