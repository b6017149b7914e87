"""The storage form of the plain codecs: every token of every head coded on its own, one block per layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kvslim.caching.block import CodedBlock, map_tensors
from kvslim.quantizing import integer, rotated
from kvslim.quantizing.integer import IntegerCodes
from kvslim.quantizing.rotated import RotatedCodes


@dataclass(frozen=True)
class IntegerBlock(CodedBlock):
    """Asymmetric integer codes of one layer: rows are ``(kv_heads, tokens)``."""

    stored: IntegerCodes

    @property
    def tokens(self) -> int:
        return int(self.stored.codes.shape[1])

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        return integer.decode(map_tensors(self.stored, lambda x: x[:, start:stop]))

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, stored=map_tensors(self.stored, lambda x: x[:, :tokens].clone()))


@dataclass(frozen=True)
class RotatedBlock(CodedBlock):
    """Rotated codes of one layer: rows are ``(kv_heads, tokens)``."""

    stored: RotatedCodes

    @property
    def tokens(self) -> int:
        return int(self.stored.codes.shape[1])

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        return rotated.decode(map_tensors(self.stored, lambda x: x[:, start:stop]))

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, stored=map_tensors(self.stored, lambda x: x[:, :tokens].clone()))
