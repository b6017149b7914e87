from __future__ import annotations

import json

import pytest
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvslim.baselines import Float8Cache, IntegerCache, KiviCache, KvquantCache, RotatedCache, XkvCache
from kvslim.errors import ConfigError
from kvslim.evaluating.methods import CacheMethod, Jolt, Palu, check_methods, parse_method, parse_methods
from kvslim.jolt import PAPER, JoltCache, JoltConfig
from kvslim.palu import PaluConfig


@pytest.mark.parametrize(
    ("name", "cache", "bits"),
    [("none", DynamicCache, None), ("int8", IntegerCache, 8), ("int2", IntegerCache, 2), ("rot5", RotatedCache, 5)],
)
def test_run_time_methods(tiny_llama: PreTrainedModel, name: str, cache: type, bits: int | None) -> None:
    method = parse_method(name)
    assert isinstance(method, CacheMethod)
    made = method.make_cache(tiny_llama)
    assert type(made) is cache
    assert getattr(made, "bits", None) == bits


@pytest.mark.parametrize(
    ("name", "cache", "attributes"),
    [
        ("kivi-2", KiviCache, {"bits": 2, "group": 32, "n_sinks": 0, "n_window": 0, "n_seal": None}),
        ("kivi-4:window=128:seal=128:group=64", KiviCache, {"bits": 4, "group": 64, "n_window": 128, "n_seal": 128}),
        ("kvquant-3", KvquantCache, {"bits": 3, "outliers": 0.01, "n_sinks": 1}),
        ("kvquant-4:outliers=0:sinks=0:post-rope", KvquantCache, {"outliers": 0, "n_sinks": 0, "rope": None}),
        ("fp8", Float8Cache, {"rope": None, "n_sinks": 0}),
        ("xkv-2.5x", XkvCache, {"ratio": 2.5, "layers_together": 4, "split": 0.4, "n_sinks": 4}),
        ("xkv-3x:layers=2:split=.5:post-rope", XkvCache, {"layers_together": 2, "split": 0.5, "rope": None}),
    ],
)
def test_baselines(tiny_llama: PreTrainedModel, name: str, cache: type, attributes: dict[str, object]) -> None:
    method = parse_method(name)
    assert isinstance(method, CacheMethod)
    assert method.family == name.partition("-")[0]
    made = method.make_cache(tiny_llama)
    assert type(made) is cache
    assert {key: getattr(made, key) for key in attributes} == attributes
    assert method.settings["sinks"] == made.n_sinks
    if "post-rope" not in name and cache in (KvquantCache, XkvCache):
        assert made.rope is not None


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quanto-4", {"bits": 4, "backend": "quanto", "group": 64, "residual_length": 128}),
        ("hqq-3:group=32:residual=16", {"bits": 3, "backend": "hqq", "group": 32, "residual_length": 16}),
    ],
)
def test_names_of_caches_of_transformers(name: str, settings: dict[str, object]) -> None:
    assert parse_method(name).settings == settings


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("jolt-2x", JoltConfig(ratio=2)),
        ("jolt-2.5x", JoltConfig(ratio=2.5)),
        ("jolt-3x:post-rope", JoltConfig(ratio=3, pre_rope=False)),
        ("jolt-4x:bits=0/3/6:window=64:sinks=0", JoltConfig(ratio=4, bits=(0, 3, 6), window=64, sinks=0)),
        ("jolt-1x:bits=0/8/16", JoltConfig(ratio=1, bits=(0, 8, 16))),
        ("jolt-3x:paper", JoltConfig(ratio=3, **PAPER)),
        ("jolt-3x:rank-only:split=0.5", JoltConfig(ratio=3, bits=(0,), split=0.5)),
        ("jolt-5x:no-backbone:greedy", JoltConfig(ratio=5, backbone=False, allocation="greedy")),
        ("jolt-5x:uniform:slabs=.75", JoltConfig(ratio=5, allocation="uniform", slab_share=0.75)),
        ("jolt-3x:randomized:seal=64", JoltConfig(ratio=3, spectra="randomized", seal=64)),
        ("jolt-3x:gram:joint:seal=off", JoltConfig(ratio=3, spectra="gram", allocation="joint", seal=None)),
        ("jolt-3x:exact", JoltConfig(ratio=3, spectra="exact")),
        ("jolt-4x:layers=2:levels=uniform:seed=7", JoltConfig(ratio=4, layer_group=2, levels="uniform", seed=7)),
    ],
)
def test_jolt(tiny_llama: PreTrainedModel, name: str, config: JoltConfig) -> None:
    method = parse_method(name)
    assert isinstance(method, Jolt)
    assert method.config == config
    made = method.make_cache(tiny_llama)
    assert isinstance(made, JoltCache)
    assert made.config == config


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("palu-30", PaluConfig(rate=0.3)),
        ("palu-50:fisher", PaluConfig(rate=0.5, ranks="fisher")),
        ("palu-30:gs1", PaluConfig(rate=0.3, group_size=1)),
        ("palu-50:sequential", PaluConfig(rate=0.5, sequential=True)),
        ("palu-30:svd:fisher-rms", PaluConfig(rate=0.3, decomposition="svd", ranks="fisher-rms")),
        ("palu-30:fisher:4bit", PaluConfig(rate=0.3, ranks="fisher", bits=4)),
        ("palu-50:2bit:no-hadamard", PaluConfig(rate=0.5, bits=2, hadamard=False)),
        ("palu-0:graded=2.5:sinks=1", PaluConfig(rate=0.0, graded=2.5, sinks=1)),
        ("palu-30:graded=.75", PaluConfig(rate=0.3, graded=0.75)),
        ("palu-50:8bit:sinks=4:window=32", PaluConfig(rate=0.5, bits=8, sinks=4, window=32)),
        ("palu-12.5:gs2:multiple=8", PaluConfig(rate=0.125, group_size=2, rank_multiple=8)),
    ],
)
def test_palu(name: str, config: PaluConfig) -> None:
    method = parse_method(name)
    assert isinstance(method, Palu)
    assert method.config == config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("jolt", "The forms are: none;"),
        ("int9", "jolt-2.5x"),
        ("palu30", "palu-30:gs1"),
        ("", "forms are"),
        ("int4:window=3", "takes no options"),
        ("none:x", "takes no options"),
        ("jolt-3x:windows=3", "unknown option 'windows=3'.*post-rope.*window=N"),
        ("palu-30:gs", "unknown option 'gs'.*fisher"),
        ("jolt-0.5x", "ratio is at least 1"),
        ("jolt-3x:split=1.5", "unknown option 'split=1.5'"),
        ("jolt-3x:split=1", "split is the keys' share"),
        ("jolt-3x:slabs=0.0", "slab_share is above 0"),
        ("jolt-3x:seal=0", "seal is a number of tokens"),
        ("jolt-3x:fast", "exact.gram.randomized"),
        ("jolt-3x:rank-only:no-backbone", "nothing is stored"),
        ("jolt-3x:bits=9", "widths from 0 to 8"),
        ("jolt-3x:levels=cubic", "levels is one of"),
        ("kivi-1", "kivi-2, kivi-4"),
        ("kivi-2:groups=8", "unknown option 'groups=8'.*group=N.*window=N"),
        ("kivi-2:group=1", "group is a number of values"),
        ("kivi-2:seal=0", "seal is a number of tokens"),
        ("kvquant-3:outliers=.7", "share of at most 0.5"),
        ("fp8:bits=3", "unknown option 'bits=3'.*pre-rope"),
        ("xkv-0.5x", "ratio is at least 1"),
        ("xkv-3x:layers=0", "adjacent layers"),
        ("xkv-3x:split=0", "between 0 and 1"),
        ("quanto-3", "quanto-4"),
        ("palu-30:5bit", "bits must be one of 2, 3, 4, 8 or 16, not 5"),
        ("palu-30:sinks=4", "Set bits below 16"),
        ("palu-100", "rate is the fraction"),
        ("palu-30:gs0", "group_size must be a positive"),
    ],
)
def test_mistakes_are_answered_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_method(name)


def test_lists() -> None:
    assert [method.name for method in parse_methods("none, int8,jolt-3x:post-rope")] == [
        "none",
        "int8",
        "jolt-3x:post-rope",
    ]
    with pytest.raises(ConfigError, match="twice: int8"):
        parse_methods("int8,none,int8")
    with pytest.raises(ConfigError, match="at least one"):
        parse_methods(" , ")


def test_palu_needs_calibration_unless_it_is_plain() -> None:
    with pytest.raises(ConfigError, match="palu-30, palu-50:sequential must be calibrated"):
        check_methods(parse_methods("none,palu-30,palu-50:sequential,palu-30:svd"), calibrated=False)
    check_methods(parse_methods("none,palu-30"), calibrated=True)
    check_methods(parse_methods("none,palu-30:svd"), calibrated=False)


@pytest.mark.parametrize(
    "name", ["none", "int4", "rot4", "jolt-3x", "palu-30:fisher", "kivi-2", "fp8", "xkv-3x", "hqq-4"]
)
def test_settings_survive_json(name: str) -> None:
    settings = parse_method(name).settings
    assert json.loads(json.dumps(settings)) == settings
