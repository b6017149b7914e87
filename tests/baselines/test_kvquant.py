"""KVQuant-like codes: outliers exact, levels better than uniform ones, bytes by the formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from kvslim.baselines import KvquantCache
from kvslim.baselines.kvquant import encode as encode_block
from kvslim.errors import ConfigError
from kvslim.quantizing.codebook import gaussian_levels
from kvslim.quantizing.non_uniform import decode, encode, fit_levels, outlier_count, stored_bytes

TOKENS = st.sampled_from([1, 2, 31, 32, 33, 100, 257])
CHANNELS = st.sampled_from([1, 16, 33, 96])


def heavy_tailed(tokens: int, channels: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Student's t with three degrees of freedom, channels of different magnitude."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, tokens, channels, generator=generator)
    x = normal[0] / normal[1:].square().mean(0).sqrt().clamp_min(1e-3)
    return x * torch.randn(channels, generator=generator).exp() * scale


@settings(max_examples=60, deadline=None)
@given(
    tokens=TOKENS, channels=CHANNELS, bits=st.sampled_from([2, 3, 4]), per_channel=st.booleans(),
    share=st.sampled_from([0.0, 0.01, 0.1]), seed=st.integers(0, 99), scale=st.sampled_from([1e-20, 1.0, 1e25]),
    data=st.data(),
)  # fmt: skip
def test_round_trip(
    tokens: int, channels: int, bits: int, per_channel: bool, share: float, seed: int, scale: float,
    data: st.DataObject,
) -> None:  # fmt: skip
    x = heavy_tailed(tokens, channels, seed, scale)
    block = encode_block(x[None], bits, per_channel=per_channel, share=share)
    assert block.nbytes == stored_bytes(tokens, channels, bits, per_channel, share)
    decoded = block.decode(0)
    assert decoded.shape == (1, tokens, channels)
    # Every number comes back inside the range of its vector, so no further off than that range.
    dim = 0 if per_channel else 1
    spread = x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)
    assert ((decoded[0] - x).abs() <= spread + x.abs().max() * 2.0**-9).all()
    stop = data.draw(st.integers(1, tokens))
    start = data.draw(st.integers(0, stop))
    assert torch.equal(block.decode(0, start, stop), decoded[:, start:stop])
    cropped = block.crop(stop)
    assert torch.equal(cropped.decode(0), decoded[:, :stop])
    assert torch.equal(cropped.crop(max(1, start)).decode(0), decoded[:, : max(1, start)])
    assert cropped.nbytes <= block.nbytes


@pytest.mark.parametrize("per_channel", [True, False])
def test_outliers_are_exact(per_channel: bool) -> None:
    x = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    planted = x if per_channel else x.T  # one vector per row of its transpose
    planted[7] = 500.0
    planted[150 if per_channel else 50] = -300.0
    back = decode(encode(x, 3, per_channel=per_channel, share=0.02))
    back = back if per_channel else back.T
    assert torch.equal(back[7], planted[7])
    assert torch.equal(back[150 if per_channel else 50], planted[150 if per_channel else 50])
    uniform = torch.linspace(-1, 1, 8)
    errors = [
        float((decode(encode(x, 3, per_channel=per_channel, share=share, levels=uniform)) - x).norm())
        for share in (0.02, 0.0)
    ]
    assert errors[0] < errors[1] / 4  # outliers that are not kept widen the step of all others


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("per_channel", [True, False])
def test_levels_beat_uniform_ones_on_heavy_tails(bits: int, per_channel: bool) -> None:
    """What non-uniform levels are for (KVQuant, Sec. 3.3): the same bytes, less error."""
    x = heavy_tailed(512, 96)
    uniform = torch.linspace(-1, 1, 1 << bits)
    for share in (0.0, 0.01):
        fitted = encode(x, bits, per_channel=per_channel, share=share)
        spaced = encode(x, bits, per_channel=per_channel, share=share, levels=uniform)
        assert fitted.codes.shape == spaced.codes.shape
        assert (decode(fitted) - x).norm() < 0.9 * (decode(spaced) - x).norm()


def test_k_means_finds_the_levels_of_a_normal_variable() -> None:
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    scale = x.abs().max()
    found = fit_levels(x / scale, torch.ones(1), 2) * scale
    assert torch.allclose(found, gaussian_levels(2).float(), atol=0.02)


def test_k_means_goes_by_the_weights() -> None:
    x = torch.tensor([-1.0, -0.5, 0.25, 1.0])
    assert torch.allclose(fit_levels(x, torch.tensor([1.0, 3.0, 1.0, 1.0]), 1), torch.tensor([-0.625, 0.625]))
    assert torch.allclose(fit_levels(x, torch.tensor([1.0, 0.0, 0.0, 1.0]), 1), torch.tensor([-1.0, 1.0]))
    assert torch.equal(fit_levels(x, torch.zeros(4), 2), torch.linspace(-1, 1, 4))


def test_constant_vectors_are_exact() -> None:
    x = torch.full((40, 8), 3.0)
    for per_channel in (True, False):
        assert torch.equal(decode(encode(x, 2, per_channel=per_channel)), x)
        assert torch.equal(decode(encode(torch.zeros(5, 3), 2, per_channel=per_channel)), torch.zeros(5, 3))


def test_a_crop_forgets_the_outliers_behind_it() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    x[:5, 0] = 100.0
    x[290:295, 1:] = 100.0
    stored = encode(x, 4, per_channel=True, share=5 / 300)
    assert stored.places.shape == (4, 5)
    cropped = stored.crop(100)
    assert torch.equal(decode(cropped), decode(stored)[:100])
    assert cropped.places.shape == (4, 5)  # channel 0 still has all of its five
    assert (cropped.places[1:] == -1).all()
    assert encode(x, 4, per_channel=True, share=5 / 300).crop(3).places.shape == (4, 3)


def test_long_sequences_have_wider_indices() -> None:
    x = torch.zeros(40_000, 1)
    x[39_999] = 7.0
    stored = encode(x, 2, per_channel=True, share=1 / 40_000)
    assert stored.places.dtype == torch.int32
    assert decode(stored)[39_999] == 7
    assert outlier_count(0.01, 192) == 2


def test_settings_as_published(make_tiny) -> None:
    """Keys pre-RoPE, one exact token; bits per number: 3, 1 % of 32 bits, and 32 bits of scale per vector."""
    model = make_tiny(head_dim=64)
    cache = KvquantCache(model, 3)
    with torch.no_grad():
        model(torch.randint(2, 128, (1, 401), generator=torch.Generator().manual_seed(0)), past_key_values=cache)
    exact = cache.compressible[0].keys.clone()
    cache.compress()
    assert cache.rope is not None
    assert torch.equal(cache.compressible[0].dense()[0][:, :, :1], exact[:, :, :1])
    keys = stored_bytes(400, 128, 3, True, 0.01)
    values = stored_bytes(400, 128, 3, False, 0.01)
    assert keys == 400 * 48 + 128 * (4 + 4 * 4) + 16
    assert cache.prefix_nbytes == 2 * (keys + values) + 2 * 2 * 128 * 4  # an exact float32 token in two layers
    report = cache.report()
    assert all("exact each" in cell.plan for cell in report.cells)
    assert report.key_error < 0.2


def test_more_bits_and_outliers_err_less(tiny_llama: PreTrainedModel) -> None:
    errors = []
    for bits, outliers in ((2, 0.0), (2, 0.05), (3, 0.05), (4, 0.05)):
        cache = KvquantCache(tiny_llama, bits, outliers=outliers)
        with torch.no_grad():
            tiny_llama(torch.arange(2, 128)[None], past_key_values=cache)
        cache.compress()
        errors.append((cache.report().key_error, cache.report().value_error))
    assert errors == sorted(errors, reverse=True)
    assert [value for _, value in errors] == sorted((value for _, value in errors), reverse=True)


def test_mistakes(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="2 to 8, not 9"):
        KvquantCache(tiny_llama, 9)
    with pytest.raises(ConfigError, match="outliers is the share"):
        KvquantCache(tiny_llama, 3, outliers=0.6)
