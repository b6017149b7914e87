from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicCache

from kvslim.baselines import IntegerCache
from kvslim.caching.compressed import CompressedCache
from kvslim.errors import CalibrationError, ConfigError, UnsupportedModelError
from kvslim.evaluating.compare import compare, palu_variants, with_one_pass
from kvslim.evaluating.continuation import (
    ContinuationConfig,
    perplexity,
    prefill,
    run_reference,
    score_cache,
    share_prefill,
)
from kvslim.evaluating.methods import parse_methods
from kvslim.evaluating.windows import evenly_spaced_windows
from kvslim.jolt import JoltCache
from kvslim.palu import PaluConfig, compress_with

CONFIG = ContinuationConfig(tokens=96, score=24)


def random_windows(count: int = 2, length: int = CONFIG.window, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (count, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_protocol_equals_a_loop_written_by_hand(tiny_llama: PreTrainedModel) -> None:
    window = random_windows(1)[0]
    reference = run_reference(tiny_llama, window, CONFIG)
    measured = score_cache(tiny_llama, IntegerCache(tiny_llama, 2), reference, CONFIG).divergence

    cache = IntegerCache(tiny_llama, 2)
    tiny_llama(window[None, :96], past_key_values=cache)
    cache.compress()
    exact = tiny_llama(window[None]).logits[0].double().log_softmax(-1)
    nll = kl = 0.0
    agreed = 0
    for place in range(96, 96 + 24):  # one token at a time, as decoding does
        row = tiny_llama(window[None, place : place + 1], past_key_values=cache).logits[0, -1].double().log_softmax(-1)
        nll -= float(row[window[place + 1]])
        kl += float((exact[place].exp() * (exact[place] - row)).sum())
        agreed += int(row.argmax() == exact[place].argmax())

    assert measured.tokens == 24
    assert measured.nll == pytest.approx(nll, rel=1e-4)
    assert measured.kl == pytest.approx(kl, rel=1e-3)
    assert kl > 0.01  # two bits do harm, so the comparison means something
    assert measured.agreed == agreed
    assert measured.perplexity == pytest.approx(math.exp(nll / 24), rel=1e-4)


def test_one_step_at_a_time_gives_the_same_figures(tiny_llama: PreTrainedModel) -> None:
    windows, methods = random_windows(1), parse_methods("int3")
    block = compare(tiny_llama, methods, windows, CONFIG)[0]
    token = compare(tiny_llama, methods, windows, ContinuationConfig(96, 24, "token"))[0]
    assert token.kl == pytest.approx(block.kl, rel=1e-3)
    assert token.nbytes == block.nbytes


def half_sliding_model() -> PreTrainedModel:
    """One layer that sees everything and one with a window of 32."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(Qwen2Config(**shape, **heads, **layers)).eval()


@torch.no_grad()
@pytest.mark.parametrize("sliding", [False, True])
def test_filled_cache_equals_a_real_prefill(make_tiny, sliding: bool) -> None:
    model = half_sliding_model() if sliding else make_tiny()
    reference = run_reference(model, random_windows(1)[0], CONFIG)
    prompt = reference.ids[:, : CONFIG.tokens]
    real, filled = (JoltCache(model, ratio=2, sinks=2, window=8) for _ in range(2))
    prefill(model, real, prompt)
    share_prefill(model, reference.filled, filled, prompt)
    for one, other in zip(real.layers, filled.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert one.get_seq_length() == other.get_seq_length() == CONFIG.tokens


def test_sliding_layers_count_as_they_are() -> None:
    none, int8 = compare(half_sliding_model(), parse_methods("none,int8"), random_windows(1), CONFIG)
    assert none.kl < 1e-12
    assert none.nbytes == 2 * (2 * 2 * 16) * (96 + 31)  # bytes, K and V with heads and features, tokens in both layers
    assert none.ratio == 1
    assert 0 < int8.kl < 1e-3


def test_uncompressed_cache_loses_nothing(tiny_llama: PreTrainedModel) -> None:
    (result,) = compare(tiny_llama, parse_methods("none"), random_windows(), CONFIG)
    assert result.kl < 1e-12
    assert result.agreement == 1
    assert (result.key_error, result.value_error) == (0, 0)
    assert result.ratio == 1
    assert result.nbytes == 2 * 2 * 2 * 2 * 2 * 16 * 96  # windows, K and V, layers, heads, bytes, features, tokens


def test_destroyed_cache_destroys_the_score(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = run_reference(tiny_llama, random_windows(1)[0], CONFIG)
    intact = score_cache(tiny_llama, IntegerCache(tiny_llama, 8), reference, CONFIG)
    compress = CompressedCache.compress

    def compress_and_scramble(cache: CompressedCache) -> None:
        compress(cache)
        assert cache.prefix is not None
        broken = cache.prefix.map(lambda t: torch.randint_like(t, 0, 255) if t.dtype == torch.uint8 else t.flip(-1))
        for layer in cache.compressible:
            layer.prefix = broken

    monkeypatch.setattr(CompressedCache, "compress", compress_and_scramble)
    destroyed = score_cache(tiny_llama, IntegerCache(tiny_llama, 8), reference, CONFIG)
    assert intact.divergence.mean_kl < 1e-4
    assert destroyed.divergence.mean_kl > 0.05 > 100 * intact.divergence.mean_kl
    assert destroyed.divergence.agreed < intact.divergence.agreed
    assert destroyed.key_lost > 100 * intact.key_lost


@torch.no_grad()
def test_errors_are_those_of_what_attention_sees(tiny_llama: PreTrainedModel) -> None:
    windows = random_windows(1)
    (result,) = compare(tiny_llama, parse_methods("jolt-2x:sinks=1:window=2"), windows, CONFIG)
    dense = DynamicCache(config=tiny_llama.config)
    tiny_llama(windows[:, :96], past_key_values=dense)
    cache = JoltCache(tiny_llama, ratio=2, sinks=1, window=2)
    tiny_llama(windows[:, :96], past_key_values=cache)
    cache.compress()
    seen = [layer.dense() for layer in cache.compressible]
    for kind, error in enumerate((result.key_error, result.value_error)):
        exact = torch.stack([(layer.keys, layer.values)[kind] for layer in dense.layers])
        rebuilt = torch.stack([pair[kind] for pair in seen])
        assert error == pytest.approx(float((rebuilt - exact).norm() / exact.norm()), rel=1e-4)
    assert result.nbytes == cache.nbytes
    assert result.ratio >= 2


def test_palu_is_measured_through_its_latents_and_the_model_is_given_back(tiny_llama: PreTrainedModel) -> None:
    before, original = tiny_llama(random_windows(1)).logits, type(tiny_llama)
    methods = parse_methods("palu-0,palu-50,palu-50:svd:gs1")
    windows = random_windows()
    variants = palu_variants(tiny_llama, methods, random_windows(4, 128, seed=1))
    full, half, plain = compare(tiny_llama, methods, windows, CONFIG, variants=variants)
    # Full rank changes nothing but the rounding of the latents to bf16, and saves nothing.
    assert full.kl < 1e-3
    assert full.key_error < 0.01
    assert full.ratio < 1  # latents of full rank, and positions
    assert 1.9 < half.ratio <= 2
    assert half.kl > 10 * full.kl
    assert half.key_error > 0.1
    assert plain.kl != half.kl
    assert type(tiny_llama) is original
    assert torch.equal(tiny_llama(random_windows(1)).logits, before)


def test_compressed_model_is_refused(tiny_llama: PreTrainedModel) -> None:
    compress_with(tiny_llama, PaluConfig(rate=0.5, decomposition="svd"))
    with pytest.raises(UnsupportedModelError, match="compressed already"):
        compare(tiny_llama, parse_methods("none"), random_windows(), CONFIG)


def test_palu_without_its_preparation_is_refused(tiny_llama: PreTrainedModel) -> None:
    methods = parse_methods("palu-50")
    with pytest.raises(CalibrationError, match="palu-50"):
        compare(tiny_llama, methods, random_windows(), CONFIG)
    with pytest.raises(CalibrationError, match="calibration windows"):
        palu_variants(tiny_llama, methods, None)


@torch.no_grad()
def test_one_pass_perplexity(tiny_llama: PreTrainedModel) -> None:
    windows = random_windows(3, 40)
    logits = tiny_llama(windows).logits[:, :-1]
    expected = math.exp(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())))
    assert perplexity(tiny_llama, windows) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match="length >= 2"):
        perplexity(tiny_llama, windows[:, :1])


def test_one_pass_perplexity_of_palu_shows_its_loss(tiny_llama: PreTrainedModel) -> None:
    methods = parse_methods("none,int4,palu-75:svd")
    variants = palu_variants(tiny_llama, methods, None)
    windows = random_windows()
    none, int4, palu = with_one_pass(
        tiny_llama, compare(tiny_llama, methods, windows, CONFIG, variants=variants), windows, variants
    )
    assert none.one_pass_perplexity == pytest.approx(perplexity(tiny_llama, windows))
    assert int4.one_pass_perplexity is None
    assert palu.one_pass_perplexity != pytest.approx(none.one_pass_perplexity, rel=1e-3)


def test_pooling_over_windows(tiny_llama: PreTrainedModel) -> None:
    windows, methods = random_windows(2), parse_methods("int3")
    (both,) = compare(tiny_llama, methods, windows, CONFIG)
    apart = [compare(tiny_llama, methods, window[None], CONFIG)[0] for window in windows]
    assert both.kl == pytest.approx(sum(one.kl for one in apart) / 2)
    assert both.kl_per_window == pytest.approx([one.kl for one in apart])
    assert both.perplexity == pytest.approx(math.sqrt(math.prod(one.perplexity for one in apart)))
    assert both.nbytes == sum(one.nbytes for one in apart)


@pytest.mark.parametrize(
    ("window", "words"),
    [(torch.zeros(7, dtype=torch.long), "holds 121 tokens"), (torch.full((121,), 128), "0 to 127")],
)
def test_unusable_window(tiny_llama: PreTrainedModel, window: Tensor, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_reference(tiny_llama, window, CONFIG)


def test_evenly_spaced_windows() -> None:
    rows = evenly_spaced_windows(list(range(100)), 3, 11, bos_id=777)
    assert rows[:, 0].tolist() == [777] * 3
    assert rows[:, 1].tolist() == [0, 45, 90]
    assert rows[-1, -1] == 99
    assert evenly_spaced_windows(list(range(10)), 2, 5).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(ConfigError, match=r"9 tokens, but 2 windows of 5 need 10.*at most 1"):
        evenly_spaced_windows(list(range(9)), 2, 5)


def test_real_model(default_model_dir) -> None:
    from kvslim import models
    from kvslim.evaluating.texts import python_topics

    model, tokenizer = models.load(str(default_model_dir))
    config = ContinuationConfig(tokens=1024, score=128)
    ids = python_topics(tokenizer, 2 * config.window)[0].tokens(tokenizer)
    windows = evenly_spaced_windows(ids, 2, config.window)
    none, int4, jolt = compare(model, parse_methods("none,int4,jolt-3x"), windows, config)
    assert none.kl < 1e-9
    assert none.perplexity < 15
    assert int4.ratio == pytest.approx(16 / 4.5, rel=0.01)
    assert 0.001 < int4.kl < 0.1
    assert jolt.ratio >= 3
    assert 0.0005 < jolt.kl < 0.03
    assert jolt.agreement > 0.9


def test_coded_latents_are_measured_through_the_cache(tiny_llama: PreTrainedModel) -> None:
    names = "palu-0:svd,palu-0:svd:8bit,palu-0:svd:2bit,palu-0:svd:2bit:sinks=4:window=40"
    methods, windows = parse_methods(names), random_windows()
    variants = palu_variants(tiny_llama, methods, None)
    results = compare(tiny_llama, methods, windows, CONFIG, variants=variants)
    exact, eight, two, spared = with_one_pass(tiny_llama, results, windows, variants)
    assert exact.kl < eight.kl < spared.kl < two.kl
    assert exact.key_error < eight.key_error < spared.key_error < two.key_error
    assert two.one_pass_perplexity != pytest.approx(exact.one_pass_perplexity, rel=1e-3)
    # Rank 32 of 2 x 16 features: 8 bytes of codes, a step and a minimum, in two layers of keys and values; a position.
    assert two.nbytes == 2 * 96 * (4 * (8 + 4) + 4)
    assert spared.nbytes == 2 * (96 * 4 + 4 * (52 * (8 + 4) + 44 * 32 * 2))  # exact tokens count as bf16
    assert "2 bits" in two.note
