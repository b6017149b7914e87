"""KIVI: bytes as published, errors within half a step of a group, cropping inside groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from kvslim.baselines import KiviCache
from kvslim.baselines.kivi import encode_keys, encode_values
from kvslim.errors import ConfigError
from kvslim.quantizing import integer, token_groups
from kvslim.quantizing.packing import packed_bytes

TOKENS = st.sampled_from([1, 31, 32, 33, 64, 100])
CHANNELS = st.sampled_from([1, 16, 33, 40, 64])


def sample(heads: int, tokens: int, channels: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, tokens, channels, generator=generator) * scale
    return x * torch.randn(channels, generator=generator).exp()


def ranges(x: Tensor, dim: int, group: int) -> Tensor:
    """Largest minus least of the group of 32 that each number is in, and the largest magnitude; of ``x``'s shape."""
    out = torch.empty_like(x)
    for piece, target in zip(x.split(group, dim), out.split(group, dim), strict=True):
        target.copy_((piece.amax(dim, keepdim=True) - piece.amin(dim, keepdim=True)).expand_as(piece))
    return out


def tolerance(x: Tensor, dim: int, bits: int, group: int = 32) -> Tensor:
    """Half a step, and what rounding minimum and step to float16 can add."""
    spread = ranges(x, dim, group)
    return spread / (2**bits - 1) / 2 + (spread + x.abs().max()) * 2.0**-10


@settings(max_examples=60, deadline=None)
@given(
    tokens=TOKENS, channels=CHANNELS, bits=st.sampled_from([2, 4]), seed=st.integers(0, 99),
    scale=st.sampled_from([1e-20, 1.0, 1e25]), data=st.data(),
)  # fmt: skip
def test_round_trip(tokens: int, channels: int, bits: int, seed: int, scale: float, data: st.DataObject) -> None:
    x = sample(2, tokens, channels, seed, scale)
    for block, dim in ((encode_keys(x, bits), 1), (encode_values(x, bits), 2)):
        decoded = block.decode(0)
        assert ((decoded - x).abs() <= tolerance(x, dim, bits)).all()
        assert block.tokens == tokens
        stop = data.draw(st.integers(1, tokens))
        start = data.draw(st.integers(0, stop))
        assert torch.equal(block.decode(0, start, stop), decoded[:, start:stop])
        cropped = block.crop(stop)
        assert torch.equal(cropped.decode(0), decoded[:, :stop])
        assert cropped.tokens == stop
        twice = cropped.crop(max(1, stop // 2))
        assert torch.equal(twice.decode(0), decoded[:, : max(1, stop // 2)])
        assert cropped.nbytes == (encode_keys if dim == 1 else encode_values)(x[:, :stop], bits).nbytes


@given(tokens=TOKENS, channels=CHANNELS, bits=st.sampled_from([2, 3, 4]))
@settings(max_examples=30, deadline=None)
def test_bytes_are_those_of_codes_steps_and_minima(tokens: int, channels: int, bits: int) -> None:
    x = sample(3, tokens, channels, 0)
    assert encode_keys(x, bits).nbytes == 3 * token_groups.stored_bytes(tokens, channels, bits, 32)
    sizes = [min(32, channels - first) for first in range(0, channels, 32)]
    assert encode_values(x, bits).nbytes == 3 * tokens * sum(packed_bytes(size, bits) + 4 for size in sizes)


def test_constant_rows_and_channels_are_exact() -> None:
    x = torch.zeros(1, 40, 64)
    x[..., 3] = 5.0
    assert torch.equal(encode_keys(x, 2).decode(0), x)
    assert torch.equal(encode_values(x.mT.contiguous(), 2).decode(0), x.mT)
    assert torch.equal(encode_keys(torch.zeros(2, 5, 7), 2).decode(0), torch.zeros(2, 5, 7))


def test_a_hand_checked_group() -> None:
    """Channel 0 goes from 0 to 3, so two bits hold it exactly; a third token makes a group of its own."""
    x = torch.tensor([[[0.0, 10.0], [3.0, 40.0], [7.0, -8.0]]])
    block = token_groups.encode(x, 2, 2)
    assert [(part.size, tuple(part.codes.shape)) for part in block.parts] == [(2, (1, 1, 2, 1)), (1, (1, 1, 2, 1))]
    assert block.parts[0].codes[0, 0].flatten().tolist() == [0b1100, 0b1100]
    assert torch.equal(token_groups.decode(block), x)


def test_channels_with_outliers_are_coded_better_per_channel() -> None:
    """Why keys are coded per channel (KIVI, Sec. 3): a few channels of large magnitude spoil every token's step."""
    x = torch.randn(2, 128, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] += 30
    x[..., 40] -= 20
    per_channel = (encode_keys(x, 2).decode(0) - x).norm()
    per_token = (integer.decode(integer.encode(x, 2)) - x).norm()
    assert per_channel < per_token / 3


# Two bytes of step and two of minimum per 32 numbers are one bit per number: 2 + 1 = 3 bits, 16 / 3 times smaller.
@pytest.mark.parametrize(("bits", "ratio"), [(2, 16 / 3), (4, 16 / 5)])
def test_published_bits(make_tiny, bits: int, ratio: float) -> None:
    model = make_tiny(head_dim=64)
    cache = KiviCache(model, bits)
    with torch.no_grad():
        model(torch.arange(2, 98)[None], past_key_values=cache)
    cache.compress()
    assert cache.report().ratio == pytest.approx(ratio)


def test_window_and_seal_as_published(tiny_llama: PreTrainedModel) -> None:
    """The last 16 tokens stay exact, and 64 later ones are coded once there are enough behind those."""
    cache = KiviCache(tiny_llama, 2, window=16, seal=64)
    ids = torch.randint(2, 128, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tiny_llama(ids, past_key_values=cache)
        exact = cache.compressible[0].keys.clone()
        tiny_llama(ids[:, :1], past_key_values=cache)
        rebuilt, _ = cache.compressible[0].dense()
        assert torch.equal(rebuilt[:, :, 84:100], exact[:, :, 84:])
        assert not torch.equal(rebuilt[:, :, :84], exact[:, :, :84])
        for _ in range(100):
            tiny_llama(ids[:, :1], past_key_values=cache)
    assert {cell.start for cell in cache.report().cells} == {0, 100}
    assert cache.get_seq_length() == 201


def test_mistakes(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="2 to 8, not 1"):
        KiviCache(tiny_llama, 1)
    with pytest.raises(ConfigError, match="group is a number"):
        KiviCache(tiny_llama, 2, group=1)
