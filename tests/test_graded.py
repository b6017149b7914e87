"""Graded caches as a whole: budgets, quality, sealing, generation, statistics on disk, and what is refused."""

import json
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvslim.caching.graded_block import GradedBlock
from kvslim.caching.prefix import CodedStretch
from kvslim.errors import (
    CacheStateError,
    CalibrationError,
    CheckpointError,
    ConfigError,
    ModelSourceError,
    NonFiniteError,
)
from kvslim.graded import SPEED, GradedCache, GradedConfig, GradedStats, calibrate
from tiny import build, compress_within

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
FAMILIES = ("llama-gqa", "llama-mqa", "mistral", "qwen2-sliding", "qwen3", "gemma3")
Pair = tuple[PreTrainedModel, GradedStats]


def words(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made() -> dict[str, Pair]:
    """Tiny models with statistics, one of each family, made when first asked for."""
    return {}


def pair_of(made: dict[str, Pair], kind: str) -> Pair:
    if kind not in made:
        model = build(kind, sliding_window=None) if kind == "mistral" else build(kind)
        made[kind] = (model, calibrate(model, None, words(24, 64)))
    return made[kind]


@pytest.fixture
def llama(made: dict[str, Pair]) -> Pair:
    return pair_of(made, "llama-gqa")


@torch.no_grad()
def filled(pair: Pair, tokens: int, rows: int = 1, **choice: object) -> GradedCache:
    model, stats = pair
    cache = GradedCache(model, stats, **choice)  # type: ignore[arg-type]
    model(words(rows, tokens, seed=tokens), past_key_values=cache)
    return cache


def blocks(cache: GradedCache) -> Iterator[GradedBlock]:
    assert cache.prefix is not None
    for row in cache.prefix.rows:
        for part in row.stretches:
            if isinstance(part, CodedStretch):
                for placed in (*part.keys, *part.values):
                    assert isinstance(placed.block, GradedBlock)
                    yield placed.block


# ---- bytes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 700),
    ratio=st.floats(1.1, 9),
    sinks=st.integers(0, 5),
    window=st.integers(0, 9),
    outliers=st.floats(0, 0.02),
    speed=st.booleans(),
)
def test_the_budget_holds_on_every_shape_or_is_refused(
    llama: Pair, tokens: int, ratio: float, sinks: int, window: int, outliers: float, speed: bool
) -> None:
    cache = filled(
        llama, tokens, ratio=ratio, sinks=sinks, window=window, outliers=outliers, preset="speed" if speed else None
    )
    if compress_within(cache, tokens, ratio):
        assert cache.report().ratio >= ratio * 0.999


def test_bytes_are_those_of_the_layouts(llama: Pair) -> None:
    cache = filled(llama, 500, ratio=3)
    cache.compress()
    for block in blocks(cache):
        outliers = len(block.outlier_at)
        features = block.basis.basis.features
        assert block.nbytes == block.layout.nbytes(block.tokens) + outliers * (2 * features + 4)


def test_the_budget_is_used(llama: Pair) -> None:
    for ratio in (2, 3, 5):
        cache = filled(llama, 1500, ratio=ratio, outliers=0.0)
        cache.compress()
        assert cache.prefix_nbytes + cache._header_bytes() >= 0.97 * cache.shape.dense_bytes(1500) / ratio


def test_the_layout_is_the_same_for_every_text_of_a_length(llama: Pair) -> None:
    model, stats = llama
    one, two = filled(llama, 400, ratio=4), GradedCache(model, stats, ratio=4)
    with torch.no_grad():
        model(words(1, 400, seed=99), past_key_values=two)
    one.compress(), two.compress()
    assert [block.layout for block in blocks(one)] == [block.layout for block in blocks(two)]


# ---- quality ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gap(pair: Pair, tokens: int = 600, **choice: object) -> float:
    """Relative error of the logits of eight tokens read from the compressed cache."""
    model, stats = pair
    ids = words(1, tokens + 8, seed=3)
    expected = model(ids).logits[:, tokens:]
    cache = GradedCache(model, stats, **choice)  # type: ignore[arg-type]
    model(ids[:, :tokens], past_key_values=cache)
    cache.compress()
    found = model(ids[:, tokens:], past_key_values=cache).logits
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("preset", ["quality", "speed"])
def test_more_bytes_less_error_and_eight_bits_are_nearly_exact(made: dict[str, Pair], kind: str, preset: str) -> None:
    pair = pair_of(made, kind)
    errors = [gap(pair, ratio=ratio, preset=preset) for ratio in (1.5, 3, 6)]
    assert errors[0] < 0.02
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("preset", ["quality", "speed"])
def test_products_with_a_block_are_those_with_its_decoded_form(made: dict[str, Pair], kind: str, preset: str) -> None:
    cache = filled(pair_of(made, kind), 300, ratio=2.5, preset=preset, outliers=0.02)
    cache.compress()
    for block in blocks(cache):
        dense = block.decode(0, 40, 200)
        heads, _, dim = dense.shape
        query = torch.randn(heads, 5, dim)
        assert torch.allclose(block.scores(0, query, 40, 200), query @ dense.mT, atol=1e-3)
        weights = torch.rand(heads, 5, 160)
        assert torch.allclose(block.mix(0, weights, 40, 200), weights @ dense, atol=1e-2)


