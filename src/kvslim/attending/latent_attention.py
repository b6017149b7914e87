"""Attention over Palu latents: it caches ``h = x A`` and uses keys and values through their second factors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvslim.attending import compat
from kvslim.attending.families import Family, rope_from, scaling_from
from kvslim.attending.latent_forms import Forms, LayerSize
from kvslim.attending.low_rank import LowRankProjection, cut_groups, fold_into_output, fold_into_query, pad_groups
from kvslim.attending.projections import Projections
from kvslim.caching.latent import LatentCache, LatentLayout
from kvslim.errors import UnsupportedModelError
from kvslim.types import LowRankFactors

_ANY_WIDTH = ("eager", "sdpa", "kvslim")
"""Attention functions that take values of another width than queries and keys. For others all are padded to one."""


@dataclass(frozen=True)
class LayerPlace:
    """What one layer takes from the model around it.

    Attributes:
        family: the model's row in the family table.
        config: the model's configuration, read live.
        rotary: its rotary embedding, read live so that dtype changes reach both queries and keys; ``None`` without.
        rope_layers: the layer type under which ``rotary`` keeps this layer's rotation, if it keeps several.
        layout: what a new cache needs to know.
    """

    family: Family
    config: Any
    rotary: nn.Module | None
    rope_layers: str | None
    layout: LatentLayout


class LatentAttention(nn.Module):
    """Takes the place of a decoder layer's attention module and keeps its query and output projections.

    The forward pass follows Palu, Sec. 3.1: latents of the new tokens go to the cache before rotation. Rotated keys of
    all visible tokens are rebuilt and rotated at their own positions; unrotated keys are never rebuilt, the query
    reads their latents. Values are mixed as latents and rebuilt once per query. Then the model's chosen attention
    function runs as usual, so every implementation and mask works.

    A new instance has parameters without values: :meth:`fill` it, or load them.

    Args:
        original: the attention module that is replaced.
        place: what it takes from the model.
        projections: its weights; on the meta device for a model that is loaded.
        key_ranks: latent channels of each group of the keys.
        value_ranks: the same for the values.
        forms: how the second factors are used.
    """

    def __init__(
        self,
        original: nn.Module,
        place: LayerPlace,
        projections: Projections,
        key_ranks: Sequence[int],
        value_ranks: Sequence[int],
        forms: Forms,
    ) -> None:
        super().__init__()
        source: Any = original
        family, shape = place.family, place.layout.shape
        self.config = place.config
        self.layer_idx: int = source.layer_idx
        self.layout, self.forms = place.layout, forms
        self.heads, self.head_dim = int(place.config.num_attention_heads), shape.head_dim
        self.num_key_value_groups = self.heads // shape.kv_heads
        self.scaling = float(getattr(original, family.scaling))
        self.attention_dropout = _probability(source, family.dropout)
        self.output_dropout = _probability(source, family.output_dropout)
        self.clip: float | None = getattr(original, family.clip) if family.clip else None
        self.is_causal = True
        self.rope_layers = place.rope_layers
        self._residual, self._bias = family.residual, family.bias
        self._arguments = tuple(inspect.signature(type(original).forward).parameters)[1:]
        self._eager = biased_attention if family.bias else compat.eager_attention_of(original)
        self._rotary = (place.rotary,)  # in a tuple, so that it is not registered a second time

        weight, bias = projections.key.parameter, projections.value.bias is not None
        common: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        hidden = _inputs(projections.key.module)
        factored = (hidden, shape.kv_heads, shape.head_dim)
        self.size = LayerSize(hidden, self.heads, shape.kv_heads, shape.head_dim)
        self.k_latent = _factored(*factored, key_ranks, bias and forms.key == "rebuild", forms.key, common)
        self.v_latent = _factored(*factored, value_ranks, bias and forms.value != "fold", forms.value, common)
        self.q_proj = self._query_module(projections, common)
        self.o_proj = self._output_module(projections, common)
        self.q_norm: nn.Module | None = getattr(original, family.query_norm) if family.query_norm else None
        self.k_norm: nn.Module | None = getattr(original, family.key_norm) if family.key_norm else None
        self.train(original.training)
        compat.record_attentions(self)

    def _query_module(self, projections: Projections, common: dict[str, Any]) -> nn.Module:
        """The original query projection, or a new one where it is fused with others or takes in the key factor."""
        part = projections.query
        if self.forms.key != "fold" and part.rows is None:
            return part.module
        repeats = self.num_key_value_groups
        wide = self.heads * self.head_dim if self.forms.key != "fold" else sum(self.k_latent.head_ranks) * repeats
        return nn.Linear(self.size.hidden, wide, bias=part.bias is not None, **common)

    def _output_module(self, projections: Projections, common: dict[str, Any]) -> nn.Module:
        """The original output projection, or a new one that takes in the value factor."""
        if self.forms.value != "fold":
            return projections.output
        bias = getattr(projections.output, "bias", None) is not None or projections.value.bias is not None
        wide = sum(self.v_latent.head_ranks) * self.num_key_value_groups
        return nn.Linear(wide, _outputs(projections.output), bias=bias, **common)

    @torch.no_grad()
    def fill(
        self, projections: Projections, key: Sequence[LowRankFactors], value: Sequence[LowRankFactors]
    ) -> LatentAttention:
        """Take over the original's weights and the factors of each group; returns the module itself."""
        self.k_latent.fill(key, projections.key.bias)
        self.v_latent.fill(value, projections.value.bias)
        if self.forms.key == "fold":
            _set_linear(
                self.q_proj,
                *fold_into_query(projections.query.weight, projections.query.bias, self._per_query_head(key)),
            )
        elif projections.query.rows is not None:
            _set_linear(self.q_proj, projections.query.weight, projections.query.bias)
        if self.forms.value == "fold":
            output: Any = projections.output
            _set_linear(
                self.o_proj,
                *fold_into_output(
                    _in_out(output), output.bias, self._per_query_head(value), self._value_bias(projections)
                ),
            )
        trainable = projections.key.parameter.requires_grad
        for parameter in self.parameters():
            parameter.requires_grad_(trainable)
        return self

    def _per_query_head(self, factors: Sequence[LowRankFactors]) -> list[Tensor]:
        """Each query head's second factor, ``(rank, head_dim)``."""
        heads = [head for group in factors for head in group.b.split(self.head_dim, dim=1)]
        return [head for head in heads for _ in range(self.num_key_value_groups)]

    def _value_bias(self, projections: Projections) -> Tensor | None:
        bias = projections.value.bias
        if bias is None:
            return None
        return bias.view(-1, self.head_dim).repeat_interleave(self.num_key_value_groups, dim=0).flatten()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend, as the module it replaces and with its arguments, by position or name.

        Of these it knows the hidden states ``(batch, n, hidden)``, ``position_embeddings`` (cosine and sine of the new
        tokens, ``(batch or 1, n, rotary_dim)``), ``attention_mask`` (as the attention function wants it), the cache
        under any of its names, ``position_ids``, and its family's bias and residual. The rest goes to the attention
        function.

        Returns:
            The output ``(batch, n, hidden)``, and the attention weights if the function gives them.

        Raises:
            CacheStateError: the cache is of another kind or of another model.
        """
        given = compat.named_arguments(self._arguments, args, kwargs)
        hidden: Tensor = given.pop("hidden_states")
        cache, mask = compat.take_cache(given), given.pop("attention_mask", None)
        angles = given.pop("position_embeddings", None)
        bias = given.pop(self._bias, None) if self._bias else None
        residual = given.pop(self._residual, None) if self._residual else None

        keys, values = self.k_latent(hidden), self.v_latent(hidden)
        cos_sin = None if angles is None else tuple(part[..., : part.shape[-1] // 2] for part in angles)
        query = self._query(hidden, cos_sin)
        if cache is not None:
            latent_cache = LatentCache.adopt(cache, self.layout)
            keys, values, positions = latent_cache.append(keys, values, self.layer_idx, given.get("position_ids"))
            cos_sin = None if positions is None else self._angles(positions, query.dtype)
        mix = self.forms.value != "rebuild" and self._mixing_is_cheaper(hidden.shape[1])
        key = self._key(keys, cos_sin)
        value = self.v_latent.by_head(values) if mix else self._heads(self._clipped(self.v_latent.rebuild(values)))
        output, weights = self._attend(query, key, value, mask, bias, given)
        return self._output(output, mix, residual), weights

    def _query(self, hidden: Tensor, cos_sin: Any) -> Tensor:
        """``(batch, heads, n, head_dim)``, or of the width of the latents that it scores against."""
        flat = self.q_proj(hidden)
        if self.forms.key == "fold":
            ranks = [rank for rank in self.k_latent.head_ranks for _ in range(self.num_key_value_groups)]
            return pad_groups(flat, ranks).transpose(1, 2)
        query = self._heads(self._clipped(flat))
        if self.q_norm is not None:
            query = self.q_norm(query)
        if cos_sin is not None:
            query = _rotate(query, *cos_sin)
        return self.k_latent.absorb(query) if self.forms.key == "apply" else query

    def _key(self, latents: Tensor, cos_sin: Any) -> Tensor:
        """``(batch, kv_heads, t, head_dim)`` rebuilt and rotated, or the latents that the query scores against."""
        return self._rebuilt_key(latents, cos_sin) if self.forms.key == "rebuild" else self.k_latent.by_head(latents)

    def _rebuilt_key(self, latents: Tensor, cos_sin: Any) -> Tensor:
        key = self._heads(self._clipped(self.k_latent.rebuild(latents)))
        if self.k_norm is not None:
            key = self.k_norm(key)
        return key if cos_sin is None else _rotate(key, *cos_sin)

    def _mixing_is_cheaper(self, queries: int) -> bool:
        """Whether to mix latents and rebuild per query, or, for many queries, to rebuild per token: by products."""
        if self.forms.value == "fold":
            return True
        size, width, ranks = self.size, self.v_latent.width, self.v_latent.ranks
        rebuilding = sum(ranks) * size.kv_heads * size.head_dim // len(ranks)
        return queries * size.heads * (width - size.head_dim) <= rebuilding

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Run the attention function: ``(batch, n, heads, width of value)`` and the weights, if it gives them."""
        width, name = value.shape[-1], self.config._attn_implementation
        window = self.layout.windows[self.layer_idx]
        if window is not None:
            given["sliding_window"] = window
        if bias is not None:
            given["bias"] = bias
        attend = self._eager if bias is not None else ALL_ATTENTION_FUNCTIONS.get_interface(name, self._eager)
        if name not in _ANY_WIDTH and width != key.shape[-1]:
            common = max(width, key.shape[-1])
            query, key, value = (nn.functional.pad(x, (0, common - x.shape[-1])) for x in (query, key, value))
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **given)
        return output[..., :width], weights

    def _output(self, mixed: Tensor, mix: bool, residual: Tensor | None) -> Tensor:
        """From what attention gives, ``(batch, n, heads, width)``, to what the layer adds: ``(batch, n, hidden)``."""
        if mix and self.forms.value == "apply":
            mixed = self.v_latent.apply_up(mixed)
        if self.forms.value == "fold":
            ranks = [rank for rank in self.v_latent.head_ranks for _ in range(self.num_key_value_groups)]
            flat = cut_groups(mixed, ranks)
        else:
            flat = mixed.flatten(2)
        projected: Tensor = self.o_proj(flat.contiguous())
        output: Tensor = nn.functional.dropout(projected, self.output_dropout, self.training)
        return output if residual is None else residual + output

    def _heads(self, flat: Tensor) -> Tensor:
        """``(batch, t, heads * head_dim)`` to ``(batch, heads, t, head_dim)``."""
        heads: Tensor = flat.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads

    def _clipped(self, flat: Tensor) -> Tensor:
        return flat if self.clip is None else flat.clamp(-self.clip, self.clip)

    def dense(self, keys: Tensor, values: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values as they would be without fusion, to compare them with the uncompressed ones.

        Args:
            keys: latents ``(batch, t, summed ranks)``.
            values: the same of the values.
            positions: ``(batch, t)``, or ``None`` for a model that does not rotate its keys.

        Returns:
            ``(batch, kv_heads, t, head_dim)`` each. A key bias that fusion drops is not in it.

        Raises:
            UnsupportedModelError: a second factor is folded away.
        """
        if "fold" in (self.forms.key, self.forms.value):
            raise UnsupportedModelError(
                "The key or value factor is folded into another weight, so keys and values cannot be rebuilt. Compress "
                "with fusion='apply'."
            )
        cos_sin = None if positions is None else self._angles(positions, keys.dtype)
        value = self._heads(self._clipped(self.v_latent.rebuild(values)))
        return self._rebuilt_key(keys, cos_sin), value

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``(batch, t, rotary_dim / 2)``, as the model itself makes them for its queries."""
        rotary: Any = self._rotary[0]
        cos, sin = rope_from(rotary, self.rope_layers).angles(positions)
        scaling = scaling_from(rotary, self.rope_layers)
        return (cos * scaling).to(dtype), (sin * scaling).to(dtype)


def biased_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention with a bias on the scores (ALiBi), for families whose models bring no function for it.

    Args:
        module: for its training flag.
        query: ``(batch, heads, n, width)``.
        key: ``(batch, heads, t, width)``.
        value: ``(batch, heads, t, any width)``.
        mask: added to the scores, or boolean where true hides a key: ``(batch, 1, n, t)``.
        bias: per batch row and head (or per head) one number for each key; the last ``t`` of them count.
        scaling: factor on the scores.
        dropout: probability that a weight is dropped while training.

    Returns:
        ``(batch, n, heads, width of value)`` and the weights ``(batch, heads, n, t)``.
    """
    length, heads = key.shape[2], query.shape[1]
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores + bias.reshape(-1, heads, 1, bias.shape[-1])[..., -length:]
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.float().softmax(-1).to(value.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def _factored(
    hidden: int, kv_heads: int, head_dim: int, ranks: Sequence[int], bias: bool, form: str, common: dict[str, Any]
) -> LowRankProjection:
    return LowRankProjection(hidden, ranks, kv_heads, head_dim, bias=bias, up=form != "fold", **common)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading features of ``(batch, heads, t, head_dim)`` by angles ``(batch, t, rotary_dim / 2)``."""
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)


def _probability(module: Any, name: str | None) -> float:
    """A dropout that a module keeps as a number or as a module."""
    if name is None:
        return 0.0
    kept = getattr(module, name)
    return float(getattr(kept, "p", kept))


def _in_out(module: Any) -> Tensor:
    """The weight of a linear layer as ``(in_features, out_features)``."""
    weight: Tensor = module.weight.detach()
    return weight.T if isinstance(module, nn.Linear) else weight


def _inputs(module: Any) -> int:
    return int(_in_out(module).shape[0])


def _outputs(module: Any) -> int:
    return int(_in_out(module).shape[1])


def _set_linear(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a new linear layer its values; ``weight`` is ``(in_features, out_features)``."""
    linear: Any = module
    linear.weight.copy_(weight.T)
    if bias is not None:
        linear.bias.copy_(bias)
