"""Asymmetric integer codes of latents: each token on its own, and within it each group of KV heads on its own.

The groups of a token may have different ranks. Their codes lie side by side, each a whole number of bytes, with one
float16 step and one float16 minimum per token and group (Palu, Sec. 3.4 and Appendix A, with a float minimum in place
of a clamped integer zero point). A token's codes depend on no other token, so they can be appended, cropped and moved
freely, and it does not matter in which portions the tokens come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvslim.quantizing import integer
from kvslim.quantizing.integer import IntegerCodes
from kvslim.quantizing.packing import packed_bytes
from kvslim.quantizing.ranges import fitted_range

LARGEST = 60000.0
"""Magnitudes beyond this are stored as this: minimum, step and all decoded values then fit float16 (65504) at every
width from 2 bits on, rounding included. The numbers are part of the stored form and must not change."""


@dataclass(frozen=True)
class GroupedCodes:
    """Packed codes of ``tokens`` tokens.

    Attributes:
        codes: uint8 ``(batch, tokens, bytes)``, the groups side by side.
        steps: float16 ``(batch, tokens, groups)``.
        minima: float16 ``(batch, tokens, groups)``.
    """

    codes: Tensor
    steps: Tensor
    minima: Tensor


def token_bytes(ranks: Sequence[int], bits: int) -> int:
    """Bytes of one token: packed codes, steps and minima."""
    return sum(packed_bytes(rank, bits) + 4 for rank in ranks)


def encode(latents: Tensor, ranks: Sequence[int], bits: int, *, fitted: bool = True) -> GroupedCodes:
    """Encode latents ``(batch, tokens, summed ranks)`` of any float dtype at 2 to 8 bits.

    With ``fitted``, at 2 to 4 bits the range of each group is fitted to its values by least squares; what lies beyond
    it comes back as its end (see :mod:`kvslim.quantizing.ranges`). Otherwise, and at more bits, every value comes back
    within half a step of its group. Either way that is up to the float16 rounding of step and minimum. Magnitudes
    beyond :data:`LARGEST` saturate. A group that holds NaN or Inf comes back as NaN, so that it shows.
    """
    range_of = fitted_range if fitted else integer.full_range
    x = latents.to(torch.float32)
    x = x.clamp(-LARGEST, LARGEST) + (x - x)  # Inf - Inf is NaN; everything finite gets zero added
    codes, steps, minima, start = [], [], [], 0
    for rank, count in _runs(ranks):
        groups = x[..., start : start + rank * count].unflatten(-1, (count, rank))
        stored = integer.encode_in_range(groups, *range_of(groups, bits), bits)
        codes.append(stored.codes.flatten(-2))
        steps.append(stored.steps)
        minima.append(stored.minima)
        start += rank * count
    return GroupedCodes(torch.cat(codes, -1), torch.cat(steps, -1), torch.cat(minima, -1))


def decode(stored: GroupedCodes, ranks: Sequence[int], bits: int) -> Tensor:
    """Undo :func:`encode`: float32 ``(batch, tokens, summed ranks)``."""
    parts, byte, group = [], 0, 0
    for rank, count in _runs(ranks):
        width = packed_bytes(rank, bits)
        codes = stored.codes[..., byte : byte + width * count].unflatten(-1, (count, width))
        steps, minima = (kept[..., group : group + count] for kept in (stored.steps, stored.minima))
        parts.append(integer.decode(IntegerCodes(codes, steps, minima, bits, rank)).flatten(-2))
        byte += width * count
        group += count
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def join(first: GroupedCodes, second: GroupedCodes) -> GroupedCodes:
    """The tokens of both, one behind the other."""
    return GroupedCodes(
        torch.cat([first.codes, second.codes], dim=1),
        torch.cat([first.steps, second.steps], dim=1),
        torch.cat([first.minima, second.minima], dim=1),
    )


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring groups of equal rank as ``(rank, count)``: they are coded in one go."""
    return [(rank, len(list(run))) for rank, run in itertools.groupby(ranks)]
