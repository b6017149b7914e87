"""Rotations are orthogonal at every size and the same for the same seed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvslim.quantizing.rotation import hadamard_blocks, rotation


@given(size=st.integers(1, 260), seed=st.integers(0, 2**40))
def test_orthogonal(size: int, seed: int) -> None:
    matrix = rotation(size, seed).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-5)


@given(size=st.integers(1, 5000))
def test_blocks_add_up(size: int) -> None:
    blocks = hadamard_blocks(size)
    assert sum(blocks) == size
    assert all(block & (block - 1) == 0 for block in blocks)


def test_seed_decides() -> None:
    assert torch.equal(rotation(64, 5), rotation(64, 5))
    assert not torch.equal(rotation(64, 5), rotation(64, 6))


def test_signs_are_those_of_version_one() -> None:
    """Stored codes are decoded with this rotation, so it must never change: the first signs for seed 0."""
    signs = (rotation(16, 0)[:, 0] * 4).round().int().tolist()
    assert signs == [1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, 1, 1, 1]


def test_spreads_one_spike_evenly() -> None:
    spike = torch.zeros(64)
    spike[17] = 8.0
    assert torch.allclose((spike @ rotation(64, 0)).abs(), torch.ones(64), atol=1e-5)
