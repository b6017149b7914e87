"""Palu end to end on tiny random models: a no-op at full rank, the same function cached and uncached below it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CodeGenConfig, DynamicCache, PreTrainedModel, StaticCache

from kvslim import palu
from kvslim.caching.latent import LatentCache
from kvslim.errors import CacheStateError, CalibrationError, ConfigError, NonFiniteError, UnsupportedModelError
from kvslim.palu import PaluConfig
from tiny import in_chunks, positions_of

WINDOWS = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(7))
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(8))
PADDED = torch.ones_like(IDS)
PADDED[0, :8] = 0
KINDS = [
    pytest.param({"family": "llama"}, id="llama"),
    pytest.param({"family": "mistral"}, id="mistral"),
    pytest.param({"family": "mistral", "sliding_window": 6}, id="sliding"),
]


def build(make_tiny: Any, kind: dict[str, Any]) -> PreTrainedModel:
    return make_tiny(**kind, kv_heads=4, heads=8)


def compressed(model: PreTrainedModel, **config: Any) -> PreTrainedModel:
    return palu.compress(copy.deepcopy(model), None, PaluConfig(**config), WINDOWS)


@torch.no_grad()
def at_once(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    return model(ids, attention_mask=mask, position_ids=positions_of(mask), use_cache=False).logits


# --- full rank is a no-op ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_size", [None, 1, 2])
@pytest.mark.parametrize("decomposition", ["whitened", "loss-aware", "svd"])
def test_full_rank_gives_the_models_own_logits(
    make_tiny: Any, kind: dict[str, Any], group_size: int | None, decomposition: str
) -> None:
    model = build(make_tiny, kind)
    slim = compressed(model, rate=0.0, group_size=group_size, decomposition=decomposition)
    assert slim.palu.rate == 0.0
    own, own_cache = in_chunks(model, IDS, PADDED, [9, 7, 1, 1, 3])
    ours, cache = in_chunks(slim, IDS, PADDED, [9, 7, 1, 1, 3])
    real = PADDED.bool()
    torch.testing.assert_close(ours[real], own[real], atol=1e-4, rtol=1e-4)
    assert isinstance(cache, LatentCache)
    assert cache.get_seq_length() == own_cache.get_seq_length() == 21


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{"do_sample": False}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_full_rank_generates_the_same_text(make_tiny: Any, kind: dict[str, Any], settings: dict[str, Any]) -> None:
    model = build(make_tiny, kind)
    slim = compressed(model, rate=0.0, group_size=2)
    common = {"attention_mask": PADDED, "max_new_tokens": 14, "do_sample": False, **settings}
    assert torch.equal(slim.generate(IDS, **common), model.generate(IDS, **common))


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 5}, {"prompt_lookup_num_tokens": 3}])
def test_other_ways_to_generate(make_tiny: Any, options: dict[str, Any]) -> None:
    model = build(make_tiny, {})
    slim = compressed(model, rate=0.0)
    prompt = torch.cat([IDS[:1], IDS[:1]], dim=1)
    common = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(slim.generate(prompt, **common, **options), model.generate(prompt, **common))


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressed_model_drafts_for_the_original(make_tiny: Any, kind: dict[str, Any]) -> None:
    model = build(make_tiny, kind)
    draft = compressed(model, rate=0.3)
    common = {"attention_mask": torch.ones_like(IDS[:1]), "max_new_tokens": 12, "do_sample": False}
    drafted = model.generate(IDS[:1], assistant_model=draft, **common)
    assert torch.equal(drafted, model.generate(IDS[:1], **common))


def test_biases_are_exact(tiny_llama: PreTrainedModel) -> None:
    for layer in tiny_llama.model.layers:
        for name in ("k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name)
            projection.bias = nn.Parameter(torch.randn(projection.out_features))
    slim = compressed(tiny_llama, rate=0.0, group_size=1)
    torch.testing.assert_close(slim(IDS).logits, tiny_llama(IDS).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
)  # fmt: skip
def test_rope_types(tiny_llama: PreTrainedModel, rope: dict[str, Any]) -> None:
    tiny_llama.config.rope_parameters = rope
    model = AutoModelForCausalLM.from_config(tiny_llama.config).eval()
    slim = compressed(model, rate=0.0)
    own, _ = in_chunks(model, IDS, PADDED, [12, 8, 1])
    ours, _ = in_chunks(slim, IDS, PADDED, [12, 8, 1])
    torch.testing.assert_close(ours[PADDED.bool()], own[PADDED.bool()], atol=1e-4, rtol=1e-4)


def test_casting_after_compression_keeps_queries_and_keys_on_one_rotation(tiny_llama: PreTrainedModel) -> None:
    # .to(bfloat16) rounds the rotary frequencies of transformers models; keys must follow.
    slim = compressed(tiny_llama, rate=0.0).to(torch.bfloat16)
    far = {"position_ids": torch.arange(3000, 3021)[None], "use_cache": True}
    with torch.no_grad():
        uncached = slim(IDS[:1], position_ids=far["position_ids"], use_cache=False).logits
        cached = slim(IDS[:1], **far).logits
    torch.testing.assert_close(cached, uncached, atol=1e-2, rtol=1e-2)


# --- below full rank --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sizes", [[21], [10, 1, 1, 9], [3, 9, 9]])
def test_cached_and_uncached_forward_agree(
    make_tiny: Any, kind: dict[str, Any], attention: str, sizes: list[int]
) -> None:
    slim = compressed(build(make_tiny, kind), rate=0.5, group_size=2, ranks="fisher")
    slim.set_attn_implementation(attention)
    cached, _ = in_chunks(slim, IDS, PADDED, sizes)
    uncached = at_once(slim, IDS, PADDED)
    torch.testing.assert_close(cached[PADDED.bool()], uncached[PADDED.bool()], atol=1e-4, rtol=1e-4)


def test_left_padding_does_not_change_a_row(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.5)
    batch, _ = in_chunks(slim, IDS, PADDED, [11, 9, 1])
    alone, _ = in_chunks(slim, IDS[:1, 8:], PADDED[:1, 8:], [3, 9, 1])
    torch.testing.assert_close(batch[:1, 8:], alone, atol=1e-4, rtol=1e-4)


def test_generation_follows_the_compressed_models_own_forward(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.5, group_size=1)
    out = slim.generate(
        IDS, attention_mask=PADDED, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    mask = torch.cat([PADDED, torch.ones(2, 8, dtype=torch.long)], dim=1)
    forced = at_once(slim, out.sequences, mask)[:, 20:-1]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), forced, atol=1e-4, rtol=1e-4)


def test_measured_bytes_are_latents_and_positions(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.5, group_size=2)
    out = slim.generate(IDS, attention_mask=PADDED, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    cache = getattr(out, "past_key_values", None) or out.cache
    tokens = 2 * (21 + 7)  # the last new token is never fed back
    assert slim.palu.plan.channels == 2 * 2 * 32
    assert cache.nbytes == tokens * (slim.palu.plan.channels * 4 + 4)
    report = cache.report()
    assert report.dense_nbytes == tokens * 2 * 2 * 64 * 2
    assert report.ratio == pytest.approx(report.dense_nbytes / cache.nbytes)
    assert "measured" in str(report)


def test_sliding_layers_hold_no_more_than_their_window(make_tiny: Any) -> None:
    slim = compressed(make_tiny("mistral", sliding_window=6), rate=0.0)
    _, cache = in_chunks(slim, IDS, PADDED, [15, 6])
    assert cache.get_seq_length() == 21
    assert cache.nbytes == 2 * 5 * (slim.palu.plan.channels * 4 + 4)


def test_whitening_keeps_more_of_the_outputs_than_plain_svd(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    inputs: list[Tensor] = []
    handle = model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda m, a: inputs.append(a[0]))
    with torch.no_grad():
        model(WINDOWS)
    handle.remove()
    own = model.model.layers[0].self_attn
    errors = {}
    for name in ("whitened", "svd"):
        attention = compressed(model, rate=0.5, decomposition=name).model.layers[0].self_attn
        pairs = ((attention.k_latent, own.k_proj), (attention.v_latent, own.v_proj))
        errors[name] = [float((new.rebuild(new(inputs[0])) - old(inputs[0])).detach().norm()) for new, old in pairs]
    assert errors["whitened"][0] < errors["svd"][0]
    assert errors["whitened"][1] < errors["svd"][1]


def test_attention_weights_can_still_be_asked_for(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    slim = compressed(model, rate=0.0)
    for each in (model, slim):
        each.set_attn_implementation("eager")
    own, ours = model(IDS, output_attentions=True).attentions, slim(IDS, output_attentions=True).attentions
    assert len(ours) == 2
    torch.testing.assert_close(ours[1], own[1], atol=1e-4, rtol=1e-4)


def test_training_without_a_cache_reaches_the_factors(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.3)
    slim(IDS, labels=IDS).loss.backward()
    attention = slim.model.layers[0].self_attn
    assert attention.k_latent.down.weight.grad.abs().sum() > 0
    assert attention.v_latent.up.grad.abs().sum() > 0


# --- ranks and reports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["uniform", "fisher", "fisher-rms", "spectral"])
@pytest.mark.parametrize("multiple", [1, 4])
def test_achieved_rate_is_the_requested_one(make_tiny: Any, ranks: str, multiple: int) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.37, group_size=2, ranks=ranks, rank_multiple=multiple)
    total = 2 * 2 * 64
    assert 0.37 - 1e-9 <= slim.palu.rate < 0.37 + multiple / total
    for layer, module in enumerate(slim.model.layers):
        assert module.self_attn.k_latent.ranks == slim.palu.plan.key_ranks[layer]
        assert module.self_attn.v_latent.ranks == slim.palu.plan.value_ranks[layer]
    assert json.loads(json.dumps(slim.palu.to_dict()))["rate"] == slim.palu.rate


def test_fisher_gives_sensitive_groups_more(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    _, fisher = palu.calibrate(model, PaluConfig(ranks="fisher"), WINDOWS)
    assert fisher is not None
    chosen = palu.plan(model, PaluConfig(rate=0.5, group_size=2, ranks="fisher"), fisher)
    scores = fisher.sum_squares.view(2, 2, 2, 2).sum(-1).flatten().tolist()
    ranks = [rank for layer in range(2) for rank in (*chosen.key_ranks[layer], *chosen.value_ranks[layer])]
    ordered = [rank for _, rank in sorted(zip(scores, ranks, strict=True))]
    assert ordered == sorted(ordered)
    assert ordered[0] < ordered[-1]


def test_a_group_larger_than_the_model_is_joint_and_says_so(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.5, group_size=16)
    assert slim.palu.plan.group_size == 4
    assert "jointly" in slim.palu.plan.notes[0]
    assert compressed(build(make_tiny, {}), rate=0.5, group_size=4).palu.plan.notes == ()


def test_one_calibration_serves_many_configurations(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    own = model(IDS).logits
    grams, fisher = palu.calibrate(model, PaluConfig(ranks="fisher"), WINDOWS)
    saved = palu.snapshot(model)
    for config in (PaluConfig(rate=0.5), PaluConfig(rate=0.3, group_size=1, ranks="fisher")):
        palu.compress_with(model, config, grams=grams, fisher=fisher)
        assert torch.equal(model(IDS).logits, compressed(palu_copy(make_tiny), **config.to_dict())(IDS).logits)
        palu.restore(model, saved)
    assert torch.equal(model(IDS).logits, own)
    assert not hasattr(model, "palu")
    assert type(model) is saved.model_class


def palu_copy(make_tiny: Any) -> PreTrainedModel:
    return build(make_tiny, {})


def test_a_deep_copy_rotates_by_its_own_frequencies(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny, {}), rate=0.5)
    twin = copy.deepcopy(slim)
    common = {"attention_mask": PADDED, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(twin.generate(IDS, **common), slim.generate(IDS, **common))
    twin.model.rotary_emb.inv_freq.mul_(0.5)
    changed, _ = in_chunks(twin, IDS, PADDED, [21])
    torch.testing.assert_close(changed[PADDED.bool()], at_once(twin, IDS, PADDED)[PADDED.bool()], atol=1e-4, rtol=1e-4)


class Letters:
    """One token per character."""

    bos_token_id = 1

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def test_calibration_from_texts(make_tiny: Any) -> None:
    model, texts = build(make_tiny, {}), ["the quick brown fox " * 4, "jumps over the lazy dog"]
    config = PaluConfig(rate=0.5)
    slim = palu.compress(copy.deepcopy(model), Letters(), config, texts, window_length=25, prepend_bos=True)
    assert slim.palu.calibration_tokens == 4 * 25
    with pytest.raises(CalibrationError, match="have 103 tokens; 5 windows of 25 need 125"):
        palu.compress(model, Letters(), config, texts, window_length=25, calibration_windows=5)
    with pytest.raises(CalibrationError, match="have 103 tokens; 1 windows of 2048 need 2048"):
        palu.compress(model, Letters(), config, texts)


def test_half_precision_models(make_tiny: Any) -> None:
    model = build(make_tiny, {}).to(torch.bfloat16)
    slim = compressed(model, rate=0.0, group_size=2)
    own, ours = at_once(model, IDS, PADDED)[PADDED.bool()], in_chunks(slim, IDS, PADDED, [12, 9])[0][PADDED.bool()]
    assert ours.dtype == torch.bfloat16
    assert (ours - own).float().norm() < 0.02 * own.float().norm()


def test_progress_names_each_stage(make_tiny: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    palu.compress(
        build(make_tiny, {}), None, PaluConfig(ranks="fisher"), WINDOWS, progress=lambda *step: seen.append(step)
    )
    assert [step for step in seen if step[1] == step[2]] == [
        ("gram matrices", 4, 4),
        ("fisher information", 4, 4),
        ("decomposition", 2, 2),
    ]


# --- caches -----------------------------------------------------------------------------------------------------------


def test_a_users_own_empty_dynamic_cache_becomes_a_latent_cache(make_tiny: Any) -> None:
    slim = compressed(make_tiny("mistral", sliding_window=6), rate=0.5)
    mine = DynamicCache()
    out = slim.generate(IDS, attention_mask=PADDED, max_new_tokens=6, do_sample=False, past_key_values=mine)
    assert isinstance(mine, LatentCache)
    assert torch.equal(out, slim.generate(IDS, attention_mask=PADDED, max_new_tokens=6, do_sample=False))
    assert torch.equal(
        out,
        slim.generate(
            IDS, attention_mask=PADDED, max_new_tokens=6, do_sample=False, past_key_values=palu.new_cache(slim)
        ),
    )


def test_foreign_caches_are_refused_in_words(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    slim = compressed(model, rate=0.5)
    filled = DynamicCache(config=model.config)
    model(IDS, past_key_values=filled)
    with pytest.raises(CacheStateError, match="a filled DynamicCache"):
        slim(IDS[:, :1], past_key_values=filled)
    with pytest.raises(CacheStateError, match="StaticCache"):
        slim(IDS, past_key_values=StaticCache(config=model.config, max_cache_len=64))
    with pytest.raises(CacheStateError, match="cache_implementation='static'"):
        slim.generate(IDS, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(CacheStateError, match="DynamicCache with other models"):
        model(IDS, past_key_values=palu.new_cache(slim))
    with pytest.raises(UnsupportedModelError, match="not compressed"):
        palu.new_cache(model)


def test_a_cache_of_another_compression_is_refused(make_tiny: Any) -> None:
    first = compressed(build(make_tiny, {}), rate=0.5)
    second = compressed(build(make_tiny, {}), rate=0.3)
    _, cache = in_chunks(first, IDS, PADDED, [21])
    with pytest.raises(CacheStateError, match="belongs to the model"):
        second(IDS[:, :1], past_key_values=cache)


# --- bad input leaves the model as it was -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 1.0}, "below 1"),
        ({"rate": -0.1}, "at least 0"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": "half"}, "rate"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 1.5}, "group_size"),
        ({"rank_multiple": 0}, "rank_multiple"),
        ({"ranks": "best"}, "uniform, fisher, fisher-rms, spectral"),
        ({"decomposition": "qr"}, "whitened, loss-aware, svd"),
        ({"rang": 3}, "no field 'rang'"),
    ],
)
def test_bad_configurations(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PaluConfig.from_dict(fields)


def test_config_round_trip() -> None:
    config = PaluConfig(rate=0.5, group_size=4, ranks="fisher", rank_multiple=8)
    assert PaluConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def fails(model: PreTrainedModel, error: type[Exception], match: str, config: PaluConfig, calibration: Any) -> None:
    """The call fails as told and leaves class, modules and weights alone."""
    kind, modules = type(model), dict(model.named_modules())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        palu.compress(model, None, config, calibration)
    assert type(model) is kind
    assert {name: id(m) for name, m in model.named_modules()} == {name: id(m) for name, m in modules.items()}
    assert all(torch.equal(v.nan_to_num(), weights[n].nan_to_num()) for n, v in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_failing_calls_leave_the_model_untouched(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    fails(
        model,
        ConfigError,
        r"group_size 3 does not divide the 4 KV heads. Use one of 1, 2, 4",
        PaluConfig(group_size=3),
        WINDOWS,
    )
    fails(model, ConfigError, "highest rate", PaluConfig(rate=0.9, rank_multiple=32), WINDOWS)
    fails(model, CalibrationError, "needs calibration text", PaluConfig(), None)
    fails(model, CalibrationError, "Token ids", PaluConfig(), WINDOWS + 100)
    fails(model, CalibrationError, "integers of shape", PaluConfig(), WINDOWS.float())


def test_broken_weights_and_activations_name_the_layer(make_tiny: Any) -> None:
    model = build(make_tiny, {})
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    fails(model, NonFiniteError, "value projection of layer 1", PaluConfig(), WINDOWS)
    model = build(make_tiny, {})
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("inf")
    fails(model, NonFiniteError, "layer 1", PaluConfig(ranks="fisher"), WINDOWS)


def test_unsupported_models(make_tiny: Any) -> None:
    config = CodeGenConfig(n_layer=1, n_head=4, n_embd=16, rotary_dim=2, vocab_size=128)
    other = AutoModelForCausalLM.from_config(config)
    fails(other, UnsupportedModelError, "'codegen'.*bloom.*llama, mistral", PaluConfig(), WINDOWS)
    model = build(make_tiny, {})
    fails(model.model, UnsupportedModelError, "not the bare LlamaModel", PaluConfig(), WINDOWS)
    slim = compressed(model)
    fails(slim, UnsupportedModelError, "compressed already", PaluConfig(), WINDOWS)
    adapted = build(make_tiny, {})
    adapted.model.layers[0].self_attn.k_proj = nn.Sequential(adapted.model.layers[0].self_attn.k_proj)
    fails(adapted, UnsupportedModelError, "without quantization", PaluConfig(), WINDOWS)


def test_plain_svd_with_uniform_ranks_needs_no_data(make_tiny: Any) -> None:
    slim = palu.compress(build(make_tiny, {}), None, PaluConfig(rate=0.5, ranks="uniform", decomposition="svd"))
    assert slim.palu.calibration_tokens == 0
    assert torch.isfinite(slim(IDS).logits).all()


def test_statistics_of_another_model_are_refused(make_tiny: Any) -> None:
    grams, fisher = palu.calibrate(make_tiny(layers=3), PaluConfig(ranks="fisher"), WINDOWS)
    model = build(make_tiny, {})
    with pytest.raises(CalibrationError, match="3 Gram matrices for 2 layers"):
        palu.compress_with(model, PaluConfig(ranks="uniform", decomposition="whitened"), grams=grams)
    with pytest.raises(CalibrationError, match="Calibrate it"):
        palu.compress_with(model, PaluConfig(ranks="fisher", decomposition="whitened"), grams=grams, fisher=fisher)
    with pytest.raises(CalibrationError, match="needs grams"):
        palu.compress_with(model, PaluConfig())
    with pytest.raises(CalibrationError, match="needs fisher"):
        palu.compress_with(model, PaluConfig(decomposition="svd", ranks="fisher"))


# --- the real model ---------------------------------------------------------------------------------------------------


def test_full_rank_on_the_default_model(default_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32).eval()
    ids = torch.randint(100, 40000, (1, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = model(ids).logits
        palu.compress(model, None, PaluConfig(rate=0.0), ids.view(2, 128))
        torch.testing.assert_close(model(ids, use_cache=False).logits, own, atol=1e-3, rtol=0)
        first = model(ids[:, :200], use_cache=True)
        cache = getattr(first, "past_key_values", None) or first.cache
        rest = model(ids[:, 200:], past_key_values=cache).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), own, atol=1e-3, rtol=0)
