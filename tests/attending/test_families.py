"""The family table must describe the models as they are: checked against the models' own caches."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from kvslim.attending.families import (
    attention_modules,
    attention_scaling_of,
    family_of,
    kv_shape_of,
    rope_of,
    sliding_window_of,
)
from kvslim.errors import UnsupportedModelError

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]


def build(config_class: type, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**{**SMALL, **changes})).eval()


@pytest.mark.parametrize("config_class", CONFIGS)
def test_row_rebuilds_the_models_own_cached_keys(config_class: type) -> None:
    model = build(config_class)
    family, rope, shape = family_of(model), rope_of(model), kv_shape_of(model)
    inputs = []
    handles = [
        getattr(module, family.key).register_forward_hook(lambda m, args, out: inputs.append(out))
        for module in attention_modules(model)
    ]
    ids = torch.arange(9)[None] + 3
    with torch.no_grad():
        cache = model(ids).past_key_values
    for handle in handles:
        handle.remove()
    assert len(inputs) == shape.layers
    for module, flat, layer in zip(attention_modules(model), inputs, cache.layers, strict=True):
        keys = flat.view(1, 9, shape.kv_heads, shape.head_dim)
        keys = module.k_norm(keys) if family.key_norm else keys
        rotated = rope.rotate(keys.transpose(1, 2), torch.arange(9))
        torch.testing.assert_close(rotated, layer.keys, atol=1e-5, rtol=1e-5)


def test_head_dim_comes_from_the_config_not_from_hidden_size() -> None:
    assert kv_shape_of(LlamaConfig(**SMALL)).head_dim == 12


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*llama, mistral, qwen2, qwen3"):
        family_of(GPT2Config())


def test_palu_refuses_cache_only_rows() -> None:
    family_of(Qwen2Config(**SMALL))
    with pytest.raises(UnsupportedModelError, match=r"qwen2.*Supported: llama, mistral"):
        family_of(Qwen2Config(**SMALL), palu=True)


def test_length_dependent_frequencies_are_refused() -> None:
    model = build(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        rope_of(model)


def test_yarn_scaling_is_reported_apart_from_the_rotation() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    assert attention_scaling_of(build(LlamaConfig, rope_parameters=yarn)) > 1.1
    assert attention_scaling_of(build(LlamaConfig)) == 1.0


def test_sliding_windows_per_layer() -> None:
    assert sliding_window_of(MistralConfig(**SMALL, sliding_window=8)) == [8, 8]
    assert sliding_window_of(LlamaConfig(**SMALL)) == [None, None]
