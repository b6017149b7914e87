"""Palu with graded latents, end to end on tiny random models.

The models compute in float64, so that portions of the input differ by far less than would tip a code.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.caching.latent import LatentCache
from kvslim.caching.latent_graded import RUN, GradedLatentCodes, GradedLatentLayer
from kvslim.checkpointing.latent_metadata import hash_of_config
from kvslim.decomposing.whitened import loss_aware_svd, whitened_svd
from kvslim.errors import BudgetError, CacheStateError, CheckpointError, ConfigError, NonFiniteError
from kvslim.palu import PaluConfig
from tiny import VOCAB, build, cache_of, in_chunks

WINDOWS = torch.randint(3, VOCAB, (6, 60), generator=torch.Generator().manual_seed(7))
IDS = torch.randint(3, VOCAB, (2, 21), generator=torch.Generator().manual_seed(8))
PADDED = torch.ones_like(IDS)
PADDED[0, :8] = 0
FAMILIES = ("llama-gqa", "llama-mha-bias", "qwen3", "gpt2", "phi3", "gemma3")
SAME = {"atol": 1e-5, "rtol": 1e-5}  # the rotation of keys is float32
COUNTER = 8
"""Bytes of a layer's count of outliers."""


def model_of(kind: str) -> PreTrainedModel:
    return build(kind).double()


def compressed(model: PreTrainedModel, **config: Any) -> PreTrainedModel:
    settings = {"rate": 0.0, "graded": 3.0, **config}
    return palu.compress(copy.deepcopy(model), None, PaluConfig(**settings), WINDOWS)


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, **options
    )


def channels_of(slim: PreTrainedModel) -> int:
    shape = slim.palu_layout.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_dim


def bits_per_token(slim: PreTrainedModel) -> int:
    """Of coded tokens: codes, gains and positions."""
    return 8 * (slim.palu_layout.codes.token_bytes + 4 * slim.palu_layout.rotary)


