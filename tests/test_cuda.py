"""The same methods on a GPU: near-lossless caches and full-rank Palu generate what the model itself generates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.caching.compressed import CompressedCache
from kvslim.evaluating.methods import CacheMethod, parse_method
from kvslim.jolt import JoltCache
from kvslim.quantizing import integer, rotated
from kvslim.recovery import RecoveryConfig, recover

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MakeTiny = Callable[..., PreTrainedModel]
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 128, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    ids[1, :13], mask[1, :13] = 0, 0
    return ids, mask


@pytest.mark.parametrize(
    "make",
    [
        lambda model, mask: JoltCache(model, budget_bytes=10**9, attention_mask=mask),
        lambda model, mask: JoltCache(model, budget_bytes=10**9, pre_rope=False),
    ],
    ids=["jolt", "jolt-post"],
)
def test_run_time_caches(make_tiny: MakeTiny, make: Callable[..., object]) -> None:
    model = make_tiny().cuda()
    ids, mask = batch()
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(model.generate(ids, attention_mask=mask, past_key_values=make(model, mask), **OPTIONS), expected)


@pytest.mark.parametrize("pre_rope", [True, False], ids=["pre", "post"])
def test_handle_mode_gives_what_decompress_mode_gives(make_tiny: MakeTiny, pre_rope: bool) -> None:
    model = make_tiny().cuda()
    ids = torch.randint(2, 128, (2, 300), generator=torch.Generator().manual_seed(1)).cuda()
    logits = []
    for implementation in ("sdpa", "kvslim"):
        model.set_attn_implementation(implementation)
        cache = JoltCache(model, ratio=3, window=8, pre_rope=pre_rope)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.compress()
            cache.offload_prefix("cpu" if pre_rope else "cuda")
            steps = [model(ids[:, :n], past_key_values=cache).logits for n in (5, 1)]
        logits.append(torch.cat(steps, dim=1))
    assert torch.allclose(logits[0], logits[1], atol=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("codec", [rotated, integer])
def test_codecs_agree_with_the_cpu(codec: ModuleType, bits: int) -> None:
    x = torch.randn(3, 50, 96, generator=torch.Generator().manual_seed(bits))
    there, here = codec.decode(codec.encode(x.cuda(), bits)).cpu(), codec.decode(codec.encode(x, bits))
    # a number on a threshold may fall to either side
    assert (there - here).norm() < 0.02 * (here - x).norm() + 1e-4 * x.norm()


@pytest.mark.parametrize("name", ["kivi-2", "kvquant-3", "fp8", "xkv-2x"])
def test_baselines_err_as_on_the_cpu(make_tiny: MakeTiny, name: str) -> None:
    method, reports = parse_method(name), []
    assert isinstance(method, CacheMethod)
    for device in ("cpu", "cuda"):
        model = make_tiny().to(device)
        ids = torch.randint(2, 128, (1, 300), generator=torch.Generator().manual_seed(1)).to(device)
        cache = method.make_cache(model)
        assert isinstance(cache, CompressedCache)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            cache.compress()
            cache.offload_prefix("cpu")  # and what it holds travels back when attention asks
            assert torch.isfinite(model(ids[:, :3], past_key_values=cache).logits).all()
        reports.append(cache.report())
    here, there = reports
    assert there.prefix_nbytes == here.prefix_nbytes
    assert there.key_error == pytest.approx(here.key_error, rel=0.02)
    assert there.value_error == pytest.approx(here.value_error, rel=0.02)


def test_jolt_plans_the_same_as_on_the_cpu(make_tiny: MakeTiny) -> None:
    reports = []
    for device in ("cpu", "cuda"):
        model = make_tiny().to(device)
        ids = torch.randint(2, 128, (1, 300), generator=torch.Generator().manual_seed(1)).to(device)
        cache = JoltCache(model, ratio=3)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        cache.compress()
        reports.append(cache.report())
    assert reports[0].prefix_nbytes == pytest.approx(reports[1].prefix_nbytes, rel=0.01)
    assert reports[0].key_error == pytest.approx(reports[1].key_error, rel=0.02)
    assert reports[0].value_error == pytest.approx(reports[1].value_error, rel=0.02)


def test_palu(make_tiny: MakeTiny) -> None:
    model = make_tiny().cuda()
    ids, mask = batch()
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    windows = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(7))
    palu.compress(model, None, palu.PaluConfig(rate=0.0), windows)
    assert torch.equal(model.generate(ids, attention_mask=mask, **OPTIONS), expected)


class _Letters:
    """One token per character of ASCII."""

    bos_token_id, eos_token_id, chat_template = 1, 2, None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recovery(make_tiny: MakeTiny, tmp_path: Path, dtype: torch.dtype) -> None:
    windows = torch.randint(2, 128, (4, 48), generator=torch.Generator().manual_seed(2))
    model = palu.compress(make_tiny().cuda(), None, palu.PaluConfig(rate=0.5), windows).to(dtype)
    broken, random = copy.deepcopy(model), torch.cuda.get_rng_state()
    rows = [" ".join(map(str, range(n))) for n in range(5, 25)]
    config = RecoveryConfig(rank=4, learning_rate=1e-2, steps=30, max_length=48)
    report = recover(model, _Letters(), rows, config)
    assert report.last_loss < report.first_loss

    def interrupt(_: str, step: int, __: int) -> None:
        if step == 13:
            raise KeyboardInterrupt

    place = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        recover(broken, _Letters(), rows, config, checkpoint=place, checkpoint_every=10, progress=interrupt)
    after = recover(broken, _Letters(), rows, config, checkpoint=place)
    assert after.losses[:13] == pytest.approx(report.losses[:13], rel=1e-3)
    assert after.losses == pytest.approx(report.losses, rel=0.05)
    assert torch.equal(torch.cuda.get_rng_state(), random)
