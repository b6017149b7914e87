"""Per-row asymmetric integer codes: the simplest codec people use, kept as a baseline and for latents.

One row is one token of one head. A row stores a float16 step and a float16 minimum (not a clamped zero point), so a
row that does not span zero loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.packing import pack, unpack


@dataclass(frozen=True)
class IntegerCodes:
    """Packed asymmetric codes.

    Attributes:
        codes: uint8 ``(..., packed_bytes(size, bits))``.
        steps: float16 ``(...)``, one per row.
        minima: float16 ``(...)``, one per row.
        bits: code width, 1 to 8.
        size: coordinates per row.
        gain: a power of two that was taken off all rows, so that steps and minima fit float16.
    """

    codes: Tensor
    steps: Tensor
    minima: Tensor
    bits: int
    size: int
    gain: float = 1.0


def encode(x: Tensor, bits: int, *, gain: float | None = None) -> IntegerCodes:
    """Encode ``x`` of shape ``(..., size)``, float32 and finite (Palu, Appendix A, with a float minimum).

    Args:
        x: the rows.
        bits: code width, 1 to 8.
        gain: a power of two to take off all rows; ``None`` finds it from the largest magnitude, so that the codes of
            a row depend on the others.
    """
    gain = power_of_two_gain(x) if gain is None else gain
    x = x / gain
    minima, steps = full_range(x, bits)
    return encode_in_range(x, minima, steps, bits, gain)


def full_range(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Minimum and step of each row of ``x`` ``(..., size)``, float16 ``(...)``: from its least value to its largest."""
    minima = x.amin(-1).to(torch.float16)
    steps = (x.amax(-1) - minima.to(torch.float32)) / ((1 << bits) - 1)
    return minima, steps.clamp_min(0).to(torch.float16)


def encode_in_range(x: Tensor, minima: Tensor, steps: Tensor, bits: int, gain: float = 1.0) -> IntegerCodes:
    """Encode rows, ``gain`` taken off already, with given float16 minima and steps; what lies beyond is clipped."""
    codes = codes_of(x, minima, steps, bits)
    return IntegerCodes(pack(codes, bits), steps, minima, bits, x.shape[-1], gain)


def codes_of(x: Tensor, minima: Tensor, steps: Tensor, bits: int, *, out: Tensor | None = None) -> Tensor:
    """The nearest code of each value, as whole float32 numbers of ``x``'s shape, written to ``out`` if given."""
    scaled = torch.sub(x, minima[..., None].to(torch.float32), out=out)
    scaled /= steps[..., None].to(torch.float32).clamp_min(1e-12)
    return scaled.round_().clamp_(0, (1 << bits) - 1)


def decode(stored: IntegerCodes) -> Tensor:
    """Undo :func:`encode`: float32 ``(..., size)``."""
    codes = unpack(stored.codes, stored.bits, stored.size).to(torch.float32)
    rows = codes * stored.steps[..., None].to(torch.float32) + stored.minima[..., None].to(torch.float32)
    return rows * stored.gain
