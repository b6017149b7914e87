"""Palu on a tiny random model of every supported family: full rank changes nothing, every way to generate agrees."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvslim import palu
from kvslim.attending.families import attention_modules
from kvslim.caching.latent import LatentCache
from kvslim.calibrating.grams import calibrate_grams
from kvslim.calibrating.sequential import replace_in_turn
from kvslim.errors import ConfigError, UnsupportedModelError
from kvslim.palu import PaluConfig
from kvslim.palu_build import Builder

VOCAB = 128
GQA = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 12}  # fmt: skip
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
LONGCHAT = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama-gqa": (LlamaConfig, GQA),
    "llama-mha-bias": (LlamaConfig, GQA | {"num_key_value_heads": 4, "attention_bias": True}),
    "llama-mqa": (LlamaConfig, GQA | {"num_key_value_heads": 1}),
    "longchat": (LlamaConfig, GQA | LONGCHAT),
    "mistral": (MistralConfig, GQA | {"sliding_window": 6}),
    "qwen2": (Qwen2Config, GQA),
    "qwen2-sliding": (Qwen2Config, GQA | HYBRID | {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": (Qwen3Config, GQA),
    "gemma3": (Gemma3TextConfig, GQA | HYBRID | {"num_key_value_heads": 1, "query_pre_attn_scalar": 12}),
    "phi3": (Phi3Config, GQA | {"sliding_window": 6}),
    "phi3-partial": (Phi3Config, GQA | {"head_dim": 24, "hidden_size": 96, "partial_rotary_factor": 0.5}),
    "gpt-neox": (GPTNeoXConfig, {k: GQA[k] for k in list(GQA)[:4]} | {"rotary_pct": 0.5}),
    "opt": (OPTConfig, {"hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "word_embed_proj_dim": 48}),
    "gpt2": (GPT2Config, {"n_embd": 48, "n_layer": 2, "n_head": 4}),
    "gpt2-by-layer": (GPT2Config, {"n_embd": 48, "n_layer": 2, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}),
    "bloom": (BloomConfig, {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "bloom-odd-heads": (BloomConfig, {"hidden_size": 36, "n_layer": 2, "n_head": 3}),
    "mpt": (MptConfig, {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True}),
    "mpt-clip": (MptConfig, {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True,
                             "attn_config": {"clip_qkv": 0.5}}),
}  # fmt: skip
UNROTATED = ("opt", "gpt2", "bloom", "mpt")
WINDOWS = torch.randint(3, VOCAB, (4, 40), generator=torch.Generator().manual_seed(7))
IDS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(8))
PADDED = torch.ones_like(IDS)
PADDED[0, :8] = 0


def build(kind: str, **changes: Any) -> PreTrainedModel:
    config_class, settings = KINDS[kind]
    config = config_class(**{
        "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.15,
        **settings, **changes,
    })  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases are made as zeros, and would then not be tested
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def compressed(model: PreTrainedModel, **config: Any) -> PreTrainedModel:
    return palu.compress(copy.deepcopy(model), None, PaluConfig(**config), WINDOWS)


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def in_chunks(model: PreTrainedModel, sizes: list[int]) -> Tensor:
    """Logits of the padded batch fed in chunks through one cache."""
    cache, parts, start = None, [], 0
    takes_positions = model.config.model_type not in ("bloom", "mpt")
    for size in sizes:
        stop = start + size
        extra = {"position_ids": positions_of(PADDED)[:, start:stop]} if takes_positions else {}
        out = model(IDS[:, start:stop], attention_mask=PADDED[:, :stop], past_key_values=cache, use_cache=True, **extra)
        cache = getattr(out, "past_key_values", None) or out.cache
        parts.append(out.logits)
        start = stop
    return torch.cat(parts, dim=1)[PADDED.bool()]


def fusions(kind: str) -> list[str]:
    return ["auto", "none"] if kind == "mpt-clip" else ["auto", "fold", "apply", "none"]


CASES = [pytest.param(kind, fusion, id=f"{kind}-{fusion}") for kind in KINDS for fusion in fusions(kind)]


@pytest.mark.parametrize(("kind", "fusion"), CASES)
@pytest.mark.parametrize("group_size", [1, None])
def test_full_rank_gives_the_models_own_logits(kind: str, fusion: str, group_size: int | None) -> None:
    model = build(kind)
    slim = compressed(model, rate=0.0, fusion=fusion, group_size=group_size)
    own, ours = in_chunks(model, [9, 7, 1, 1, 3]), in_chunks(slim, [9, 7, 1, 1, 3])
    torch.testing.assert_close(ours, own, atol=1e-3, rtol=0)
    assert (own - own.roll(1, 0)).abs().max() > 0.1  # the tokens do differ
    if fusion == "fold":
        assert slim.palu.forms[0][1] != "rebuild"


@pytest.mark.parametrize(("kind", "fusion"), CASES)
def test_all_forms_and_chunks_are_one_function_below_full_rank(kind: str, fusion: str) -> None:
    settings = {"rate": 0.4, "group_size": 1, "ranks": "fisher"}
    wanted = in_chunks(compressed(build(kind), **settings, fusion="none"), [21])
    for sizes in ([21], [10, 1, 1, 9]):
        ours = in_chunks(compressed(build(kind), **settings, fusion=fusion), sizes)
        torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_sequential_calibration_sees_what_the_compressed_model_reads(kind: str) -> None:
    model = build(kind)
    exact = compressed(model, rate=0.0, sequential=True)
    torch.testing.assert_close(in_chunks(exact, [21]), in_chunks(model, [21]), atol=1e-3, rtol=0)

    usual = calibrate_grams(model, WINDOWS).grams
    twin, seen = copy.deepcopy(model), {}
    own = attention_modules(twin)
    config = PaluConfig(rate=0.5, ranks="uniform", decomposition="whitened", sequential=True)
    builder = Builder(twin, config, palu.plan(twin, config))

    def keep(layer: int, gram: Tensor) -> nn.Module:
        seen[layer] = gram
        return builder.attention(layer, (gram, (None, None)))

    replace_in_turn(twin, WINDOWS, keep)
    assert attention_modules(twin) == own
    torch.testing.assert_close(seen[0], usual[0], atol=1e-3, rtol=1e-4)

    slim = palu.compress(model, None, config, WINDOWS)
    read: list[Tensor] = []
    latent = attention_modules(slim)[1].k_latent
    handle = latent.register_forward_pre_hook(lambda _, args: read.append(args[0].flatten(0, -2).double()))
    with torch.no_grad():
        slim(WINDOWS, use_cache=False)
    handle.remove()
    torch.testing.assert_close(seen[1], read[0].T @ read[0], atol=1e-3, rtol=1e-3)
    assert (seen[1] - usual[1]).norm() > 1e-3 * usual[1].norm()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sequences": {"num_beams": 2, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_of_a_padded_batch(kind: str, way: str) -> None:
    model = build(kind)
    slim = compressed(model, rate=0.0)
    common = {"attention_mask": PADDED, "max_new_tokens": 12, "do_sample": False, **WAYS[way]}
    assert torch.equal(slim.generate(IDS, **common), model.generate(IDS, **common))


@pytest.mark.parametrize("kind", KINDS)
def test_assisted_generation_both_ways(kind: str) -> None:
    model = build(kind)
    common = {"attention_mask": torch.ones_like(IDS[:1]), "max_new_tokens": 12, "do_sample": False}
    own = model.generate(IDS[:1], **common)
    slim, draft = compressed(model, rate=0.0), compressed(model, rate=0.4)
    assert torch.equal(slim.generate(IDS[:1], assistant_model=draft, **common), own)
    assert torch.equal(model.generate(IDS[:1], assistant_model=draft, **common), own)
    assert torch.equal(slim.generate(IDS[:1], prompt_lookup_num_tokens=3, **common), own)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_continued_by_copy_and_by_crop(kind: str) -> None:
    slim = compressed(build(kind), rate=0.4)
    prompt, mask = IDS[1:], torch.ones_like(IDS[1:])
    common = {"max_new_tokens": 8, "do_sample": False}
    wanted = slim.generate(prompt, attention_mask=mask, **common)
    cache = palu.new_cache(slim)
    sliding = any(window is not None for window in slim.palu_layout.windows)
    if sliding:
        cache.activate_past_recording()
    with torch.no_grad():
        slim(prompt[:, :15], past_key_values=cache, use_cache=True)
        twin = copy.deepcopy(cache)
        assert torch.equal(slim.generate(prompt, attention_mask=mask, past_key_values=twin, **common), wanted)
        slim(IDS[:1, 15:18], past_key_values=cache, use_cache=True)  # somebody else's tokens, taken back
    cache.crop(-3)
    assert cache.get_seq_length() == 15
    assert torch.equal(slim.generate(prompt, attention_mask=mask, past_key_values=cache, **common), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_gives_the_same_logits_bit_for_bit(kind: str, tmp_path: Path) -> None:
    for fusion in ("auto", "none"):
        slim = compressed(build(kind), rate=0.4, group_size=1, fusion=fusion)
        palu.save(slim, tmp_path / fusion)
        again = palu.load(tmp_path / fusion)
        assert type(again).__name__ == type(slim).__name__
        assert torch.equal(in_chunks(again, [12, 1, 8]), in_chunks(slim, [12, 1, 8]))
        assert again.palu == slim.palu


@pytest.mark.parametrize("kind", UNROTATED)
@pytest.mark.parametrize("fusion", ["fold", "apply", "auto"])
def test_unrotated_keys_are_never_rebuilt_and_need_no_positions(kind: str, fusion: str) -> None:
    slim = compressed(build(kind), rate=0.4, group_size=2, fusion=fusion)
    assert all(key in ("fold", "apply") for key, _ in slim.palu.forms)

    def refuse(_: Tensor) -> Tensor:
        raise AssertionError("a key was rebuilt")

    for module in slim.modules():
        if hasattr(module, "k_latent"):
            module.k_latent.rebuild = refuse
    out = slim.generate(IDS, attention_mask=PADDED, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache = getattr(out, "past_key_values", None) or out.cache
    assert isinstance(cache, LatentCache)
    assert cache.nbytes == 2 * 24 * slim.palu.plan.channels * 4


@pytest.mark.parametrize("kind", ["llama-gqa", "gpt2", "bloom", "phi3"])
def test_the_form_with_fewer_parameters_is_taken_and_the_count_is_true(kind: str) -> None:
    counts = {}
    for fusion in ("fold", "apply", "auto"):
        for size in (1, None):
            slim = compressed(build(kind), rate=0.3, group_size=size, ranks="uniform", fusion=fusion)
            attentions = [module for module in slim.modules() if hasattr(module, "k_latent")]
            held = [p for module in attentions for name, p in module.named_parameters() if p.ndim > 1]
            assert slim.palu.parameters == sum(p.numel() for p in held)
            counts[fusion, size] = slim.palu.parameters
    assert all(counts["auto", size] == min(counts["fold", size], counts["apply", size]) for size in (1, None))
    assert counts["fold", 1] < counts["apply", 1]
    assert counts["fold", None] > counts["apply", None]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(attention: str) -> None:
    for kind in ("llama-gqa", "gemma3", "opt", "gpt2", "gpt-neox"):
        slim = compressed(build(kind), rate=0.4)
        wanted = in_chunks(slim, [12, 1, 8])
        slim.set_attn_implementation(attention)
        torch.testing.assert_close(in_chunks(slim, [12, 1, 8]), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mpt", "opt"])
def test_weights_can_be_asked_for(kind: str) -> None:
    model = build(kind)
    slim = compressed(model, rate=0.0)
    for each in (model, slim):
        each.set_attn_implementation("eager")
    own, ours = model(IDS, output_attentions=True).attentions, slim(IDS, output_attentions=True).attentions
    assert len(own) == len(ours) == 2
    torch.testing.assert_close(ours[1], own[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "llama-gqa"])
def test_gradients_reach_the_factors(kind: str) -> None:
    slim = compressed(build(kind), rate=0.4, fusion="apply")
    slim(IDS, labels=IDS).loss.backward()
    for module in slim.modules():
        if hasattr(module, "k_latent"):
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.k_latent.parameters())
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.v_latent.parameters())


def test_what_is_attended_in_another_way_is_refused() -> None:
    for kind, change in (
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("gemma3", {"use_bidirectional_attention": True}),
    ):
        with pytest.raises(UnsupportedModelError, match=next(iter(change))):
            compressed(build(kind, **change))


def test_folding_what_is_clipped_is_refused_before_work() -> None:
    with pytest.raises(ConfigError, match="clips keys and values"):
        compressed(build("mpt-clip"), fusion="fold")


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "longrope", "factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
     "original_max_position_embeddings": 64},
])  # fmt: skip
def test_frequencies_that_move_are_refused_in_words(rope: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="changes its frequencies"):
        compressed(build("llama-gqa", rope_parameters=rope))
