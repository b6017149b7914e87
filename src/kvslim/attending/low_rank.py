"""A key or value projection in factored form, and what attention does with its latents head by head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kvslim.types import LowRankFactors


class LowRankProjection(nn.Module):
    """A key or value projection in factored form, one pair of factors per group of KV heads (Palu, Eq. 4).

    Args:
        in_features: what the projection reads.
        ranks: latent channels of each group.
        kv_heads: KV heads of all groups together.
        head_dim: features per head.
        bias: whether a bias is added after reconstruction.
        up: keep the second factor, the groups' rows one below the other: ``(summed ranks, group features)``. Without
            it the latents are all that there is: it is folded into another weight.
        dtype: of all parameters.
        device: of all parameters.
    """

    def __init__(
        self,
        in_features: int,
        ranks: Sequence[int],
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        up: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        self.kv_heads, self.head_dim = kv_heads, head_dim
        features = kv_heads * head_dim // len(ranks)
        empty = torch.empty(sum(ranks), features, dtype=dtype, device=device)
        self.down = nn.Linear(in_features, sum(ranks), bias=False, dtype=dtype, device=device)
        self.up = nn.Parameter(empty) if up else None
        self.bias = nn.Parameter(torch.empty(kv_heads * head_dim, dtype=dtype, device=device)) if bias else None

    @torch.no_grad()
    def fill(self, factors: Sequence[LowRankFactors], bias: Tensor | None = None) -> None:
        """Take over the factors of each group and the original bias."""
        self.down.weight.copy_(torch.cat([group.a for group in factors], dim=1).T)
        if self.up is not None:
            self.up.copy_(torch.cat([group.b for group in factors], dim=0))
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    @property
    def width(self) -> int:
        """The largest rank: what latents of one head are padded to."""
        return max(self.ranks)

    @property
    def head_ranks(self) -> list[int]:
        """The rank that each KV head reads."""
        return [rank for rank in self.ranks for _ in range(self.kv_heads // len(self.ranks))]

    def forward(self, x: Tensor) -> Tensor:
        """Latents ``(..., summed ranks)`` of inputs ``(..., in_features)``."""
        latents: Tensor = self.down(x)
        return latents

    def rebuild(self, latents: Tensor) -> Tensor:
        """Keys or values ``(..., all heads' features)`` from latents ``(..., summed ranks)``."""
        parts = torch.split(latents, list(self.ranks), dim=-1)
        full = torch.cat([part @ up for part, up in zip(parts, self._ups(), strict=True)], dim=-1)
        return full if self.bias is None else full + _local(self.bias)

    def _ups(self) -> tuple[Tensor, ...]:
        """The second factor of each group, ``(rank, group features)``."""
        assert self.up is not None, "the second factor is folded into another weight"
        return torch.split(_local(self.up), list(self.ranks))

    def by_head(self, latents: Tensor) -> Tensor:
        """Latents ``(batch, t, summed ranks)`` as every KV head reads them: ``(batch, kv_heads, t, width)``.

        Heads of one group read the same latents; where groups differ in rank, zeros follow. One group for all heads is
        not copied.
        """
        groups = pad_groups(latents, self.ranks).transpose(1, 2)
        if groups.shape[1] == 1:
            return groups.expand(-1, self.kv_heads, -1, -1)
        return groups.repeat_interleave(self.kv_heads // groups.shape[1], dim=1)

    def up_by_head(self) -> Tensor:
        """The second factor of every KV head, ``(kv_heads, width, head_dim)``, zeros below the rank of its group."""
        heads = [
            nn.functional.pad(up.unflatten(1, (-1, self.head_dim)), (0, 0, 0, 0, 0, self.width - up.shape[0]))
            for up in self._ups()
        ]
        return (heads[0] if len(heads) == 1 else torch.cat(heads, dim=1)).transpose(0, 1)

    def absorb(self, query: Tensor) -> Tensor:
        """Queries that score against latents: ``q B_kᵀ`` (Palu, Eq. 6, at run time).

        Args:
            query: ``(batch, heads, n, head_dim)``; each KV head serves as many query heads in a row.

        Returns:
            ``(batch, heads, n, width)``.
        """
        grouped = query.unflatten(1, (self.kv_heads, -1))
        absorbed: Tensor = (grouped @ self.up_by_head().transpose(1, 2)[:, None]).flatten(1, 2)
        return absorbed

    def apply_up(self, mixed: Tensor) -> Tensor:
        """Values from mixtures of latents, ``(P H) B_v``, and the bias: the weights of attention add up to one.

        Args:
            mixed: ``(batch, n, heads, width)``.

        Returns:
            ``(batch, n, heads, head_dim)``.
        """
        grouped = mixed.unflatten(2, (self.kv_heads, -1))
        full: Tensor = grouped @ self.up_by_head()
        if self.bias is not None:
            full = full + _local(self.bias).view(self.kv_heads, 1, self.head_dim)
        values: Tensor = full.flatten(2, 3)
        return values

    def extra_repr(self) -> str:
        """The ranks, for ``print(model)``."""
        return f"ranks={list(self.ranks)}"


def _local(parameter: Tensor) -> Tensor:
    """This process's part of a parameter that tensor parallelism has sharded; any other as it is."""
    part: Tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return part


def pad_groups(flat: Tensor, ranks: Sequence[int]) -> Tensor:
    """``(..., summed ranks)`` as ``(..., groups, largest rank)``, zeros behind shorter groups."""
    width = max(ranks)
    if min(ranks) == width:
        groups: Tensor = flat.unflatten(-1, (len(ranks), width))
        return groups
    parts = torch.split(flat, list(ranks), dim=-1)
    return torch.stack([nn.functional.pad(part, (0, width - part.shape[-1])) for part in parts], dim=-2)


def cut_groups(padded: Tensor, ranks: Sequence[int]) -> Tensor:
    """Undo :func:`pad_groups`: ``(..., groups, largest rank)`` as ``(..., summed ranks)``."""
    if min(ranks) == padded.shape[-1]:
        return padded.flatten(-2)
    return torch.cat([padded[..., group, :rank] for group, rank in enumerate(ranks)], dim=-1)


def fold_into_query(weight: Tensor, bias: Tensor | None, key: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Fold each head's key factor into its query projection (Palu, Eq. 6): ``W_q B_kᵀ``.

    The key's own bias adds the same number to all scores of a query, so softmax makes nothing of it.

    Args:
        weight: ``(in_features, heads * head_dim)``.
        bias: ``(heads * head_dim,)`` or ``None``.
        key: per query head its ``B_k``, ``(rank, head_dim)``.

    Returns:
        ``(in_features, summed ranks of the heads)`` and the bias, float64.
    """
    heads = weight.double().chunk(len(key), dim=1)
    folded = torch.cat([head @ b.double().T for head, b in zip(heads, key, strict=True)], dim=1)
    if bias is None:
        return folded, None
    parts = bias.double().chunk(len(key))
    return folded, torch.cat([part @ b.double().T for part, b in zip(parts, key, strict=True)])


def fold_into_output(
    weight: Tensor, bias: Tensor | None, value: Sequence[Tensor], value_bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Fold each head's value factor into the output projection (Palu, Eq. 5): ``B_v W_o``.

    Args:
        weight: ``(heads * head_dim, out_features)``.
        bias: ``(out_features,)`` or ``None``.
        value: per query head its ``B_v``, ``(rank, head_dim)``.
        value_bias: per query head the bias of its value, ``(heads * head_dim,)``, or ``None``; as the weights of
            attention add up to one, it becomes part of the output's.

    Returns:
        ``(summed ranks of the heads, out_features)`` and the bias, float64.
    """
    weight = weight.double()
    heads = weight.chunk(len(value), dim=0)
    folded = torch.cat([b.double() @ head for b, head in zip(value, heads, strict=True)], dim=0)
    total = None if bias is None else bias.double()
    if value_bias is not None:
        moved = value_bias.double() @ weight
        total = moved if total is None else total + moved
    return folded, total