def test_outliers_are_exact_and_spare_the_others(llama: Pair) -> None:
    """Two tokens far outside the levels: with outliers they cost nothing, and the others are coded as if alone."""
    errors = []
    for share in (0.0, 0.02):
        cache = filled(llama, 400, ratio=4, pre_rope=False, outliers=share)
        for layer in cache.compressible:
            layer.keys[:, :, [100, 300]] *= 30
        before = [layer.keys.clone() for layer in cache.compressible]
        cache.compress()
        after = [layer.dense()[0] for layer in cache.compressible]
        errors.append(sum(float((a - b).norm() / b.norm()) for a, b in zip(after, before, strict=True)))
        if share:
            assert all({96, 296} <= set(block.outlier_at.tolist()) for block in list(blocks(cache))[:2])
            assert torch.allclose(after[0][:, :, [100, 300]], before[0][:, :, [100, 300]], rtol=2e-3)
    assert errors[1] < 0.5 * errors[0]


# ---- generation ------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("preset", ["quality", "speed"])
def test_our_attention_sees_what_any_attention_sees(made: dict[str, Pair], kind: str, preset: str) -> None:
    model, stats = pair_of(made, kind)
    ids = words(2, 300)
    found = []
    for implementation in ("kvslim", "sdpa"):
        model.set_attn_implementation(implementation)
        cache = GradedCache(model, stats, ratio=3, preset=preset)
        model(ids[:, :290], past_key_values=cache)
        cache.compress()
        found.append(model(ids[:, 290:], past_key_values=cache).logits)
    assert (found[0] - found[1]).abs().max() < 5e-3 * found[1].abs().max()


@torch.no_grad()
def test_a_padded_row_is_what_it_is_alone(llama: Pair) -> None:
    model, stats = llama
    ids, mask = words(2, 400), torch.ones(2, 400, dtype=torch.long)
    mask[1, :120] = 0
    cache = GradedCache(model, stats, ratio=4, attention_mask=mask)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    cache.compress()
    alone = GradedCache(model, stats, ratio=4)
    model(ids[1:, 120:], past_key_values=alone)
    alone.compress()
    for layer in range(2):
        both, one = cache.layers[layer].dense()[1][1, :, 120:], alone.layers[layer].dense()[1][0]
        assert (both - one).norm() / one.norm() < 0.02  # float rounding of the padded forward pass may move a code


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_it_generates(llama: Pair, how: dict[str, int]) -> None:
    model, stats = llama
    ids = words(1, 300)
    out = model.generate(ids, past_key_values=GradedCache(model, stats, ratio=3), **GREEDY, **how)
    assert out.shape[1] == 306


def test_generation_from_eight_bits_is_that_of_the_full_cache(llama: Pair) -> None:
    model, stats = llama
    ids = words(2, 300, seed=5)
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **GREEDY)
    found = model.generate(ids, past_key_values=GradedCache(model, stats, ratio=1.6), **GREEDY)
    assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["quality", "speed"])
def test_later_tokens_are_sealed_and_errors_do_not_grow_with_turns(llama: Pair, preset: str) -> None:
    model, stats = llama
    cache, exact = GradedCache(model, stats, ratio=3, preset=preset), DynamicCache(config=model.config)
    ids = words(1, 1400, seed=8)
    errors, at = [], 0
    for turn in range(7):
        step = ids[:, at : at + 200]
        expected = model(step, past_key_values=exact).logits
        found = model(step, past_key_values=cache).logits
        cache.compress()
        if turn:
            errors.append(float((found - expected).norm() / expected.norm()))
        at += 200
    assert cache.report().tail_tokens == 0
    assert cache.report().ratio > 2.9
    assert max(errors) < 2 * errors[0]


@torch.no_grad()
def test_it_seals_by_itself_and_keeps_recent_tokens_exact(llama: Pair) -> None:
    model, stats = llama
    cache = GradedCache(model, stats, ratio=3, seal=64)
    ids = words(1, 420)
    model(ids[:, :256], past_key_values=cache)
    for at in range(256, 420):
        model(ids[:, at : at + 1], past_key_values=cache)
    assert cache.prefix is not None
    assert [part.tokens for part in cache.prefix.rows[0].stretches] == [4, 252, 64, 64]
    assert cache.tail_tokens == 420 - 4 - 252 - 128


