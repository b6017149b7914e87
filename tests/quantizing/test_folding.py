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


@pytest.mark.parametrize("rank", [3, 45, 96, 180])
def test_falling_energies_come_out_even(rank: int) -> None:
    energies = torch.linspace(1, 0.01, rank, dtype=torch.float64)
    mixed = latent_rotation(rank).square().T @ energies  # mean energy of each channel after the rotation
    large = mixed[: 1 << (rank.bit_length() - 1)]
    assert large.max() < 1.1 * energies.mean()
    assert mixed.sum() == pytest.approx(float(energies.sum()))
