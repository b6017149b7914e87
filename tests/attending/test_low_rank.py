"""The factored projection by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kvslim.attending.low_rank import (
    LowRankProjection,
    cut_groups,
    fold_into_output,
    fold_into_query,
    pad_groups,
)
from kvslim.decomposing.whitened import plain_svd
from kvslim.types import LowRankFactors

RANKS = (4, 1, 3)


def factored(
    bias: bool, dtype: torch.dtype = torch.float64
) -> tuple[nn.Linear, LowRankProjection, list[LowRankFactors]]:
    """Six KV heads of two features in three groups."""
    dtype = torch.float64
    torch.manual_seed(0)
    original = nn.Linear(20, 12, bias=bias, dtype=dtype)
    weights = original.weight.detach().T.chunk(3, 1)
    factors = [plain_svd(weight).truncate(rank) for weight, rank in zip(weights, RANKS, strict=True)]
    projection = LowRankProjection(20, RANKS, 6, 2, bias=bias, dtype=dtype, device=torch.device("cpu"))
    projection.fill(factors, original.bias)
    return original, projection, factors


@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_different_ranks_rebuild_their_own_heads(bias: bool) -> None:
    original, projection, factors = factored(bias)
    x = torch.randn(2, 5, 20, dtype=torch.float64)
    latents = projection(x)
    assert latents.shape == (2, 5, 8)
    rebuilt = projection.rebuild(latents)
    torch.testing.assert_close(rebuilt[..., :4], original(x)[..., :4])
    for start, group in ((4, factors[1]), (8, factors[2])):
        wanted = x @ group.a @ group.b
        wanted = wanted + original.bias[start : start + 4] if bias else wanted
        torch.testing.assert_close(rebuilt[..., start : start + 4], wanted)
        assert not torch.allclose(rebuilt[..., start : start + 4], original(x)[..., start : start + 4], atol=1e-3)


def heads(flat: Tensor) -> Tensor:
    return flat.unflatten(-1, (6, 2)).transpose(1, 2)


@pytest.mark.parametrize("bias", [True, False])
def test_scores_and_mixtures_of_latents_are_those_of_keys_and_values(bias: bool) -> None:
    _, projection, _ = factored(bias)
    latents = projection(torch.randn(2, 5, 20, dtype=torch.float64))
    dense, query = heads(projection.rebuild(latents)), torch.randn(2, 12, 3, 2, dtype=torch.float64)
    by_head = projection.by_head(latents)
    assert by_head.shape == (2, 6, 5, 4)
    twice = dense.repeat_interleave(2, 1)
    scores = projection.absorb(query) @ by_head.repeat_interleave(2, 1).transpose(2, 3)
    # A bias of the keys adds one number to all scores of a query, which softmax does not see.
    torch.testing.assert_close(scores.softmax(-1), (query @ twice.transpose(2, 3)).softmax(-1))
    weights = scores.softmax(-1)
    mixed = (weights @ by_head.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(projection.apply_up(mixed), (weights @ twice).transpose(1, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_folding_is_the_same_function_with_one_matrix_less(bias: bool) -> None:
    original, projection, factors = factored(bias)
    second = [head for group in factors for head in group.b.split(2, dim=1) for _ in range(2)]
    query, output = (nn.Linear(a, b, bias=bias, dtype=torch.float64) for a, b in ((20, 24), (24, 20)))
    x = torch.randn(2, 5, 20, dtype=torch.float64)
    latents = projection(x).detach()
    ranks = [rank for rank in RANKS for _ in range(4)]

    weight, shift = fold_into_query(query.weight.T, query.bias, second)
    assert weight.shape == (20, sum(ranks))
    folded = pad_groups(x @ weight + (0 if shift is None else shift), ranks).transpose(1, 2)
    own = projection.absorb(query(x).unflatten(-1, (12, 2)).transpose(1, 2))
    torch.testing.assert_close(folded, own)

    value_bias = None if not bias else original.bias.view(6, 2).repeat_interleave(2, 0).flatten()
    weight, shift = fold_into_output(output.weight.T, output.bias, second, value_bias)
    mixed = torch.randn(2, 5, 5, dtype=torch.float64).softmax(-1) @ latents  # any weights that add up to one
    by_head = projection.by_head(mixed).repeat_interleave(2, 1).transpose(1, 2)
    wanted = output(projection.apply_up(by_head).flatten(2))
    torch.testing.assert_close(cut_groups(by_head, ranks) @ weight + (0 if shift is None else shift), wanted)


def test_one_group_for_all_heads_is_read_without_a_copy() -> None:
    projection = LowRankProjection(8, [3], 4, 2, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    latents = torch.randn(2, 5, 3)
    by_head = projection.by_head(latents)
    assert by_head.shape == (2, 4, 5, 3)
    assert by_head.data_ptr() == latents.data_ptr()


def test_padding_of_groups_is_undone() -> None:
    for ranks in ((3, 3), (4, 1, 3), (2,)):
        flat = torch.randn(2, 5, sum(ranks))
        padded = pad_groups(flat, ranks)
        assert padded.shape == (2, 5, len(ranks), max(ranks))
        assert torch.equal(cut_groups(padded, ranks), flat)


def test_a_folded_projection_keeps_no_second_factor() -> None:
    projection = LowRankProjection(8, [2], 2, 2, bias=False, up=False, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert [name for name, _ in projection.named_parameters()] == ["down.weight"]
    assert "ranks=[2]" in repr(projection)


def test_state_round_trips_through_a_projection_made_by_shape() -> None:
    _, projection, _ = factored(True)
    other = LowRankProjection(20, RANKS, 6, 2, bias=True, dtype=torch.float64, device=torch.device("cpu"))
    other.load_state_dict(projection.state_dict())
    x = torch.randn(1, 3, 20, dtype=torch.float64)
    assert torch.equal(other.rebuild(other(x)), projection.rebuild(projection(x)))