@torch.no_grad()
def test_crop_and_move(llama: Pair) -> None:
    cache = filled(llama, 400, ratio=3, outliers=0.01)
    cache.compress()
    before = cache.layers[0].dense()
    cache.crop(-150)
    after = cache.layers[0].dense()
    assert all(torch.equal(b[:, :, :250], a) for b, a in zip(before, after, strict=True))
    assert all(block.tokens == 246 and (block.outlier_at < 246).all() for block in blocks(cache))
    cache.to("cpu").offload_prefix()
    assert torch.equal(cache.layers[0].dense()[0], after[0])


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_statistics_survive_the_disk(llama: Pair, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, stats = llama
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    again = GradedStats.load(path)
    assert again.model == stats.model
    assert again.calibration == stats.calibration
    one, two = filled(llama, 300, ratio=3), filled((model, again), 300, ratio=3)
    one.compress(), two.compress()
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(blocks(one), blocks(two), strict=True))


def test_calibrating_twice_gives_the_same(llama: Pair) -> None:
    model, stats = llama
    again = calibrate(model, None, words(24, 64))
    for kind in ("keys", "rotated", "values"):
        for a, b in zip(stats.of(kind), again.of(kind), strict=True):
            assert torch.equal(a.basis.directions, b.basis.directions)
            assert torch.equal(a.curves, b.curves)


def test_damaged_statistics_are_refused(llama: Pair, tmp_path) -> None:  # type: ignore[no-untyped-def]
    _, stats = llama
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    data = path.read_bytes()
    for damaged in (data[:-1], data[: len(data) // 2], data[:20], b"", data[:-8] + bytes(8)):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"damaged|no calibration statistics"):
            GradedStats.load(path)
    with pytest.raises(ModelSourceError):
        GradedStats.load(tmp_path / "none")


def test_statistics_of_another_shape_are_refused(llama: Pair, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The description says three layers: what is announced does not fit what is there."""
    _, stats = llama
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    described = json.loads(metadata["description"])
    described["about"]["model"]["layers"] = 3
    save_file(tensors, path, metadata | {"description": json.dumps(described)})
    with pytest.raises(CheckpointError, match="Calibrate again"):
        GradedStats.load(path)


def test_another_model_or_dtype_is_refused(made: dict[str, Pair]) -> None:
    _, stats = pair_of(made, "llama-gqa")
    with pytest.raises(CacheStateError, match="another model"):
        GradedCache(pair_of(made, "qwen3")[0], stats, ratio=3)
    with pytest.raises(CacheStateError, match=r"dtype.*Calibrate this one"):
        GradedCache(build("llama-gqa").to(torch.bfloat16), stats, ratio=3)


def test_too_little_text_says_how_much_it_takes(llama: Pair) -> None:
    model, _ = llama
    with pytest.raises(CalibrationError, match=r"44 tokens for 24 channels; at least 96 are needed, 3 windows of 64"):
        calibrate(model, None, words(1, 64))
    with pytest.raises(CalibrationError, match="at least 8 tokens"):
        calibrate(model, None, words(9, 5))
    with pytest.raises(ConfigError, match="It can be 1, 2"):
        calibrate(build("llama-mha-bias"), None, words(24, 64), group_size=3)


@torch.no_grad()
def test_text_unlike_the_calibration_is_reported(llama: Pair) -> None:
    usual = filled(llama, 400, ratio=3)
    usual.compress()
    assert usual.drift() < 1.5
    assert "calibration text" not in usual.report().note
    cache = filled(llama, 400, ratio=3)
    for layer in cache.compressible:
        layer.values *= 4
    cache.compress()
    assert cache.drift() > 3
    assert "times what the calibration text predicts (most: values of layer" in cache.report().note


def test_non_finite_values_leave_the_cache_as_it_was(llama: Pair) -> None:
    cache = filled(llama, 300, ratio=3)
    cache.layers[1].values[0, 0, 9, 3] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 1"):
        cache.compress()
    assert cache.prefix is None


@pytest.mark.parametrize(
    ("choice", "words_"),
    [
        ({}, "exactly one of ratio"),
        ({"ratio": 0.5}, "at least 1"),
        ({"ratio": 3, "budget_bytes": 9}, "exactly one"),
        ({"ratio": 3, "widths": (2, 4)}, "0 and at least one more"),
        ({"ratio": 3, "widths": (0, 9)}, "from 0 to 8"),
        ({"ratio": 3, "run": 12}, "multiple of 8"),
        ({"ratio": 3, "outliers": 1.0}, "below 1"),
        ({"ratio": 3, "seal": 0}, "≥ 1"),
        ({"ratio": 3, "bits": 4}, "Known fields"),
        ({"ratio": 3, "preset": "fast"}, "quality, speed"),
    ],
)
def test_bad_settings_are_refused(llama: Pair, choice: dict[str, object], words_: str) -> None:
    with pytest.raises(ConfigError, match=words_):
        GradedCache(*llama, **choice)  # type: ignore[arg-type]


def test_config_survives_json() -> None:
    config = GradedConfig(ratio=4, **SPEED)
    assert GradedConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
