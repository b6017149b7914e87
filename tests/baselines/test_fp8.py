"""Eight-bit floats: relative precision of e4m3, one scale per layer and head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvslim.baselines import Float8Cache
from kvslim.baselines.fp8 import encode


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.sampled_from([1, 31, 32, 33]), channels=st.sampled_from([1, 16, 33]), seed=st.integers(0, 99),
    scale=st.sampled_from([1e-42, 1e-20, 1.0, 1e35]), data=st.data(),
)  # fmt: skip
def test_round_trip(tokens: int, channels: int, seed: int, scale: float, data: st.DataObject) -> None:
    x = torch.randn(2, tokens, channels, generator=torch.Generator().manual_seed(seed)) * scale
    block = encode(x)
    decoded = block.decode(0)
    # Three mantissa bits are half a step of 2**-4; below 2**-6 times the scale numbers are multiples of 2**-9.
    allowed = torch.maximum(x.abs() * 2.0**-4, block.scales[:, None, None] * 2.0**-10)
    assert ((decoded - x).abs() <= allowed * 1.0001).all()
    assert block.nbytes == 2 * (tokens * channels + 4)
    stop = data.draw(st.integers(1, tokens))
    start = data.draw(st.integers(0, stop))
    assert torch.equal(block.decode(0, start, stop), decoded[:, start:stop])
    assert torch.equal(block.crop(stop).decode(0), decoded[:, :stop])
    assert block.crop(stop).nbytes == 2 * (stop * channels + 4)


def test_the_largest_magnitude_is_the_largest_code() -> None:
    x = torch.zeros(2, 3, 4)
    x[0, 1, 2], x[1, 0, 0] = -896.0, 7.0
    block = encode(x)
    assert block.codes.dtype == torch.float8_e4m3fn
    assert block.scales.tolist() == [2.0, 7 / 448]
    assert torch.equal(block.decode(0), x)
    assert torch.equal(encode(torch.zeros(1, 2, 3)).decode(0), torch.zeros(1, 2, 3))


@pytest.mark.parametrize("pre_rope", [False, True])
def test_a_head_has_its_own_scale(tiny_llama: PreTrainedModel, pre_rope: bool) -> None:
    cache = Float8Cache(tiny_llama, pre_rope=pre_rope)
    with torch.no_grad():
        tiny_llama(torch.arange(2, 102)[None], past_key_values=cache)
    cache.compress()
    report = cache.report()
    assert report.prefix_nbytes == 2 * 2 * 2 * (100 * 16 + 4)  # layers, kinds, heads
    assert 0.005 < report.key_error < 0.04
