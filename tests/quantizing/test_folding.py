"""The rotation folded into the factors: the product stays, the channels even out."""

from __future__ import annotations

import pytest
import torch

from kvslim.quantizing.folding import latent_rotation, rotated_factors
from kvslim.types import LowRankFactors


@pytest.mark.parametrize("rank", range(1, 66))
def test_the_product_is_unchanged_at_any_rank(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((80, rank), (rank, 96)))
    turned = rotated_factors(LowRankFactors(a, b))
    torch.testing.assert_close(turned.a @ turned.b, a @ b, rtol=0, atol=1e-12)
    matrix = latent_rotation(rank)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rank", [32, 45, 64, 96, 127])
def test_an_outlier_channel_is_spread(rank: int) -> None:
    a = torch.randn(500, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a[:, 0] *= 30
    turned = rotated_factors(LowRankFactors(a, torch.eye(rank, dtype=torch.float64))).a
    assert turned.square().mean(0).max() < 0.1 * a.square().mean(0).max()
    torch.testing.assert_close(turned.norm(dim=1), a.norm(dim=1))
