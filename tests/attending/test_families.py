"""The family table must describe the models as they are: checked against the models' own caches and generation."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvslim.attending.families import (
    attention_modules,
    attention_scaling_of,
    family_of,
    kv_shape_of,
    rope_of,
    sliding_window_of,
)
from kvslim.errors import UnsupportedModelError
from kvslim.jolt import JoltCache

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 128,
}  # fmt: skip
CONFIGS = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig]
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def build(config_class: type, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    hybrid = HYBRID if config_class is Gemma3TextConfig else {}
    return AutoModelForCausalLM.from_config(config_class(**{**SMALL, **hybrid, **changes})).eval()


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
    full = [window is None for window in sliding_window_of(model)]
    if config_class is Gemma3TextConfig:  # in the others a window of the default length holds the nine tokens
        assert full == [False, True]
    else:
        full = [True] * shape.layers
    for module, flat, layer, whole in zip(attention_modules(model), inputs, cache.layers, full, strict=True):
        if not whole:
            continue
        keys = flat.view(1, 9, shape.kv_heads, shape.head_dim)
        keys = module.k_norm(keys) if family.key_norm else keys
        rotated = rope.rotate(keys.transpose(1, 2), torch.arange(9))
        torch.testing.assert_close(rotated, layer.keys, atol=1e-5, rtol=1e-5)


def test_head_dim_comes_from_the_config_not_from_hidden_size() -> None:
    assert kv_shape_of(LlamaConfig(**SMALL)).head_dim == 12


def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"codegen.*bloom, gemma3_text, gpt2, gpt_neox, llama, mistral, mpt"
    ):
        family_of(CodeGenConfig())


def test_run_time_methods_refuse_rows_for_palu_only() -> None:
    family_of(GPT2Config())
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*Supported: gemma3_text, llama, mistral, qwen2, qwen3\."):
        family_of(GPT2Config(), run_time=True)
    with pytest.raises(UnsupportedModelError, match="Run-time methods do not support"):
        JoltCache(AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_layer=1, n_head=2)), ratio=2)


def test_length_dependent_frequencies_are_refused() -> None:
    model = build(LlamaConfig, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        rope_of(model)


def two_ropes(**types: dict[str, object]) -> torch.nn.Module:
    """A hybrid model with its own rotation per layer type: ``full`` and ``sliding``, plain unless given."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    return build(Gemma3TextConfig, rope_parameters={f"{t}_attention": types.get(t, plain) for t in ("full", "sliding")})


def test_only_the_rotation_of_full_layers_counts() -> None:
    model = build(Gemma3TextConfig)
    assert torch.equal(rope_of(model).inv_freq, model.model.rotary_emb.full_attention_inv_freq)
    assert not torch.allclose(rope_of(model).inv_freq, model.model.rotary_emb.sliding_attention_inv_freq)
    moving = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert torch.equal(rope_of(two_ropes(sliding=moving)).inv_freq, rope_of(two_ropes()).inv_freq)
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        rope_of(two_ropes(full=moving))
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    assert attention_scaling_of(two_ropes(full=yarn)) > 1.1
    assert attention_scaling_of(two_ropes(sliding=yarn)) == 1.0


def test_a_model_that_is_not_built_as_its_row_says() -> None:
    model = build(LlamaConfig)
    del model.model.rotary_emb
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*rotary embedding is not where"):
        rope_of(model)


def test_yarn_scaling_is_reported_apart_from_the_rotation() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    assert attention_scaling_of(build(LlamaConfig, rope_parameters=yarn)) > 1.1
    assert attention_scaling_of(build(LlamaConfig)) == 1.0


def test_sliding_windows_per_layer() -> None:
    assert sliding_window_of(MistralConfig(**SMALL, sliding_window=8)) == [8, 8]
    assert sliding_window_of(LlamaConfig(**SMALL)) == [None, None]


# ---- run-time caches on a family with sliding and full layers and a rotation for each -------------------------------


@pytest.fixture
def hybrid() -> torch.nn.Module:
    """Three sliding and two full layers; wide weights and an untied head, so that it does not repeat one token."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    changes = {"num_hidden_layers": 5, "layer_types": kinds, "sliding_window": 16, "initializer_range": 0.15}
    return build(Gemma3TextConfig, **changes, tie_word_embeddings=False, pad_token_id=0, eos_token_id=None)


def greedy(model: torch.nn.Module, ids: torch.Tensor, **options: object) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize("pre_rope", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}], ids=str
)
def test_hybrid_layers_generate_what_an_exact_cache_gives(
    hybrid: torch.nn.Module, pre_rope: bool, options: dict[str, int]
) -> None:
    ids = torch.randint(3, 64, (1, 50), generator=torch.Generator().manual_seed(0))
    cache = JoltCache(hybrid, budget_bytes=10**9, pre_rope=pre_rope)
    expected = greedy(hybrid, ids, **options)
    assert len(set(expected[0, 50:].tolist())) > 3  # no constant answer that any cache would give
    assert torch.equal(greedy(hybrid, ids, past_key_values=cache, **options), expected)
    assert cache.prefix is not None
    assert len(cache.compressible) == 2


def test_hybrid_batch_with_left_padding(hybrid: torch.nn.Module) -> None:
    ids = torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :15] = mask[2, :33] = 0
    ids[mask == 0] = 0
    expected = greedy(hybrid, ids, attention_mask=mask)
    for given in (mask, None):
        cache = JoltCache(hybrid, budget_bytes=10**9, attention_mask=given)
        assert torch.equal(greedy(hybrid, ids, attention_mask=mask, past_key_values=cache), expected)


@torch.no_grad()
def test_only_full_layers_of_a_hybrid_lose_anything(hybrid: torch.nn.Module) -> None:
    ids = torch.randint(3, 64, (1, 300), generator=torch.Generator().manual_seed(2))
    exact = hybrid(ids).past_key_values
    cache = JoltCache(hybrid, ratio=4)
    hybrid(ids, past_key_values=cache)
    cache.compress()
    for mine, theirs, window in zip(cache.layers, exact.layers, sliding_window_of(hybrid), strict=True):
        if window is not None:
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
        else:
            keys, values = mine.dense()
            for seen, dense in ((keys, theirs.keys), (values, theirs.values)):
                assert 0.01 < (seen - dense).norm() / dense.norm() < 0.9
    assert cache.report().ratio >= 4
