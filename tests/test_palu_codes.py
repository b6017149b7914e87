"""Palu with packed latents, end to end on tiny random models: every way to feed tokens gives what a prefill gives.

The models compute in float64, so that portions of the input differ by far less than would tip a code.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvslim import palu, palu_build
from kvslim.attending.projections import Part
from kvslim.caching.latent import LatentCache
from kvslim.decomposing.whitened import loss_aware_svd
from kvslim.errors import CacheStateError, ConfigError, NonFiniteError
from kvslim.palu import PaluConfig
from tiny import cache_of, in_chunks

WINDOWS = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(7))
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(8))
PADDED = torch.ones_like(IDS)
PADDED[0, :8] = 0
KINDS = [
    pytest.param({"family": "llama"}, id="llama"),
    pytest.param({"family": "mistral", "sliding_window": 6}, id="sliding"),
]
SAME = {"atol": 1e-5, "rtol": 1e-5}  # the rotation of keys is float32


def build(make_tiny: Any, kind: dict[str, Any] | None = None) -> PreTrainedModel:
    return make_tiny(**(kind or {}), kv_heads=4, heads=8).double()


def compressed(model: PreTrainedModel, **config: Any) -> PreTrainedModel:
    settings = {"rate": 0.3, "group_size": 2, "bits": 4, **config}
    return palu.compress(copy.deepcopy(model), None, PaluConfig(**settings), WINDOWS)


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, return_dict_in_generate=True, **options
    )


# --- one forward, chunks, single tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"bits": 2}, {"bits": 4, "sinks": 3}, {"bits": 8, "hadamard": False}])
@pytest.mark.parametrize("sizes", [[10, 1, 1, 9], [3, 9, 9]])
def test_chunks_see_what_one_forward_sees(
    make_tiny: Any, kind: dict[str, Any], settings: dict[str, Any], sizes: list[int]
) -> None:
    slim = compressed(build(make_tiny, kind), **settings)
    real = PADDED.bool()
    whole, _ = in_chunks(slim, IDS, PADDED, [21])
    parts, cache = in_chunks(slim, IDS, PADDED, sizes)
    torch.testing.assert_close(parts[real], whole[real], **SAME)
    assert cache.report().bits == settings["bits"]
    with torch.no_grad():
        uncoded = slim(IDS, attention_mask=PADDED, position_ids=(PADDED.cumsum(-1) - 1).clamp_min(0), use_cache=False)
    assert (uncoded.logits - whole)[real].abs().max() > 1e-4  # coding does something


@pytest.mark.parametrize("kind", KINDS)
def test_generation_follows_a_prefill_of_its_own_text(make_tiny: Any, kind: dict[str, Any]) -> None:
    slim = compressed(build(make_tiny, kind), bits=3)
    out = generated(slim, IDS, PADDED, output_logits=True)
    mask = torch.cat([PADDED, torch.ones(2, 9, dtype=torch.long)], dim=1)
    forced, _ = in_chunks(slim, out.sequences, mask, [30])
    torch.testing.assert_close(torch.stack(out.logits, dim=1), forced[:, 20:-1].float(), **SAME)


def test_beams_follow_a_prefill_of_their_own_text(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny), bits=3, sinks=1)
    out = generated(slim, IDS, PADDED, num_beams=3, num_return_sequences=2, output_scores=True, length_penalty=0.0)
    mask = torch.cat([PADDED, torch.ones(2, 9, dtype=torch.long)], dim=1).repeat_interleave(2, 0)
    forced, _ = in_chunks(slim, out.sequences, mask, [30])
    chosen = forced[:, 20:-1].log_softmax(-1).gather(-1, out.sequences[:, 21:, None])[..., 0]
    torch.testing.assert_close(out.sequences_scores.double(), chosen.sum(-1), atol=1e-4, rtol=0)


def test_left_padding_does_not_change_a_row(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny), bits=3)
    batch, _ = in_chunks(slim, IDS, PADDED, [11, 9, 1])
    alone, _ = in_chunks(slim, IDS[:1, 8:], PADDED[:1, 8:], [3, 9, 1])
    torch.testing.assert_close(batch[:1, 8:], alone, **SAME)


def test_a_recent_window_and_sinks_help(make_tiny: Any) -> None:
    model = build(make_tiny)
    exact = compressed(model, bits=16)
    plain, spared = compressed(model, bits=2), compressed(model, bits=2, sinks=2, window=8)
    wanted, _ = in_chunks(exact, IDS, torch.ones_like(IDS), [1] * 21)
    errors = [
        float((in_chunks(each, IDS, torch.ones_like(IDS), [1] * 21)[0] - wanted).norm()) for each in (plain, spared)
    ]
    assert errors[1] < 0.9 * errors[0]
    out, _ = in_chunks(spared, IDS, torch.ones_like(IDS), [1] * 21)
    torch.testing.assert_close(out[:, :8], wanted[:, :8], **SAME)  # nothing has been coded yet


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.3), (3, 0.6)])
def test_more_bits_come_nearer(make_tiny: Any, bits: int, error: float) -> None:
    model = build(make_tiny)
    own = model(IDS).logits
    ours = compressed(model, rate=0.0, bits=bits)(IDS, use_cache=True).logits
    assert float((ours - own).detach().norm() / own.detach().norm()) < error


@pytest.mark.parametrize("hadamard", [True, False])
def test_ranges_are_fitted_where_latents_are_rotated(make_tiny: Any, hadamard: bool) -> None:
    codes = compressed(build(make_tiny), bits=3, hadamard=hadamard).palu_layout.codes
    assert codes.fitted is hadamard


@pytest.mark.parametrize(("hadamard", "exponent"), [(True, 0.5), (False, 0.75)])
def test_loss_aware_channels_are_balanced_in_the_metric_of_the_loss(hadamard: bool, exponent: float) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x, g = (torch.randn(shape, generator=generator).double() for shape in ((24, 16), (200, 24), (200, 16)))
    x, g = x * torch.arange(1, 25).sqrt(), g * torch.linspace(0.1, 3, 16)
    gram, output_gram = x.T @ x, g.T @ g
    config = PaluConfig(decomposition="loss-aware", bits=3, hadamard=hadamard)
    linear = torch.nn.Linear(24, 16, bias=False, dtype=torch.float64)
    linear.weight.data = weight.T
    (factors,) = palu_build._factor(Part(linear, None), (10,), gram, output_gram, config)
    plain = loss_aware_svd(weight, gram, output_gram)
    torch.testing.assert_close(factors.a @ factors.b, plain.a[:, :10] @ plain.b[:10])
    torch.testing.assert_close((x @ factors.a).square().sum(), (x @ plain.a[:, :10]).square().sum())
    damped = output_gram + 0.1 * output_gram.diagonal().mean() * torch.eye(16)
    costs = factors.b @ damped @ factors.b.T  # of errors in the latents
    wanted = plain.singular_values[:10].pow(2 * exponent)
    spectra = torch.linalg.eigvalsh(costs).flip(0)  # a rotation leaves them as they are
    torch.testing.assert_close(spectra / spectra[0], wanted / wanted[0])
    if not hadamard:
        torch.testing.assert_close(costs, costs.diagonal().diag(), atol=1e-9 * float(spectra[0]), rtol=0)


def test_folding_does_not_change_the_model(make_tiny: Any) -> None:
    model = build(make_tiny)
    exact = compressed(model, bits=16)(IDS, use_cache=False).logits
    for hadamard in (True, False):
        coded = compressed(model, hadamard=hadamard, group_size=1, rate=0.3)
        plain = compressed(model, bits=16, group_size=1, rate=0.3)
        torch.testing.assert_close(
            coded(IDS, use_cache=False).logits, plain(IDS, use_cache=False).logits, atol=1e-8, rtol=1e-8
        )
    assert torch.equal(compressed(model, bits=16, hadamard=False)(IDS, use_cache=False).logits, exact)


def test_half_precision(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny).to(torch.bfloat16), bits=8, rate=0.0)
    coded, _ = in_chunks(slim, IDS, PADDED, [12, 9])
    with torch.no_grad():
        exact = slim(IDS, attention_mask=PADDED, position_ids=(PADDED.cumsum(-1) - 1).clamp_min(0), use_cache=False)
    real = PADDED.bool()
    assert coded.dtype == torch.bfloat16
    assert (coded - exact.logits)[real].float().norm() < 0.05 * exact.logits[real].float().norm()


# --- caches -----------------------------------------------------------------------------------------------------------


def test_measured_bytes_are_those_of_the_codes(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny), bits=4, rate=0.5)
    cache = cache_of(generated(slim, IDS, PADDED))
    tokens = 2 * (21 + 8)  # the last new token is never fed back
    codes = sum((rank + 1) // 2 + 4 for side in (slim.palu.plan.key_ranks, slim.palu.plan.value_ranks)
                for layer in side for rank in layer)  # fmt: skip
    assert cache.nbytes == tokens * (codes + 4)
    assert cache.report().bytes_per_token == codes + 4
    assert cache.report().ratio == pytest.approx(2 * 2 * 64 * 2 / (codes + 4))


@pytest.mark.parametrize("kind", KINDS)
def test_cropping_goes_back_and_on(make_tiny: Any, kind: dict[str, Any]) -> None:
    slim = compressed(build(make_tiny, kind), bits=3, sinks=1)
    cache = palu.new_cache(slim)
    cache.activate_past_recording()
    mask = torch.ones_like(IDS)
    whole, _ = in_chunks(slim, IDS, mask, [21])
    in_chunks(slim, torch.cat([IDS[:, :12], IDS[:, :5]], 1), torch.ones(2, 17), [12, 5], cache)
    cache.crop(-5)
    with torch.no_grad():
        again = slim(IDS[:, 12:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(again, whole[:, 12:], **SAME)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coded", ["both", "main", "draft"])
def test_assisted_generation_gives_the_main_models_own_text(make_tiny: Any, kind: dict[str, Any], coded: str) -> None:
    model = build(make_tiny, kind)
    slim = compressed(model, bits=4)
    main = model if coded == "draft" else slim
    draft = compressed(model, bits=2, rate=0.5) if coded != "main" else model
    one, mask = IDS[:1], torch.ones_like(IDS[:1])
    drafted = generated(main, one, mask, assistant_model=draft).sequences
    assert torch.equal(drafted, generated(main, one, mask).sequences)


def test_prompt_lookup_gives_the_same_text(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny), bits=4)
    prompt = torch.cat([IDS[:1], IDS[:1]], dim=1)
    looked_up = generated(slim, prompt, torch.ones_like(prompt), prompt_lookup_num_tokens=3).sequences
    assert torch.equal(looked_up, generated(slim, prompt, torch.ones_like(prompt)).sequences)


def test_a_prefix_serves_several_continuations(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny), bits=3)
    prefix = IDS[:1, :12]
    with torch.no_grad():
        cache = cache_of(slim(prefix, use_cache=True))
    size = cache.nbytes
    for row in (0, 1):
        prompt = torch.cat([prefix, IDS[row : row + 1, 12:]], dim=1)
        mask = torch.ones_like(prompt)
        shared = generated(slim, prompt, mask, past_key_values=copy.deepcopy(cache)).sequences
        assert torch.equal(shared, generated(slim, prompt, mask).sequences)
    assert cache.nbytes == size


def test_a_dynamic_cache_is_adopted_and_another_coding_refused(make_tiny: Any) -> None:
    model = build(make_tiny)
    slim, other = compressed(model, bits=4), compressed(model, bits=3)
    mine: Any = DynamicCache()
    out = generated(slim, IDS, PADDED, past_key_values=mine).sequences
    assert isinstance(mine, LatentCache)
    assert torch.equal(out, generated(slim, IDS, PADDED).sequences)
    with pytest.raises(CacheStateError, match="other bits"):
        other(IDS[:, :1], past_key_values=mine)
    with pytest.raises(CacheStateError, match="other bits"):
        compressed(model, bits=16)(IDS[:, :1], past_key_values=mine)


def test_broken_activations_name_the_layer(make_tiny: Any) -> None:
    slim = compressed(build(make_tiny))
    with torch.no_grad():
        slim.model.layers[1].self_attn.v_latent.down.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="value latents of layer 1"):
        slim(IDS, use_cache=True)


# --- settings and checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 5}, "2, 3, 4, 8 or 16, not 5"),
        ({"bits": "4"}, "bits must be"),
        ({"bits": True}, "bits must be"),
        ({"bits": 4, "hadamard": 1}, "true or false"),
        ({"bits": 4, "sinks": -1}, "sinks is a number"),
        ({"bits": 4, "window": 2.5}, "window is a number"),
        ({"sinks": 4}, "Set bits below 16"),
        ({"window": 4}, "Set bits below 16"),
    ],
)
def test_bad_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PaluConfig.from_dict(fields)


def test_a_checkpoint_codes_as_before(make_tiny: Any, tmp_path: Path) -> None:
    config = PaluConfig(rate=0.4, group_size=2, bits=3, sinks=2, window=4)
    slim = palu.compress(build(make_tiny).float(), None, config, WINDOWS)
    palu.save(slim, tmp_path / "slim")
    again = palu.load(tmp_path / "slim")
    assert again.palu_layout == slim.palu_layout
    assert again.palu == slim.palu
    ours, cache = in_chunks(again, IDS, PADDED, [9, 12])
    wanted, _ = in_chunks(slim, IDS, PADDED, [9, 12])
    assert torch.equal(ours, wanted)
    assert cache.layers[0].coded == 21 - 2 - 4
