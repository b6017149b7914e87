"""Channels at widths of their own: exact layouts, errors as Lloyd-Max promises, scales in a byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.errors import ConfigError
from kvslim.quantizing import channels
from kvslim.quantizing.channels import WIDTHS, layout_of
from kvslim.quantizing.codebook import gaussian_levels, gaussian_mse


@settings(max_examples=60, deadline=None)
@given(
    widths=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=6),
    run=st.integers(1, 9),
    missing=st.integers(0, 8),
    tokens=st.integers(0, 20),
    seed=st.integers(0, 99),
)
def test_what_is_coded_is_decoded(widths: list[int], run: int, missing: int, tokens: int, seed: int) -> None:
    layout = layout_of(widths, run, len(widths) * run - min(missing, run - 1))
    latents = torch.randn(tokens, len(layout.kept), generator=torch.Generator().manual_seed(seed))
    codes, scales = channels.encode(latents, layout)
    assert codes.shape == (tokens, layout.row_bytes)
    assert codes.numel() + scales.numel() == layout.nbytes(tokens)
    decoded = channels.decode(codes, scales, layout)
    assert decoded.shape == latents.shape
    # coding what was decoded changes nothing: every value is a level
    levels = channels.unscaled(codes, layout)
    for width, columns, _ in layout.parts:
        known = gaussian_levels(width).float()
        assert ((levels[:, columns, None] - known).abs().amin(-1) < 1e-6).all()
    # tokens stand alone once the scales are there
    cut = channels.decode(codes[3:7], scales, layout)
    assert torch.equal(cut, decoded[3:7])


def test_rows_hold_the_widest_channels_first_and_no_bit_is_wasted() -> None:
    layout = layout_of([2, 0, 8, 3], 8, 32)
    assert layout.groups == ((8, (2,)), (3, (3,)), (2, (0,)))
    assert layout.kept == (*range(16, 24), *range(24, 32), *range(8))
    assert layout.row_bytes == 8 + 3 + 2
    assert layout.scale_bytes == 24


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_errors_are_those_of_lloyd_max_within_the_cost_of_a_scale_in_a_byte(width: int) -> None:
    latents = torch.randn(40_000, 3, generator=torch.Generator().manual_seed(1)) * torch.tensor([0.3, 1.0, 7.0])
    layout = layout_of([width], 3, 3)
    error = (channels.decode(*channels.encode(latents, layout), layout) - latents).square().mean(0)
    best = gaussian_mse(gaussian_levels(width))
    assert (error / latents.square().mean(0) < 1.06 * best).all()
    assert (error / latents.square().mean(0) > 0.9 * best).all()


def test_curves_are_measured_errors_and_fall() -> None:
    latents = torch.randn(3000, 5, generator=torch.Generator().manual_seed(2)) ** 3  # heavy tails
    found = channels.curve(latents)
    assert torch.allclose(found[:, 0], latents.square().sum(0))
    assert (found[:, 1:] < found[:, :-1]).all()
    layout = layout_of([4], 5, 5)
    error = (channels.decode(*channels.encode(latents, layout), layout) - latents).square().sum(0)
    assert torch.allclose(found[:, 4], error, rtol=1e-3)


@given(scale=st.floats(2.0**-7, 2.0**7))
def test_scales_are_within_their_step(scale: float) -> None:
    stored = float(channels.scale_values(channels.scale_codes(torch.tensor([scale])))[0])
    assert 2 ** (-1 / 32) - 1e-5 <= stored / scale <= 2 ** (1 / 32) + 1e-5


def test_channels_of_zeros_and_of_one_value() -> None:
    latents = torch.stack((torch.zeros(9), torch.full((9,), 1e-4), torch.full((9,), -300.0)), dim=1)
    layout = layout_of([4], 3, 3)
    decoded = channels.decode(*channels.encode(latents, layout), layout)
    assert torch.equal(decoded[:, 0], torch.zeros(9))
    assert torch.isfinite(decoded).all()
    assert (decoded[:, 2] + 300).abs().max() < 30  # beyond eight octaves the last step serves


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 to 8 bits"):
        layout_of([9], 8, 8)
    with pytest.raises(ConfigError, match="do not make 2 runs"):
        layout_of([4, 4], 8, 8)
