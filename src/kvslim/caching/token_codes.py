"""The storage form of the plain codecs: every token of every head coded on its own, one block per layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from kvslim.quantizing import integer, rotated
from kvslim.quantizing.integer import IntegerCodes
from kvslim.quantizing.rotated import RotatedCodes


@dataclass(frozen=True)
class IntegerBlock:
    """Asymmetric integer codes of one layer: rows are ``(kv_heads, tokens)``."""

    stored: IntegerCodes

    @property
    def tokens(self) -> int:
        return int(self.stored.codes.shape[1])

    def decode(self, layer: int) -> Tensor:
        return integer.decode(self.stored)

    def crop(self, tokens: int) -> Self:
        part = dataclasses.replace(
            self.stored,
            codes=self.stored.codes[:, :tokens].clone(),
            steps=self.stored.steps[:, :tokens].clone(),
            minima=self.stored.minima[:, :tokens].clone(),
        )
        return dataclasses.replace(self, stored=part)


@dataclass(frozen=True)
class RotatedBlock:
    """Rotated codes of one layer: rows are ``(kv_heads, tokens)``."""

    stored: RotatedCodes

    @property
    def tokens(self) -> int:
        return int(self.stored.codes.shape[1])

    def decode(self, layer: int) -> Tensor:
        return rotated.decode(self.stored)

    def crop(self, tokens: int) -> Self:
        part = dataclasses.replace(
            self.stored,
            codes=self.stored.codes[:, :tokens].clone(),
            scales=self.stored.scales[:, :tokens].clone(),
        )
        return dataclasses.replace(self, stored=part)