# --- error and bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_more_bits_come_nearer_down_to_the_models_own_logits(kind: str) -> None:
    model, mask = model_of(kind), torch.ones_like(IDS)
    own, _ = in_chunks(model, IDS, mask, [21])
    errors = []
    for bits in (2.5, 4, 6, 8):
        slim = compressed(model, graded=bits, sinks=0)
        assert bits_per_token(slim) <= bits * channels_of(slim)
        errors.append(float((in_chunks(slim, IDS, mask, [21])[0] - own).norm() / own.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.03
    assert errors[0] > 5 * errors[-1]


@pytest.mark.parametrize("kind", FAMILIES)
def test_sinks_alone_are_exact(kind: str) -> None:
    model, mask = model_of(kind), torch.ones_like(IDS)
    slim = compressed(model, graded=1.5, rate=0.0)
    plain, _ = in_chunks(slim, IDS[:, :4], mask[:, :4], [4])
    with torch.no_grad():
        uncoded = slim(IDS[:, :4], use_cache=False).logits
    torch.testing.assert_close(plain, uncoded, **SAME)
    assert slim.palu.config.sinks == 4


@pytest.mark.parametrize("graded", [1.0, 1.7, 2.25, 3.0, 4.3])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_the_budget_is_met_within_a_step_of_a_run(graded: float, rate: float) -> None:
    slim = compressed(model_of("gpt2"), graded=graded, rate=rate, group_size=2)
    wanted = graded * channels_of(slim)
    full = all(w == 8 for runs in slim.palu.plan.key_widths + slim.palu.plan.value_widths for g in runs for w in g)
    assert bits_per_token(slim) <= wanted
    assert full or bits_per_token(slim) > wanted - RUN - 8  # the last byte is not always whole


def test_measured_bytes_are_those_of_the_codes() -> None:
    slim = compressed(model_of("llama-mha-bias"), rate=0.5, group_size=2, sinks=1)
    cache = cache_of(generated(slim, IDS, PADDED))
    codes, plan, tokens = slim.palu_layout.codes, slim.palu.plan, 21 + 8  # the last new token is never fed back
    assert codes.bits > 3  # of half of the channels
    packed = 0
    for ranks, widths in ((plan.key_ranks, plan.key_widths), (plan.value_ranks, plan.value_widths)):
        for layer in zip(ranks, widths, strict=True):
            counts: dict[int, int] = {}
            for rank, runs in zip(*layer, strict=True):
                for at, width in enumerate(runs):
                    counts[width] = counts.get(width, 0) + min(RUN, rank - at * RUN)
            planes = [(count, 1 << bit) for width, count in counts.items() for bit in range(4) if width >> bit & 1]
            packed += sum(-(-count * plane // 8) for count, plane in planes) + 1
    exact = 2 * 8 * plan.channels  # of one sink in both rows, float64
    assert cache.nbytes == 2 * (tokens - 1) * packed + exact + 2 * tokens * 4 + 2 * COUNTER
    assert cache.report().bits == codes.bits
    assert "bits" in str(cache.report())


def test_graded_errs_less_than_integers_of_as_many_bits() -> None:
    mask = torch.ones_like(IDS)
    for kind in ("llama-mha-bias", "gpt2"):
        model = model_of(kind)
        own, _ = in_chunks(model, IDS, mask, [21])
        for bits in (2, 3, 4):
            integers = compressed(model, graded=None, bits=bits, ranks="uniform")
            their, cache = in_chunks(integers, IDS, mask, [21])
            mean = 16 * cache.nbytes / cache.report().dense_nbytes
            ours, smaller = in_chunks(compressed(model, graded=mean - 0.1, sinks=0), IDS, mask, [21])
            assert smaller.nbytes < cache.nbytes
            assert (ours - own).norm() < 0.8 * (their - own).norm()


def test_a_channel_of_no_bits_is_a_rank_cut_off() -> None:
    slim = compressed(model_of("gpt2"), graded=1.0)
    plan = slim.palu.plan
    assert plan.kept < 0.8
    for ranks, widths in ((plan.key_ranks, plan.key_widths), (plan.value_ranks, plan.value_widths)):
        for groups, runs in zip(ranks, widths, strict=True):
            assert all(each[-1] > 0 or len(each) == 1 for each in runs)
            assert [len(each) for each in runs] == [-(-rank // RUN) for rank in groups]
    attention = slim.transformer.h[0].attn
    assert attention.k_latent.down.weight.shape[0] == sum(plan.key_ranks[0])


@pytest.mark.parametrize("decomposition", ["loss-aware", "whitened"])
def test_latents_have_deviation_one_and_their_product_stays(decomposition: str) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x, g = (torch.randn(shape, generator=generator).double() for shape in ((24, 16), (200, 24), (200, 16)))
    x, g = x * torch.arange(1, 25).sqrt(), g * torch.linspace(0.1, 3, 16)
    gram = x.T @ x / 200
    part = loss_aware_svd(weight, gram, g.T @ g) if decomposition == "loss-aware" else whitened_svd(weight, gram)
    unit, plain = part.unit(9), part.truncate(9)
    torch.testing.assert_close(unit.a @ unit.b, plain.a @ plain.b)
    torch.testing.assert_close((x @ unit.a).square().mean(0), torch.ones(9).double(), atol=1e-6, rtol=0)


def test_grading_by_itself_changes_nothing() -> None:
    model = model_of("llama-mha-bias")
    exact = compressed(model, graded=None)(IDS, use_cache=False).logits
    torch.testing.assert_close(compressed(model, graded=8)(IDS, use_cache=False).logits, exact, atol=1e-8, rtol=1e-8)


# --- ways to feed tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("sizes", [[10, 1, 1, 9], [3, 9, 9]])
def test_chunks_see_what_one_forward_sees(kind: str, sizes: list[int]) -> None:
    slim, real = compressed(model_of(kind)), PADDED.bool()
    whole, _ = in_chunks(slim, IDS, PADDED, [21])
    parts, cache = in_chunks(slim, IDS, PADDED, sizes)
    torch.testing.assert_close(parts[real], whole[real], **SAME)
    assert all(isinstance(layer, GradedLatentLayer) for layer in cache.layers)


@pytest.mark.parametrize("kind", FAMILIES)
def test_generation_follows_a_prefill_of_its_own_text(kind: str) -> None:
    slim = compressed(model_of(kind))
    out = generated(slim, IDS, PADDED, output_logits=True)
    mask = torch.cat([PADDED, torch.ones(2, 9, dtype=torch.long)], dim=1)
    forced, _ = in_chunks(slim, out.sequences, mask, [30])
    torch.testing.assert_close(torch.stack(out.logits, dim=1), forced[:, 20:-1].float(), **SAME)


def test_beams_follow_a_prefill_of_their_own_text() -> None:
    slim = compressed(model_of("llama-gqa"), sinks=1)
    out = generated(slim, IDS, PADDED, num_beams=3, num_return_sequences=2, output_scores=True, length_penalty=0.0)
    mask = torch.cat([PADDED, torch.ones(2, 9, dtype=torch.long)], dim=1).repeat_interleave(2, 0)
    forced, _ = in_chunks(slim, out.sequences, mask, [30])
    chosen = forced[:, 20:-1].log_softmax(-1).gather(-1, out.sequences[:, 21:, None])[..., 0]
    torch.testing.assert_close(out.sequences_scores.double(), chosen.sum(-1), atol=1e-4, rtol=0)


def test_left_padding_does_not_change_a_row() -> None:
    slim = compressed(model_of("llama-gqa"), sinks=0)
    batch, _ = in_chunks(slim, IDS, PADDED, [11, 9, 1])
    alone, _ = in_chunks(slim, IDS[:1, 8:], PADDED[:1, 8:], [3, 9, 1])
    torch.testing.assert_close(batch[:1, 8:], alone, **SAME)


@pytest.mark.parametrize("kind", ["llama-gqa", "phi3", "gemma3"])
def test_cropping_goes_back_and_on(kind: str) -> None:
    slim, mask = compressed(model_of(kind), sinks=1), torch.ones_like(IDS)
    cache = palu.new_cache(slim)
    cache.activate_past_recording()
    whole, _ = in_chunks(slim, IDS, mask, [21])
    in_chunks(slim, torch.cat([IDS[:, :12], IDS[:, :5]], 1), torch.ones(2, 17), [12, 5], cache)
    cache.crop(-5)
    with torch.no_grad():
        again = slim(IDS[:, 12:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 12:], **SAME)


def test_rows_are_selected_and_repeated() -> None:
    slim, mask = compressed(model_of("llama-gqa")), torch.ones_like(IDS)
    whole, _ = in_chunks(slim, IDS, mask, [21])
    _, cache = in_chunks(slim, IDS[:, :15], mask[:, :15], [15])
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    with torch.no_grad():
        again = slim(IDS[[1, 1, 1], 15:], attention_mask=mask[[1, 1, 1]], past_key_values=cache).logits
    torch.testing.assert_close(again, whole[[1, 1, 1], 15:], **SAME)


def test_a_recent_window_stays_exact() -> None:
    model, mask = model_of("llama-gqa"), torch.ones_like(IDS)
    spared = compressed(model, graded=1.5, sinks=2, window=8)
    out, cache = in_chunks(spared, IDS, mask, [1] * 21)
    with torch.no_grad():
        uncoded = spared(IDS, use_cache=False).logits
    torch.testing.assert_close(out[:, :10], uncoded[:, :10], **SAME)
    assert (out[:, 11:] - uncoded[:, 11:]).abs().max() > 1e-3
    assert cache.layers[0].coded == 21 - 2 - 8


def test_outliers_are_reported() -> None:
    slim = compressed(model_of("llama-gqa"), sinks=0)
    _, cache = in_chunks(slim, IDS, torch.ones_like(IDS), [21])
    assert cache.report().outlying == 0
    with torch.no_grad():
        slim.model.layers[1].self_attn.v_latent.down.weight *= 100
    _, cache = in_chunks(slim, IDS, torch.ones_like(IDS), [12, 9])
    assert cache.report().outlying == IDS.numel()
    assert "42 outliers" in str(cache.report())
    cache.reset()
    assert cache.report().outlying == 0


def test_broken_activations_name_the_layer() -> None:
    slim = compressed(model_of("llama-gqa"))
    with torch.no_grad():
        slim.model.layers[1].self_attn.v_latent.down.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="value latents of layer 1"):
        slim(IDS, use_cache=True)


def test_a_cache_of_another_grading_is_refused() -> None:
    model = model_of("llama-gqa")
    _, cache = in_chunks(compressed(model, graded=4), IDS, PADDED, [21])
    with pytest.raises(CacheStateError, match="other bits"):
        compressed(model, graded=2)(IDS[:, :1], past_key_values=cache)


# --- settings and checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"graded": 0}, "mean number of bits"),
        ({"graded": 8.5}, "mean number of bits"),
        ({"graded": True}, "mean number of bits"),
        ({"graded": 3, "bits": 4}, "leave bits at 16"),
        ({"graded": 3, "hadamard": True}, "leave bits at 16"),
        ({"graded": 3, "sequential": True}, "not sequential"),
        ({"graded": 3, "decomposition": "svd"}, "not sequential"),
        ({"graded": 3, "sinks": -1}, "sinks is a number"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PaluConfig.from_dict(fields)


def test_settings_survive_json_and_know_their_defaults() -> None:
    graded = PaluConfig(graded=2.5)
    assert (graded.sinks, graded.hadamard, graded.coded) == (4, False, True)
    assert PaluConfig.from_dict(json.loads(json.dumps(graded.to_dict()))) == graded
    assert (PaluConfig().sinks, PaluConfig().hadamard, PaluConfig(bits=4).hadamard) == (0, True, True)


def test_too_few_bits_are_refused_before_the_model_is_touched() -> None:
    model = model_of("llama-gqa")
    with pytest.raises(BudgetError, match=r"graded=0.3 gives .* Raise it to more than 0.6"):
        palu.compress(model, None, PaluConfig(graded=0.3), WINDOWS)
    assert not hasattr(model, "palu")


def test_whitened_channels_are_weighed_by_the_gradients() -> None:
    model, mask = model_of("gpt2"), torch.ones_like(IDS)
    own, _ = in_chunks(model, IDS, mask, [21])
    errors = [
        float((in_chunks(compressed(model, graded=b, decomposition="whitened"), IDS, mask, [21])[0] - own).norm())
        for b in (2, 4)
    ]
    assert errors[1] < errors[0] < 0.3 * float(own.norm())


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_checkpoint_codes_as_before(kind: str, tmp_path: Path) -> None:
    config = PaluConfig(rate=0.2, graded=2.5, sinks=2, window=4)
    slim = palu.compress(build(kind), None, config, WINDOWS)
    palu.save(slim, tmp_path / "slim")
    again = palu.load(tmp_path / "slim")
    assert again.palu_layout == slim.palu_layout
    assert again.palu == slim.palu
    ours, cache = in_chunks(again, IDS, PADDED, [9, 12])
    wanted, _ = in_chunks(slim, IDS, PADDED, [9, 12])
    assert torch.equal(ours, wanted)
    assert isinstance(cache, LatentCache)
    about = json.loads((tmp_path / "slim" / "config.json").read_text())["kvslim"]
    assert about["report"]["config"]["graded"] == 2.5
    assert "| graded | 2.5 |" in (tmp_path / "slim" / "README.md").read_text()


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda plan: plan["key_widths"][0][0].__setitem__(0, 9), "0 to 8 bits, not 9"),
        (lambda plan: plan["key_widths"][0][0].__setitem__(0, "4"), "0 to 8 bits, not '4'"),
        (lambda plan: plan["value_widths"][1][0].append(3), "the values of layer 1 are not one for each 8 channels"),
        (lambda plan: plan["value_widths"].pop(), "Widths of values for 1 layers"),
        (lambda plan: plan.pop("key_widths"), "Widths of keys for 0 layers"),
        (lambda plan: plan.__setitem__("key_widths", 7), "does not say what was done"),
        (lambda plan: plan["key_ranks"][0].__setitem__(0, 1), "not those of its report"),
    ],
)
def test_a_tampered_layout_is_refused(tmp_path: Path, tamper: Any, message: str) -> None:
    slim = palu.compress(build("llama-gqa"), None, PaluConfig(rate=0.2, graded=2.5), WINDOWS)
    palu.save(slim, tmp_path / "slim")
    path = tmp_path / "slim" / "config.json"
    content = json.loads(path.read_text())
    tamper(content["kvslim"]["report"]["plan"])
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="edited: its hash differs"):
        palu.load(tmp_path / "slim")
    content["kvslim"]["config_sha256"] = hash_of_config(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        palu.load(tmp_path / "slim")


def test_the_description_is_checked() -> None:
    codes = GradedLatentCodes(0, 0, ((10,),), ((8,),), (((4, 2),),), (((0,),),))
    assert codes.layouts[0][0].widths == (4,) * 8 + (2,) * 2
    assert codes.bits == pytest.approx(36 / 18)
    assert codes.token_bytes == 4 + 1 + 1 + 1
    with pytest.raises(ConfigError, match="one for each 8 channels"):
        replace(codes, key_ranks=((17,),))
    with pytest.raises(ConfigError, match="sinks is a number"):
        replace(codes, sinks=-1)
