"""The rotary embedding as a value: it is transformers' own rotation, and it undoes itself."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvslim.attending.families import rope_of
from kvslim.types import KVShape, Rope


def test_rotate_is_the_models_rotation(make_tiny: Callable[..., PreTrainedModel]) -> None:
    model = make_tiny(head_dim=32)
    keys = torch.randn(1, 2, 50, 32)
    positions = torch.arange(7, 57)[None]
    cos, sin = model.model.rotary_emb(keys, positions)
    expected = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
    assert torch.allclose(rope_of(model).rotate(keys, positions), expected, atol=1e-5)


@pytest.mark.parametrize("start", [0, 100, 130_000])
@pytest.mark.parametrize("rotary_dim", [64, 16])
def test_inverse_undoes_the_rotation(start: int, rotary_dim: int) -> None:
    rope = Rope(1e4 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2)), rotary_dim)
    keys, positions = torch.randn(3, 40, 64), torch.arange(start, start + 40)
    back = rope.rotate(rope.rotate(keys, positions, inverse=True), positions)
    assert torch.allclose(back, keys, atol=2e-6)
    assert torch.equal(rope.rotate(keys, positions)[..., rotary_dim:], keys[..., rotary_dim:])


def test_dense_bytes_by_hand() -> None:
    assert KVShape(layers=30, kv_heads=3, head_dim=64).dense_bytes(2048) == 30 * 2 * 3 * 64 * 2048 * 2
