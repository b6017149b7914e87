"""The factored projection by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvslim.attending.latent_attention import LowRankProjection
from kvslim.decomposing.whitened import plain_svd


@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_different_ranks_rebuild_their_own_heads(bias: bool) -> None:
    torch.manual_seed(0)
    original = nn.Linear(20, 12, bias=bias)
    factors = [plain_svd(w).truncate(r) for w, r in zip(original.weight.detach().T.chunk(3, 1), (4, 1, 3), strict=True)]
    projection = LowRankProjection.from_factors(original, factors)
    x = torch.randn(2, 5, 20)
    latents = projection(x)
    assert latents.shape == (2, 5, 8)
    rebuilt = projection.rebuild(latents)
    full = original(x)
    torch.testing.assert_close(rebuilt[..., :4], full[..., :4], atol=1e-5, rtol=1e-5)
    for start, group in ((4, factors[1]), (8, factors[2])):
        wanted = x.double() @ group.a @ group.b
        wanted = wanted + original.bias[start : start + 4] if bias else wanted
        torch.testing.assert_close(rebuilt[..., start : start + 4].double(), wanted, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(rebuilt[..., start : start + 4], full[..., start : start + 4], atol=1e-3)


def test_dtype_and_training_flag_follow_the_original() -> None:
    original = nn.Linear(8, 4, dtype=torch.bfloat16).requires_grad_(False)
    projection = LowRankProjection.from_factors(original, [plain_svd(original.weight.T).truncate(2)])
    assert {p.dtype for p in projection.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in projection.parameters())
    assert "ranks=[2]" in repr(projection)


def test_state_round_trips_through_a_projection_made_by_shape() -> None:
    original = nn.Linear(8, 4)
    projection = LowRankProjection.from_factors(original, [plain_svd(original.weight.detach().T).truncate(2)])
    other = LowRankProjection(8, [2], 4, bias=True, dtype=torch.float32, device=torch.device("cpu"))
    other.load_state_dict(projection.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(other.rebuild(other(x)), projection.rebuild(projection(x)))
