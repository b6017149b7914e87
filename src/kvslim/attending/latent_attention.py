"""Attention over Palu latents: it caches ``h = x A`` and rebuilds keys and values when they are attended to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvslim.attending import compat
from kvslim.attending.families import Family, rope_from
from kvslim.caching.latent import LatentCache, LatentLayout
from kvslim.types import LowRankFactors


class LowRankProjection(nn.Module):
    """A key or value projection in factored form, one pair of factors per group of KV heads (Palu, Eq. 4).

    Args:
        in_features: what the projection reads.
        ranks: latent channels of each group.
        group_features: what each group puts out (``group size * head_dim``).
        bias: whether the original projection had one; it is added after reconstruction, so it is exact.
        dtype: of all parameters.
        device: of all parameters.
    """

    def __init__(
        self,
        in_features: int,
        ranks: Sequence[int],
        group_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        self.down = nn.Linear(in_features, sum(ranks), bias=False, dtype=dtype, device=device)
        self.up = nn.ParameterList(torch.empty(rank, group_features, dtype=dtype, device=device) for rank in ranks)
        self.bias = nn.Parameter(torch.empty(len(ranks) * group_features, dtype=dtype, device=device)) if bias else None

    @classmethod
    def from_factors(cls, original: nn.Linear, groups: Sequence[LowRankFactors]) -> LowRankProjection:
        """Replace ``original`` by the factors of its groups, in its dtype and on its device."""
        projection = cls(
            original.in_features,
            [group.rank for group in groups],
            int(groups[0].b.shape[1]),
            bias=original.bias is not None,
            dtype=original.weight.dtype,
            device=original.weight.device,
        )
        with torch.no_grad():
            projection.down.weight.copy_(torch.cat([group.a for group in groups], dim=1).T)
            for parameter, group in zip(projection.up, groups, strict=True):
                parameter.copy_(group.b)
            if projection.bias is not None and original.bias is not None:
                projection.bias.copy_(original.bias)
        return projection.requires_grad_(original.weight.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Latents ``(..., summed ranks)`` of inputs ``(..., in_features)``."""
        latents: Tensor = self.down(x)
        return latents

    def rebuild(self, latents: Tensor) -> Tensor:
        """Keys or values ``(..., all heads' features)`` from latents ``(..., summed ranks)``."""
        parts = torch.split(latents, list(self.ranks), dim=-1)
        full = torch.cat([part @ up for part, up in zip(parts, self.up, strict=True)], dim=-1)
        return full if self.bias is None else full + self.bias

    def extra_repr(self) -> str:
        """The ranks, for ``print(model)``."""
        return f"ranks={list(self.ranks)}"


class LatentAttention(nn.Module):
    """Takes the place of a decoder layer's attention module and keeps its query and output projections.

    The forward pass follows Palu, Sec. 3.1.2: latents of the new tokens go to the cache before rotation; the keys of
    all visible tokens are rebuilt and rotated at their own positions; then the model's chosen attention function runs
    as usual, so every implementation and mask works.

    Args:
        original: the attention module that is replaced.
        family: its row of the family table.
        rotary: the model's rotary embedding, read live so that dtype changes reach both queries and keys.
        key: the factored key projection.
        value: the factored value projection.
        layout: what a new cache needs to know.
    """

    def __init__(
        self,
        original: nn.Module,
        family: Family,
        rotary: nn.Module,
        key: LowRankProjection,
        value: LowRankProjection,
        layout: LatentLayout,
    ) -> None:
        super().__init__()
        source: Any = original
        self.config = source.config
        self.layer_idx: int = source.layer_idx
        self.head_dim = layout.shape.head_dim
        self.num_key_value_groups: int = source.num_key_value_groups
        self.scaling: float = source.scaling
        self.attention_dropout: float = source.attention_dropout
        self.is_causal = True
        self.q_proj: nn.Module = getattr(original, family.query)
        self.o_proj: nn.Module = getattr(original, family.output)
        self.k_latent = key
        self.v_latent = value
        self.layout = layout
        self._eager = compat.eager_attention_of(original)
        self._rotary = (rotary,)  # in a tuple, so that it is not registered a second time
        self.train(original.training)
        compat.record_attentions(self)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, as the module it replaces.

        Args:
            hidden_states: ``(batch, n, hidden)``.
            position_embeddings: cosine and sine for the new tokens, ``(batch or 1, n, rotary_dim)``.
            attention_mask: as the attention function wants it.
            **kwargs: the cache under either of its names, ``position_ids``, and what the attention function takes.

        Returns:
            The output ``(batch, n, hidden)``, and the attention weights if the function gives them.

        Raises:
            CacheStateError: the cache is of another kind or of another model.
        """
        cache = compat.take_cache(kwargs)
        cos, sin = position_embeddings
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        query = _rotate(self._heads(self.q_proj(hidden_states)), cos, sin)
        key_latents, value_latents = self.k_latent(hidden_states), self.v_latent(hidden_states)
        if cache is not None:
            latent_cache = LatentCache.adopt(cache, self.layout)
            key_latents, value_latents, positions = latent_cache.append(
                key_latents, value_latents, self.layer_idx, kwargs.get("position_ids")
            )
            cos, sin = self._angles(positions, query.dtype)
        key = _rotate(self._heads(self.k_latent.rebuild(key_latents)), cos, sin)
        value = self._heads(self.v_latent.rebuild(value_latents))

        window = self.layout.windows[self.layer_idx]
        if window is not None:
            kwargs["sliding_window"] = window
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self._eager)
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _heads(self, flat: Tensor) -> Tensor:
        """``(batch, t, heads * head_dim)`` to ``(batch, heads, t, head_dim)``."""
        return flat.view(*flat.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``(batch, t, rotary_dim / 2)``, as the model itself makes them for its queries."""
        rotary: Any = self._rotary[0]
        cos, sin = rope_from(rotary).angles(positions)
        return (cos * rotary.attention_scaling).to(dtype), (sin * rotary.attention_scaling).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading features of ``(batch, heads, t, head_dim)`` by angles ``(batch, t, rotary_dim / 2)``."""
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)
