"""xKV-like: adjacent layers share one token basis (Chang et al., "xKV: Cross-Layer SVD for KV-Cache Compression").

The keys or values of ``layers`` adjacent layers, all KV heads side by side, form one matrix ``(tokens, features)``. Its
truncated singular value decomposition is kept: a token factor ``(tokens, rank)`` that the layers share, and for each
layer the factor ``(rank, kv_heads · head_dim)`` that rebuilds it, all in float16. Keys are taken pre-RoPE by default.

The paper (2025) chooses ranks by hand, 1 : 1.5 for keys and values in its main setting. Here the ranks of a group
follow from a ratio: factors and exact tokens take at most the bf16 bytes of its keys and values over ``ratio``.

The first four tokens are kept exact by default and charged. Their keys and values are unlike all others, attention
reads them at every step, and a truncation that minimizes the error of all tokens together treats them badly.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from kvslim.baselines.base import BaselineCache
from kvslim.caching.block import Block, iter_tensors, map_tensors, storage_bytes
from kvslim.caching.cells import Cell
from kvslim.errors import BudgetError, ConfigError
from kvslim.quantizing.gain import power_of_two_gain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPLIT = 0.4
"""The keys' share of the ranks: 1 : 1.5, as in the paper."""
SINKS = 4
"""First tokens kept exact."""


