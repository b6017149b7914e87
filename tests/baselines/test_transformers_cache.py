"""transformers' quantized cache: every byte counted, what attention sees, words where a package is missing."""

import pytest
import torch
from transformers import PreTrainedModel

from kvslim.baselines import TransformersCache, transformers_cache
from kvslim.baselines.transformers_cache import rebuilt, stored_tensors
from kvslim.errors import CacheStateError, ConfigError, MissingDependencyError, UnsupportedModelError
from kvslim.evaluating.compare import compare
from kvslim.evaluating.continuation import ContinuationConfig, cache_bytes
from kvslim.evaluating.methods import parse_methods

PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}
TOKENS = 98


@pytest.fixture(params=PACKAGES)
def backend(request: pytest.FixtureRequest) -> str:
    if not transformers_cache._installed(PACKAGES[request.param]):
        pytest.skip(f"{PACKAGES[request.param]} is not installed")
    return str(request.param)


@pytest.fixture
def model(make_tiny) -> PreTrainedModel:
    model: PreTrainedModel = make_tiny(head_dim=64)
    return model


def ids(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, 128, (1, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [2, 4])
@torch.no_grad()
def test_bytes(model: PreTrainedModel, backend: str, bits: int) -> None:
    """Codes, and a scale and a shift of two bytes per 64 numbers; the tokens that came later are exact in bf16."""
    cache = TransformersCache(model, backend, bits)
    model(ids(), past_key_values=cache)
    numbers = 2 * 2 * 2 * 64 * TOKENS  # layers, kinds, heads, features
    coded = numbers * bits // 8 + numbers // 64 * 4
    assert cache_bytes(cache) == cache.nbytes == coded
    assert all(t.dtype in (torch.uint8, torch.bfloat16) for layer in cache.layers for t in stored_tensors(layer))
    model(ids(5), past_key_values=cache)
    assert cache.nbytes == coded + 2 * numbers // TOKENS * 5
    assert cache.get_seq_length() == TOKENS + 5


@torch.no_grad()
def test_what_attention_sees(model: PreTrainedModel, backend: str) -> None:
    dense = model(ids(), use_cache=True).past_key_values
    errors = []
    for bits in (2, 4):
        cache = TransformersCache(model, backend, bits)
        model(ids(), past_key_values=cache)
        keys, values = rebuilt(cache.layers[0])
        seen_keys, seen_values = cache.layers[0].update(*torch.zeros(2, 1, 2, 1, 64, dtype=torch.bfloat16))
        assert torch.equal(seen_keys[:, :, :TOKENS], keys)
        assert torch.equal(seen_values[:, :, :TOKENS], values)
        exact = dense.layers[0]
        errors.append(float((keys.float() - exact.keys).norm() / exact.keys.norm()))
    assert 0.01 < errors[1] < 0.15 < errors[0] < 0.9


def test_hqq_needs_groups_that_fill_bytes(model: PreTrainedModel) -> None:
    if not transformers_cache._installed("hqq"):
        pytest.skip("hqq is not installed")
    with torch.no_grad(), pytest.raises(ConfigError, match="194 groups at 2 bits do not fill"):
        model(ids(97), past_key_values=TransformersCache(model, "hqq", 2))


def test_generate(model: PreTrainedModel, backend: str) -> None:
    cache = TransformersCache(model, backend, 4, residual_length=4)
    out = model.generate(ids(), past_key_values=cache, max_new_tokens=9, do_sample=False)
    assert out.shape == (1, TOKENS + 9)
    assert cache.get_seq_length() == TOKENS + 8
    with pytest.raises(CacheStateError, match="cannot take tokens back"):
        cache.crop(-1)


def test_it_is_evaluated_like_the_others(model: PreTrainedModel, backend: str) -> None:
    windows = torch.randint(2, 128, (1, 121), generator=torch.Generator().manual_seed(0))
    four, two, kivi = compare(
        model, parse_methods(f"{backend}-4,{backend}-2,kivi-4"), windows, ContinuationConfig(tokens=96, score=24)
    )
    assert four.ratio == pytest.approx(16 / 4.5)
    assert two.ratio == pytest.approx(16 / 2.5)
    assert 0 < four.kl < two.kl
    assert kivi.value_error / 3 < four.value_error < two.value_error
    assert four.settings == {"bits": 4, "backend": backend, "group": 64, "residual_length": 128}


def test_mistakes(model: PreTrainedModel, make_tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="backend is one of quanto, hqq"):
        TransformersCache(model, "gptq", 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="quanto codes at 2, 4 bits, not 3"):
        TransformersCache(model, "quanto", 3)
    with pytest.raises(ConfigError, match="group must divide the 2 KV heads x 64 features"):
        TransformersCache(model, "hqq", 4, group=96)
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        TransformersCache(make_tiny("mistral", head_dim=64, sliding_window=16), "hqq", 4)
    monkeypatch.setattr(transformers_cache, "_installed", lambda module: False)
    for backend, package in (("quanto", "optimum-quanto"), ("hqq", "hqq")):
        with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
            TransformersCache(model, backend, 4)


def test_a_package_in_a_missing_package_is_missing() -> None:
    assert not transformers_cache._installed("no_such_package.inside")
    assert transformers_cache._installed("torch.nn")
