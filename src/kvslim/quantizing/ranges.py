"""Fit the range of asymmetric codes to each row by least squares, for widths of few bits.

From minimum to maximum is the range that clips nothing, but at 2 to 4 bits a narrower one errs less: the few values
beyond it are clipped, and the step of all others is finer. A row of 192 Gaussian numbers loses more than half of its
squared error at 2 bits, three tenths at 3 and a seventh at 4. The stored form is the same.

This is for rows that a rotation has spread evenly. Of others it lowers the squared error even more, but it does so by
clipping the same few channels of every token, those of the most energy, and attention is worse for it.

A row's range depends on no other row, bit for bit. A sum of floats depends on its order, and that on the number of rows
and on where they lie in memory; so errors are rounded to whole numbers of a small unit, which sum exactly in any order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvslim.quantizing import integer

SHRINKING = {2: (0.85, 0.7, 0.55), 3: (0.9, 0.8, 0.7), 4: (0.93, 0.86)}
"""Per width, the shares of the full range that are tried, around its middle. Wider codes keep the full range."""

_REFINEMENTS = 2
_PORTION = 1 << 20  # numbers worked on at a time: 4 MB, however many rows there are
_GRAIN = 2.0**22  # whole numbers in a squared unit: 2**9 of these and 2**22 of them side by side stay below 2**53
_LARGEST = torch.finfo(torch.float16).max


def fitted_range(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Minimum and step of each row, float16 ``(...)``, for asymmetric codes of ``x`` ``(..., size)``.

    The best of the full range and the shrunk ones of :data:`SHRINKING`, refined: given the codes ``c`` of a row, the
    step and minimum of least ``Σ (x - step c - minimum)²`` are known in closed form. Every candidate is judged after
    its rounding to float16, with the codes that it gives, so none is taken that makes a larger error than
    :func:`kvslim.quantizing.integer.full_range`. Rows that hold NaN come back as NaN.

    Args:
        x: the rows, float32, of magnitudes that fit float16.
        bits: code width, 1 to 8.
    """
    if bits not in SHRINKING:
        return integer.full_range(x, bits)
    rows = x.detach().flatten(0, -2)
    portion = max(1, _PORTION // ((1 + len(SHRINKING[bits])) * rows.shape[-1]))
    fitted = [_fit(part, bits) for part in rows.split(portion)]
    minima, steps = (torch.cat(parts).view(x.shape[:-1]) for parts in zip(*fitted, strict=True))
    return minima, steps


def _fit(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """:func:`fitted_range` of ``(rows, size)``."""
    minima, steps = integer.full_range(rows, bits)
    # The error of a value is at most some steps, or what rounding the minimum to float16 makes: so is the unit.
    unit = (steps.float() + minima.float().abs() * 2.0**-11 + 2.0**-24)[:, None]
    low, high = rows.amin(-1), rows.amax(-1)
    shares = _shares(bits, rows.device)
    tried_minima = ((low + high) / 2 - (high - low) * (shares / 2)).to(torch.float16)
    tried_steps = ((high - low) * (shares / ((1 << bits) - 1))).to(torch.float16)
    tried_minima[0], tried_steps[0] = minima, steps
    errors, best = _errors(rows, tried_minima, tried_steps, unit, bits).min(0, keepdim=True)
    minima, steps = tried_minima.gather(0, best)[0], tried_steps.gather(0, best)[0]
    errors = errors[0]
    for _ in range(_REFINEMENTS):
        finer = _least_squares(rows, minima, steps, unit, bits)
        after = _errors(rows, *finer, unit, bits)
        better = after < errors
        minima, steps = torch.where(better, finer[0], minima), torch.where(better, finer[1], steps)
        errors = torch.where(better, after, errors)
    return minima, steps


@lru_cache(maxsize=16)
def _shares(bits: int, device: torch.device) -> Tensor:
    """``(candidates, 1)``; the first is the full range."""
    return torch.tensor((1.0, *SHRINKING[bits]), device=device)[:, None]


def _errors(rows: Tensor, minima: Tensor, steps: Tensor, unit: Tensor, bits: int) -> Tensor:
    """The squared error of each row under ranges ``(..., rows)``, float64, in a constant share of the squared unit.

    Infinite for a range whose largest code stands for a value beyond float16.
    """
    codes = integer.codes_of(rows, minima, steps, bits)
    missed = _missed(rows, codes, minima, steps, out=codes).div_(unit)
    errors = missed.square_().mul_(_GRAIN).round_().sum(-1, dtype=torch.float64)
    top = minima.float() + steps.float() * ((1 << bits) - 1)
    return errors.masked_fill_(top > _LARGEST, float("inf"))


def _least_squares(rows: Tensor, minima: Tensor, steps: Tensor, unit: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The minimum and step that fit ``(rows, size)`` best with the codes that they have now."""
    codes = integer.codes_of(rows, minima, steps, bits)
    missed = _missed(rows, codes, minima, steps).div_(unit).mul_(_GRAIN).round_()
    code, miss, square = (_mean(each) for each in (codes, missed, codes * codes))
    product = _mean(missed.mul_(codes))
    scale = unit[:, 0] / _GRAIN
    slope = (product - code * miss) / (square - code.square()).clamp_min(1e-9)
    minima = minima + (miss - slope * code) * scale
    return minima.to(torch.float16), (steps + slope * scale).to(torch.float16)


def _mean(numbers: Tensor) -> Tensor:
    """The mean of whole numbers along the last axis, float64."""
    return numbers.sum(-1, dtype=torch.float64) / numbers.shape[-1]


def _missed(rows: Tensor, codes: Tensor, minima: Tensor, steps: Tensor, out: Tensor | None = None) -> Tensor:
    """What the codes miss of the values, written to ``out`` if given."""
    decoded = torch.mul(codes, steps[..., None].float(), out=out).add_(minima[..., None].float())
    return torch.sub(rows, decoded, out=decoded)