@dataclass(frozen=True)
class SharedBasisBlock:
    """Keys or values of a layer group: ``X ≈ gain · tokens_by_rank · rank_by_features``.

    Attributes:
        basis: float16 ``(tokens, rank)``, shared by the layers.
        rebuild: float16 ``(layers, kv_heads, rank, head_dim)``.
        gain: a power of two that was taken off, so that the factors fit float16.
    """

    basis: Tensor
    rebuild: Tensor
    gain: float

    exact = False

    @property
    def tokens(self) -> int:
        return int(self.basis.shape[0])

    @property
    def rank(self) -> int:
        return int(self.basis.shape[1])

    @property
    def nbytes(self) -> int:
        return storage_bytes(iter_tensors(self))

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        return (self.basis[start:stop].to(torch.float32) @ self.rebuild[layer].to(torch.float32)) * self.gain

    def crop(self, tokens: int) -> Self:
        """Keep the first ``tokens`` tokens; the factors of the layers stay as they are, and so does the rank."""
        own = map_tensors(self, lambda kept: kept.clone())
        return dataclasses.replace(own, basis=self.basis[:tokens].clone())

    def scores(self, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``query · X̂ᵀ`` by way of the ranks; see :meth:`kvslim.caching.block.Block.scores`."""
        turned = query @ self.rebuild[layer].to(query).mT
        return (turned * self.gain) @ self.basis[start:stop].to(query).T

    def mix(self, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights · X̂`` by way of the ranks; see :meth:`kvslim.caching.block.Block.mix`."""
        mixed = weights @ self.basis[start:stop].to(weights)
        return (mixed * self.gain) @ self.rebuild[layer].to(weights)


def encode(x: Tensor, layers: int, rank: int) -> SharedBasisBlock:
    """Truncate ``x`` ``(layers · kv_heads, tokens, head_dim)``, float32 and finite, to ``rank``.

    The singular values are shared evenly by both factors, so that both are well inside float16.
    """
    gain = power_of_two_gain(x)
    slabs, tokens, features = x.shape
    matrix = (x / gain).transpose(0, 1).reshape(tokens, slabs * features).double()
    if tokens <= matrix.shape[1]:
        left, sizes = _leading(matrix @ matrix.T, rank)
        right = matrix.T @ left / sizes.clamp_min(torch.finfo(torch.float64).tiny)
    else:
        right, sizes = _leading(matrix.T @ matrix, rank)
        left = matrix @ right / sizes.clamp_min(torch.finfo(torch.float64).tiny)
    basis, rebuild = left * sizes.sqrt(), right * sizes.sqrt()
    per_slab = rebuild.to(torch.float16).T.reshape(rank, layers, slabs // layers, features).permute(1, 2, 0, 3)
    return SharedBasisBlock(basis.to(torch.float16).contiguous(), per_slab.contiguous(), gain)


def _leading(gram: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Leading eigenvectors ``(n, rank)`` of a Gram matrix, and the singular values ``(rank,)`` they belong to.

    Directions below the Gram matrix's rounding hold nothing: their size is zero.
    """
    energies, vectors = torch.linalg.eigh(gram)
    floor = energies[-1].clamp_min(0) * len(energies) * torch.finfo(gram.dtype).eps
    kept = torch.where(energies > floor, energies, 0.0)
    return vectors[:, -rank:].flip(1), kept[-rank:].flip(0).sqrt()


def ranks_for(
    tokens: int, features: int, ratio: float, split: float, exact: int = 0, item_bytes: int = 2
) -> tuple[int, int]:
    """Ranks of keys and of values of one layer group.

    Args:
        tokens: coded tokens.
        features: layers × KV heads × head dim.
        ratio: bf16 bytes of keys and values of all tokens over bytes of factors and exact tokens, at least.
        split: the keys' share of the ranks; what the one cannot use goes to the other.
        exact: tokens kept exact beside the coded ones.
        item_bytes: bytes of each of their numbers.

    Raises:
        BudgetError: the ratio does not leave rank 1 for each.
    """
    dense, kept, per_rank = 4 * (tokens + exact) * features, 2 * exact * features * item_bytes, 2 * (tokens + features)
    total, most = math.floor((dense / ratio - kept) / per_rank), min(tokens, features)
    if total < 2:
        raise BudgetError(
            f"{tokens + exact} tokens at {ratio:g}x, {exact} of them exact, leave no rank for both keys and values. "
            f"Use more tokens or a ratio of at most {dense / (2 * per_rank + kept):.2f}."
        )
    keys = min(max(1, round(total * split)), total - 1, most)
    values = min(total - keys, most)
    return min(total - values, most), values


class XkvCache(BaselineCache):
    """Cross-layer SVD at a ratio; see the module.

    Args:
        model: a transformers model of a supported family.
        ratio: bf16 bytes over measured bytes of the compressed prefix, exact tokens included; at least 1.
        layers: adjacent layers that share a token basis; the last group may have fewer. The paper has 4.
        split: the keys' share of the ranks, between 0 and 1.
        pre_rope: take keys before rotation, as the paper does.
        sinks, window: first and last tokens kept exact.
        seal: so many later tokens are coded together, on a basis of their own; None keeps them exact.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches.

    Raises:
        ConfigError: a setting is out of range.
        UnsupportedModelError: no row for this model, or with ``pre_rope`` its rotation changes with the length.
        BudgetError: when sealing, too few tokens for the ratio. A prompt that is too short stays exact and the report
            says so.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ratio: float,
        *,
        layers: int = 4,
        split: float = SPLIT,
        pre_rope: bool = True,
        sinks: int = SINKS,
        window: int = 0,
        seal: int | None = None,
        attention_mask: Tensor | None = None,
    ) -> None:
        if not ratio >= 1:
            raise ConfigError(f"ratio is at least 1, not {ratio}.")
        if layers < 1:
            raise ConfigError(f"layers is a number of adjacent layers ≥ 1, not {layers}.")
        if not 0 < split < 1:
            raise ConfigError(f"split is the keys' share of the ranks, between 0 and 1, not {split}.")
        super().__init__(
            model, sinks=sinks, window=window, seal=seal, pre_rope=pre_rope, attention_mask=attention_mask
        )  # fmt: skip
        self.ratio, self.layers_together, self.split = ratio, layers, split

    def _groups(self) -> list[tuple[int, ...]]:
        size, layers = self.layers_together, self.shape.layers
        return [tuple(range(first, min(first + size, layers))) for first in range(0, layers, size)]

    def _ranks(self, tokens: int, exact: int, layers: int) -> tuple[int, int]:
        features = layers * self.shape.kv_heads * self.shape.head_dim
        item_bytes = self.compressible[0].keys.element_size()
        return ranks_for(tokens, features, self.ratio, self.split, exact, item_bytes)

    def _why_exact(self, tokens: int) -> str | None:
        if why := super()._why_exact(tokens):
            return why
        exact = self.n_sinks + self.n_window
        try:
            for group in self._groups():
                self._ranks(tokens - exact, exact, len(group))
        except BudgetError as error:
            return str(error)
        return None

    def _plan(self, cells: list[Cell]) -> dict[Cell, Any]:
        return {
            cell: self._ranks(cell.span.tokens, cell.span.row_tokens - cell.span.tokens, len(cell.layers))[cell.kind]
            for cell in cells
        }

    def _block(self, x: Tensor, cell: Cell, plan: Any) -> tuple[Block, str]:
        return encode(x, len(cell.layers), plan), f"rank {plan}, shared by {len(cell.layers)} layers"
