"""The per-token baselines: bytes as published, error falling with the width, exact tokens exact."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from kvslim.baselines import IntegerCache, RotatedCache
from kvslim.caching.compressed import CompressedCache

MakeTiny = Callable[..., PreTrainedModel]


def compressed(model: PreTrainedModel, cache: CompressedCache, tokens: int = 200) -> CompressedCache:
    ids = torch.randint(2, 128, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.compress()
    return cache


# bits per number with head dim 64: codes, and 16 bits of scale (and 16 of minimum) per 64 numbers
@pytest.mark.parametrize(("bits", "ratio"), [(8, 16 / 8.5), (4, 16 / 4.5), (3, 16 / 3.5), (2, 16 / 2.5)])
def test_integer_bytes(make_tiny: MakeTiny, bits: int, ratio: float) -> None:
    model = make_tiny(head_dim=64)
    assert compressed(model, IntegerCache(model, bits)).report().ratio == pytest.approx(ratio)


@pytest.mark.parametrize(("bits", "ratio"), [(6, 16 / 6.25), (5, 16 / 5.25), (4, 16 / 4.25), (2, 16 / 2.25)])
def test_rotated_bytes(make_tiny: MakeTiny, bits: int, ratio: float) -> None:
    model = make_tiny(head_dim=64)
    assert compressed(model, RotatedCache(model, bits)).report().ratio == pytest.approx(ratio)


@pytest.mark.parametrize("cache_type", [IntegerCache, RotatedCache])
def test_error_falls_with_the_width(make_tiny: MakeTiny, cache_type: type[IntegerCache] | type[RotatedCache]) -> None:
    model = make_tiny(head_dim=64)
    errors = [compressed(model, cache_type(model, bits)).report().value_error for bits in (2, 3, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


def test_sinks_and_window_are_exact(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    cache = IntegerCache(model, 2, sinks=4, window=6)
    ids = torch.randint(2, 128, (1, 50))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    exact = cache.compressible[0].keys.clone()
    cache.compress()
    rebuilt, _ = cache.compressible[0].dense()
    assert torch.equal(rebuilt[:, :, :4], exact[:, :, :4])
    assert torch.equal(rebuilt[:, :, -6:], exact[:, :, -6:])
    assert not torch.equal(rebuilt, exact)
