"""Asymmetric integer codes per channel, in groups of consecutive tokens: KIVI's form of keys.

Channels of keys differ far more in magnitude than tokens do, so a step that a channel has for itself is much finer
(Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024, Sec. 3). Each channel of a group has
a float16 step and a float16 minimum. Tokens that do not fill a group make a last, shorter one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvslim.quantizing import integer
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.integer import IntegerCodes
from kvslim.quantizing.packing import pack, packed_bytes, unpack


@dataclass(frozen=True)
class TokenGroups:
    """Codes of ``(heads, tokens, channels)``.

    Attributes:
        parts: the full groups, then the shorter last one, each if there is any. Their rows are
            ``(heads, groups, channels)`` and a row holds the codes of one channel, ``size`` tokens.
    """

    parts: tuple[IntegerCodes, ...]

    @property
    def tokens(self) -> int:
        return sum(_tokens(part) for part in self.parts)

    def crop(self, tokens: int) -> Self:
        """Keep the first ``tokens`` tokens, in storage of their own: they decode to what they did before."""
        kept: list[IntegerCodes] = []
        for part in self.parts:
            groups, rest = divmod(min(tokens, _tokens(part)), part.size)
            if groups:
                kept.append(_slice(part, 0, groups))
            if rest:
                last = _slice(part, groups, groups + 1)
                codes = unpack(last.codes, part.bits, part.size)[..., :rest]
                kept.append(dataclasses.replace(last, codes=pack(codes, part.bits), size=rest))
            tokens -= groups * part.size + rest
        return dataclasses.replace(self, parts=tuple(kept))


def encode(x: Tensor, bits: int, group: int) -> TokenGroups:
    """Encode ``x`` ``(heads, tokens, channels)``, float32 and finite, at 1 to 8 bits in groups of ``group`` tokens."""
    gain = power_of_two_gain(x)
    whole = x.shape[1] - x.shape[1] % group
    pieces = [x[:, :whole].unflatten(1, (-1, group))] if whole else []
    if whole < x.shape[1]:
        pieces.append(x[:, None, whole:])
    return TokenGroups(tuple(integer.encode(piece.mT.contiguous(), bits, gain=gain) for piece in pieces))


def decode(stored: TokenGroups, start: int = 0, stop: int | None = None) -> Tensor:
    """Undo :func:`encode` for tokens ``start`` to ``stop``: float32 ``(heads, tokens, channels)``.

    Only the groups that hold them are decoded.
    """
    start, stop, _ = slice(start, stop).indices(stored.tokens)
    found, before = [], 0
    for part in stored.parts:
        first, last = max(0, start - before), min(_tokens(part), stop - before)
        if first < last:
            from_group, to_group = first // part.size, -(-last // part.size)
            rows = integer.decode(_slice(part, from_group, to_group, copy=False)).mT.flatten(1, 2)
            skip = from_group * part.size
            found.append(rows[:, first - skip : last - skip])
        before += _tokens(part)
    if not found:
        like = stored.parts[0].steps
        return like.new_zeros((like.shape[0], 0, like.shape[2]), dtype=torch.float32)
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def stored_bytes(tokens: int, channels: int, bits: int, group: int) -> int:
    """Bytes of one head: codes, steps and minima."""
    whole, rest = divmod(tokens, group)
    per_channel = whole * (packed_bytes(group, bits) + 4) + (packed_bytes(rest, bits) + 4 if rest else 0)
    return channels * per_channel


def _tokens(part: IntegerCodes) -> int:
    return int(part.codes.shape[1]) * part.size


def _slice(part: IntegerCodes, start: int, stop: int, *, copy: bool = True) -> IntegerCodes:
    parts = (part.codes[:, start:stop], part.steps[:, start:stop], part.minima[:, start:stop])
    codes, steps, minima = (piece.clone() for piece in parts) if copy else parts
    return dataclasses.replace(part, codes=codes, steps=steps, minima=minima)
