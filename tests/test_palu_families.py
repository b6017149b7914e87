"""Palu on a tiny random model of every supported family: full rank changes nothing, every way to generate agrees."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.attending.families import attention_modules
from kvslim.caching.latent import LatentCache
from kvslim.calibrating.grams import calibrate_grams
from kvslim.calibrating.sequential import replace_in_turn
from kvslim.errors import ConfigError, UnsupportedModelError
from kvslim.palu import PaluConfig
from kvslim.palu_build import Builder
from tiny import KINDS, VOCAB, build, cache_of, in_chunks

UNROTATED = ("opt", "gpt2", "bloom", "mpt")
WINDOWS = torch.randint(3, VOCAB, (4, 40), generator=torch.Generator().manual_seed(7))
IDS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(8))
PADDED = torch.ones_like(IDS)
PADDED[0, :8] = 0


def compressed(model: PreTrainedModel, **config: Any) -> PreTrainedModel:
    return palu.compress(copy.deepcopy(model), None, PaluConfig(**config), WINDOWS)


def chunked(model: PreTrainedModel, sizes: list[int]) -> Tensor:
    """Logits of the real tokens of the padded batch fed in chunks through one cache."""
    return in_chunks(model, IDS, PADDED, sizes)[0][PADDED.bool()]


def fusions(kind: str) -> list[str]:
    return ["auto", "none"] if kind == "mpt-clip" else ["auto", "fold", "apply", "none"]


CASES = [pytest.param(kind, fusion, id=f"{kind}-{fusion}") for kind in KINDS for fusion in fusions(kind)]


@pytest.mark.parametrize(("kind", "fusion"), CASES)
@pytest.mark.parametrize("group_size", [1, None])
def test_full_rank_gives_the_models_own_logits(kind: str, fusion: str, group_size: int | None) -> None:
    model = build(kind)
    slim = compressed(model, rate=0.0, fusion=fusion, group_size=group_size)
    own, ours = chunked(model, [9, 7, 1, 1, 3]), chunked(slim, [9, 7, 1, 1, 3])
    torch.testing.assert_close(ours, own, atol=1e-3, rtol=0)
    assert (own - own.roll(1, 0)).abs().max() > 0.1  # the tokens do differ
    if fusion == "fold":
        assert slim.palu.forms[0][1] != "rebuild"


@pytest.mark.parametrize(("kind", "fusion"), CASES)
def test_all_forms_and_chunks_are_one_function_below_full_rank(kind: str, fusion: str) -> None:
    settings = {"rate": 0.4, "group_size": 1, "ranks": "fisher"}
    wanted = chunked(compressed(build(kind), **settings, fusion="none"), [21])
    for sizes in ([21], [10, 1, 1, 9]):
        ours = chunked(compressed(build(kind), **settings, fusion=fusion), sizes)
        torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_sequential_calibration_sees_what_the_compressed_model_reads(kind: str) -> None:
    model = build(kind)
    exact = compressed(model, rate=0.0, sequential=True)
    torch.testing.assert_close(chunked(exact, [21]), chunked(model, [21]), atol=1e-3, rtol=0)

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
        assert torch.equal(chunked(again, [12, 1, 8]), chunked(slim, [12, 1, 8]))
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
    cache = cache_of(out)
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
        wanted = chunked(slim, [12, 1, 8])
        slim.set_attn_implementation(attention)
        torch.testing.assert_close(chunked(slim, [12, 1, 8]), wanted, atol=1e-4, rtol=1e-4)


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
