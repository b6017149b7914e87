"""Tensor parallelism for compressed models, through the plan that transformers shards a model by while loading it.

Every process keeps its share of the heads. Where there are several groups of KV heads, whole groups are dealt out with
their latents, so each process caches its part. A joint decomposition has one latent for all heads: every process
computes and caches all of it, and rebuilds or mixes its own heads from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed import tensor_parallel

from kvslim.attending.families import family_of
from kvslim.caching.latent import LatentLayout
from kvslim.caching.latent_graded import GradedLatentCodes
from kvslim.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvslim.attending.latent_attention import LatentAttention
    from kvslim.attending.low_rank import LowRankProjection

_HEADS, _ROWS, _COLUMNS = "kvslim_heads", "kvslim_rows", "kvslim_columns"


class _Sharded(tensor_parallel.TensorParallelLayer):  # type: ignore[misc,unused-ignore]
    """A parameter of a factored projection, split along one of its dimensions."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        whole = module._parameters.get(param)
        if whole is None:
            return
        part = distribute_tensor(whole, mesh, [Shard(self.dim)], src_data_rank=None)
        module._parameters[param] = torch.nn.Parameter(part, requires_grad=whole.requires_grad)


class _LocalHeads(tensor_parallel.TensorParallelLayer):  # type: ignore[misc,unused-ignore]
    """An attention module that is told which heads and groups are its own."""

    def install_forward(self, module: LatentAttention, mesh: Any) -> LatentAttention:
        size, rank = mesh.size(), mesh.get_local_rank()
        kv_heads = module.size.kv_heads
        if module.heads % size or kv_heads % size:
            raise ConfigError(
                f"{module.heads} query heads and {kv_heads} KV heads cannot be dealt to {size} processes. Use a "
                f"tensor-parallel size that divides both."
            )
        for projection in (module.k_latent, module.v_latent):
            projection.ranks = _local_ranks(projection.ranks, size, rank)
            projection.kv_heads = kv_heads // size
        module.heads //= size
        module.size = dataclasses.replace(module.size, heads=module.heads, kv_heads=kv_heads // size)
        module.layout = _local_layout(module.layout, size, rank)
        return module


def _local_ranks(ranks: Sequence[int], size: int, rank: int) -> tuple[int, ...]:
    """The ranks of the groups of one process.

    Raises:
        ConfigError: groups cannot be dealt out evenly.
    """
    groups = len(ranks)
    if groups == 1:
        return tuple(ranks)
    if groups % size or len(set(ranks)) > 1:
        why = f"{groups} groups" if groups % size else f"groups of the ranks {', '.join(map(str, ranks))}"
        raise ConfigError(
            f"{why} cannot be dealt evenly to {size} processes. Compress with ranks='uniform' and a group size that "
            f"gives a multiple of {size} groups, or jointly (group_size=None)."
        )
    share = groups // size
    return tuple(ranks[rank * share : (rank + 1) * share])


def _local_layout(layout: LatentLayout, size: int, rank: int) -> LatentLayout:
    shape = dataclasses.replace(layout.shape, kv_heads=layout.shape.kv_heads // size)
    codes = layout.codes
    if isinstance(codes, GradedLatentCodes) and max(map(len, codes.key_ranks)) > 1:
        raise ConfigError(
            "The groups of graded latents share one gain per token, so they cannot be dealt to several processes. "
            "Compress jointly (group_size=None), or with bits."
        )
    if codes is not None:
        key, value = (
            tuple(_local_ranks(ranks, size, rank) for ranks in layers)
            for layers in (codes.key_ranks, codes.value_ranks)
        )
        codes = dataclasses.replace(codes, key_ranks=key, value_ranks=value)
    return dataclasses.replace(layout, shape=shape, codes=codes)


def latent_plan(model: PreTrainedModel, attentions: Sequence[LatentAttention]) -> dict[str, str]:
    """The tensor-parallel plan of a compressed model: the original's, with the attention as it is now.

    Empty if the original has none for its attention: transformers then refuses tensor parallelism by itself.
    """
    family, own = family_of(model), dict(model.tp_plan or {})
    place = f"{model.base_model_prefix}.{family.layers}.*.{family.attention}"
    replaced = {f"{place}.{name}" for name in (family.query, family.key, family.value, family.output)}
    if not replaced & set(own):
        return {}
    _register_styles()
    plan = {name: style for name, style in own.items() if name not in replaced}
    plan |= {place: _HEADS, f"{place}.q_proj": "colwise", f"{place}.o_proj": "rowwise"}
    for name in ("k_latent", "v_latent"):
        factored: list[LowRankProjection] = [getattr(attention, name) for attention in attentions]
        joint = len(factored[0].ranks) == 1
        if not joint:
            plan[f"{place}.{name}.down"] = "colwise"
        if any(projection.up is not None for projection in factored):
            plan[f"{place}.{name}.up"] = _COLUMNS if joint else _ROWS
        if any(projection.bias is not None for projection in factored):
            plan[f"{place}.{name}.bias"] = _ROWS
    return plan


def _register_styles() -> None:
    styles: Any = tensor_parallel.ALL_PARALLEL_STYLES
    for name, style in ((_HEADS, _LocalHeads()), (_ROWS, _Sharded(0)), (_COLUMNS, _Sharded(1))):
        styles.register(name, style)
