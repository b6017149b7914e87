"""Every baseline in a model: generation, padding, crops, both attention modes, errors as on record."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvslim.baselines import Float8Cache, KiviCache, KvquantCache, XkvCache
from kvslim.baselines.base import BaselineCache
from kvslim.caching.block import iter_tensors
from tiny import VOCAB, build

Make = Callable[..., BaselineCache]

MAKERS: dict[str, Make] = {
    "kivi-4": lambda model, **kw: KiviCache(model, 4, **kw),
    "kivi-2": lambda model, **kw: KiviCache(model, 2, **kw),
    "kvquant-3": lambda model, **kw: KvquantCache(model, 3, **kw),
    "fp8": Float8Cache,
    "xkv-2x": lambda model, **kw: XkvCache(model, 2, layers=2, **kw),
    "xkv-2x-post": lambda model, **kw: XkvCache(model, 2, layers=2, pre_rope=False, **kw),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Three layers, so that xKV's last group is shorter; head dim 12, no multiple of a group."""
    return build("llama-gqa", layers=3)


def prompt(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def filled(model: PreTrainedModel, make: Make, tokens: int = 77, **options: object) -> BaselineCache:
    cache = make(model, **options)
    model(prompt(1, tokens), past_key_values=cache)
    cache.compress()
    assert cache.prefix is not None
    return cache


def test_bytes_are_those_of_the_storages(model: PreTrainedModel, make: Make) -> None:
    cache = filled(model, make)
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in iter_tensors(cache.prefix)
               if t.numel()}  # fmt: skip
    shared = cache.rope.inv_freq.untyped_storage().nbytes() if cache.rope is not None else 0
    assert cache.nbytes == cache.prefix_nbytes == sum(tensors.values()) - shared
    assert cache.report().ratio > 1.5
    narrow, sinks = (torch.uint8, torch.float16, torch.int16, torch.float8_e4m3fn), 2 * 3 * 2 * 4 * 12
    assert all(t.dtype in narrow or t.numel() <= sinks for t in iter_tensors(cache.prefix))  # nothing dense is left


@pytest.mark.parametrize("tokens", [1, 13, 44])
def test_crop_keeps_what_was_decoded(model: PreTrainedModel, make: Make, tokens: int) -> None:
    cache = filled(model, make)
    before = [tuple(dense.clone() for dense in layer.dense()) for layer in cache.compressible]
    held = cache.nbytes
    cache.crop(-tokens)
    assert cache.get_seq_length() == 77 - tokens
    for pair, layer in zip(before, cache.compressible, strict=True):
        for dense, cropped in zip(pair, layer.dense(), strict=True):
            assert torch.allclose(cropped, dense[:, :, : 77 - tokens], atol=1e-5)
    assert cache.nbytes <= held


def test_generate_with_left_padding(model: PreTrainedModel, make: Make) -> None:
    """A padded row gets the tokens and the bytes that it gets alone."""
    ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    ids[1, :23], mask[1, :23] = 0, 0
    cache = make(model, attention_mask=mask)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert cache.get_seq_length() == 67
    alone = make(model)
    single = model.generate(ids[1:, 23:], past_key_values=alone, max_new_tokens=8, do_sample=False)
    assert out[1, 60:].tolist() == single[0, 37:].tolist()
    assert cache.prefix is not None
    assert alone.prefix is not None
    assert [row.length for row in cache.prefix.rows] == [60, 37]
    others = make(model)
    model.generate(ids[:1], past_key_values=others, max_new_tokens=8, do_sample=False)
    assert cache.prefix_nbytes == alone.prefix_nbytes + others.prefix_nbytes


def test_later_tokens_are_sealed(model: PreTrainedModel, make: Make) -> None:
    cache = filled(model, make, seal=40)
    with torch.no_grad():
        for at in range(75):
            model(prompt(1, 1, seed=at), past_key_values=cache)
    assert {cell.start for cell in cache.report().cells} == {cache.n_sinks, 77}
    assert cache.get_seq_length() == 152
    cache.crop(-60)
    assert cache.get_seq_length() == 92


@torch.no_grad()
def test_attention_reads_the_codes_as_they_decode(model: PreTrainedModel, make: Make) -> None:
    cache, logits = filled(model, make), []
    for attention in ("kvslim", "sdpa"):
        model.set_attn_implementation(attention)
        logits.append(model(prompt(1, 4, seed=1), past_key_values=copy.deepcopy(cache)).logits)
    assert torch.allclose(*logits, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(make: Make, dtype: torch.dtype) -> None:
    model = build("llama-gqa", layers=3).to(dtype)
    cache = filled(model, make, window=9)
    keys, values = cache.compressible[1].dense()
    assert keys.dtype == values.dtype == dtype
    assert 0 < cache.report().key_error < 0.7


# Relative errors of keys and values that an independent implementation of KIVI measured on SmolLM2-135M, WikiText-2
# test text, 12 windows of 2048 tokens, groups of 32, nothing exact.
@pytest.mark.slow
@pytest.mark.parametrize(("bits", "keys", "values"), [(4, 0.040, 0.084), (2, 0.200, 0.424)])
def test_errors_on_a_real_model(default_model_dir: Path, bits: int, keys: float, values: float) -> None:
    from kvslim.models import load

    model, tokenizer = load(str(default_model_dir))
    text = Path(__file__).resolve().parents[2].joinpath("docs", "architecture.md").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :2048]
    cache = KiviCache(model, bits)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    cache.compress()
    report = cache.report()
    assert report.key_error == pytest.approx(keys, rel=0.2)
    assert report.value_error == pytest.approx(values, rel=0.2)
