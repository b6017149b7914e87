"""The storage form of the KVTC-like baseline: integers per token and group of PCA coefficients, at fixed places."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from kvslim.caching.block import CodedBlock
from kvslim.caching.graded_block import GradedBasis
from kvslim.decomposing.channel_basis import ChannelBasis
from kvslim.quantizing import integer
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.integer import IntegerCodes
from kvslim.quantizing.packing import packed_bytes

RANGE_BYTES = 4
"""A float16 step and a float16 minimum."""


# ---- where codes lie -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodedGroup:
    """A group that has codes: channels ``start`` to ``stop`` at ``bits``, in ``place`` of a token's row of bytes."""

    start: int
    stop: int
    bits: int
    place: slice

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class KvtcLayout:
    """How one token is coded, the same for every token.

    Attributes:
        groups: ``(channels, bits)`` of each group, in channel order; together they are all channels.
    """

    groups: tuple[tuple[int, int], ...]

    @cached_property
    def coded(self) -> tuple[CodedGroup, ...]:
        """The groups that have codes."""
        found, start, byte = [], 0, 0
        for size, bits in self.groups:
            if bits:
                width = packed_bytes(size, bits)
                found.append(CodedGroup(start, start + size, bits, slice(byte, byte + width)))
                byte += width
            start += size
        return tuple(found)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The channels that have codes."""
        return tuple(channel for group in self.coded for channel in range(group.start, group.stop))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token's codes."""
        return self.coded[-1].place.stop if self.coded else 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: codes, steps and minima."""
        return self.row_bytes + RANGE_BYTES * len(self.coded)

    def __str__(self) -> str:
        channels = sum(size for size, _ in self.groups)
        mean = sum(size * bits for size, bits in self.groups) / channels
        return f"rank {len(self.kept)}/{channels}, {len(self.coded)} groups, {mean:.2f} bit"


# ---- the basis -------------------------------------------------------------------------------------------------------


class PcaBasis:
    """The PCA of one layer's keys or values, on the devices where it is used. No block counts its bytes.

    Args:
        basis: as calibrated with ``metric="energy"``, one group per layer.
        kv_heads: KV heads of the layer.
    """

    def __init__(self, basis: ChannelBasis, kv_heads: int) -> None:
        self.graded = GradedBasis(basis, kv_heads)
        self._deviations: dict[torch.device, Tensor] = {}
        self._decoders: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    @property
    def deviations(self) -> Tensor:
        """``(features,)`` float32, of the coefficients over calibration, falling."""
        return self.graded.basis.deviations

    def coefficients(self, x: Tensor) -> Tensor:
        """``(kv_heads, tokens, head_dim)`` as float32 ``(tokens, features)``."""
        if x.device not in self._deviations:
            self._deviations[x.device] = self.deviations.to(x.device)
        return self.graded.latents(x) * self._deviations[x.device]

    def rebuild(self, coefficients: Tensor, kept: tuple[int, ...]) -> Tensor:
        """``(tokens, kept)`` coefficients of the channels ``kept`` as ``(kv_heads, tokens, head_dim)`` float32."""
        device = coefficients.device
        if (device, kept) not in self._decoders:
            rows = self.graded.basis.directions[0, torch.tensor(kept, dtype=torch.long)]
            self._decoders[device, kept] = rows.to(device, torch.float32)
        return self.graded.spread(coefficients @ self._decoders[device, kept] + self.graded.mean(device))


# ---- the stored block ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvtcBlock(CodedBlock):
    """Keys or values of one layer.

    Attributes:
        codes: uint8 ``(tokens, row_bytes)``, the groups side by side.
        steps: float16 ``(tokens, coded groups)``.
        minima: float16 ``(tokens, coded groups)``.
        gain: a power of two that was taken off, so that steps and minima fit float16.
        layout: groups and widths.
        basis: the model's, shared by all blocks of this layer and kind.
    """

    codes: Tensor
    steps: Tensor
    minima: Tensor
    gain: float
    layout: KvtcLayout
    basis: PcaBasis

    @property
    def tokens(self) -> int:
        return int(self.codes.shape[0])

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        codes, steps, minima = (kept[start:stop] for kept in (self.codes, self.steps, self.minima))
        parts = [codes.new_zeros(codes.shape[0], 0, dtype=torch.float32)]
        for at, group in enumerate(self.layout.coded):
            stored = IntegerCodes(codes[:, group.place], steps[:, at], minima[:, at], group.bits, group.size, self.gain)
            parts.append(integer.decode(stored))
        return self.basis.rebuild(torch.cat(parts, dim=1), self.layout.kept)

    def crop(self, tokens: int) -> Self:
        codes, steps, minima = (kept[:tokens].clone() for kept in (self.codes, self.steps, self.minima))
        return dataclasses.replace(self, codes=codes, steps=steps, minima=minima)

    def deflated_code_bytes(self) -> int:
        """Bytes of the codes alone after zlib, byte places in turn so that like codes lie together."""
        return len(zlib.compress(self.codes.T.contiguous().cpu().numpy().tobytes(), 9)) if self.codes.numel() else 0


def encode(x: Tensor, basis: PcaBasis, layout: KvtcLayout) -> KvtcBlock:
    """Code ``x`` ``(kv_heads, tokens, head_dim)``, float32 and finite."""
    coefficients = basis.coefficients(x)
    coded = layout.coded
    tokens, device = coefficients.shape[0], x.device
    codes = torch.empty(tokens, layout.row_bytes, dtype=torch.uint8, device=device)
    steps = torch.empty(tokens, len(coded), dtype=torch.float16, device=device)
    minima = torch.empty_like(steps)
    gain = power_of_two_gain(coefficients)
    for at, group in enumerate(coded):
        stored = integer.encode(coefficients[:, group.start : group.stop], group.bits, gain=gain)
        codes[:, group.place], steps[:, at], minima[:, at] = stored.codes, stored.steps, stored.minima
    return KvtcBlock(codes, steps, minima, gain, layout, basis)
