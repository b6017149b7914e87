"""The entropy coder: every block comes back, close to the entropy, and no damaged bytes are taken for a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.errors import CheckpointError, ConfigError
from kvslim.quantizing.channels import WIDTHS, ChannelLayout, encode, layout_of, unscaled
from kvslim.quantizing.range_coder import decode_codes, encode_codes, measure


def gaussian(tokens: int, layout: ChannelLayout, seed: int = 0) -> torch.Tensor:
    """Codes of Gaussian latents, channels of different deviations."""
    rng = torch.Generator().manual_seed(seed)
    latents = torch.randn(tokens, len(layout.kept), generator=rng)
    codes, _ = encode(latents * torch.logspace(-1, 1, len(layout.kept)), layout)
    return codes


@st.composite
def blocks(draw: st.DrawFn) -> tuple[torch.Tensor, ChannelLayout]:
    """Any bytes in rows, or Gaussian codes, or few different ones."""
    widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=6))
    run = draw(st.sampled_from([1, 3, 8, 16]))
    layout = layout_of(widths, run, len(widths) * run - draw(st.integers(0, run - 1)))
    tokens, seed = draw(st.integers(0, 120)), draw(st.integers(0, 9))
    kind = draw(st.sampled_from(["gaussian", "any", "equal", "rare"]))
    rng = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return gaussian(tokens, layout, seed) if tokens else torch.zeros(0, layout.row_bytes, dtype=torch.uint8), layout
    codes = torch.randint(0, 256, (tokens, layout.row_bytes), generator=rng, dtype=torch.uint8)
    if kind != "any":
        codes[torch.rand(codes.shape, generator=rng) < (1.0 if kind == "equal" else 0.98)] = 0
    return codes, layout


@settings(max_examples=30, deadline=None)
@given(block=blocks())
def test_every_block_comes_back(block: tuple[torch.Tensor, ChannelLayout]) -> None:
    codes, layout = block
    data = encode_codes(codes, layout)
    assert len(data) <= 1 + codes.numel()
    again = decode_codes(data, layout, codes.shape[0])
    assert again.dtype == torch.uint8
    assert torch.equal(again, codes)


@settings(max_examples=30, deadline=None)
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3),
    cut=st.integers(0, 9),
    tokens=st.sampled_from([200, 199, 201, 0, 800]),
)
def test_damaged_bytes_are_refused_or_rows_of_codes(edits: list[tuple[float, int]], cut: int, tokens: int) -> None:
    layout = layout_of([4, 2, 0, 3, 3, 4], 8, 48)
    data = bytearray(encode_codes(gaussian(200, layout), layout))
    assert data[0] == 1
    for where, flip in edits:
        data[int(where * len(data))] ^= flip
    try:
        codes = decode_codes(bytes(data[: len(data) - cut]), layout, tokens)
    except CheckpointError:
        return
    assert codes.shape == (tokens, layout.row_bytes)  # no hash is kept here: other symbols may be valid ones


def test_the_end_is_checked() -> None:
    layout = layout_of([4] * 4, 8, 32)
    data = encode_codes(gaussian(300, layout), layout)
    for damaged in (data[:-2], data + b"\0\0", data[:-1], b"", b"\2" + data[1:], data[:3], b"\0" + data[1:]):
        with pytest.raises(CheckpointError, match="damaged"):
            decode_codes(damaged, layout, 300)
    for tokens in (299, 301, 0):
        with pytest.raises(CheckpointError, match="damaged"):
            decode_codes(data, layout, tokens)
    flipped = bytearray(data)
    flipped[-1] ^= 1
    with pytest.raises(CheckpointError, match="damaged"):
        decode_codes(bytes(flipped), layout, 300)


@given(data=st.binary(max_size=200), form=st.sampled_from([b"", b"\0", b"\1\0\0", b"\1\1\1"]))
def test_no_bytes_crash_the_decoder(data: bytes, form: bytes) -> None:
    layout = layout_of([1, 2], 8, 16)
    try:
        codes = decode_codes(form + data, layout, 7)
    except CheckpointError:
        return
    assert codes.shape == (7, layout.row_bytes)


def entropy(symbols: torch.Tensor) -> float:
    """Bits per symbol of their own distribution, computed apart from the coder."""
    _, counts = symbols.unique(return_counts=True)
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


@pytest.mark.parametrize(("width", "known"), [(1, 1.0), (2, 1.911), (3, 2.825), (4, 3.765), (8, 7.60)])
def test_gaussian_codes_come_close_to_their_entropy(width: int, known: float) -> None:
    layout = layout_of([width] * 8, 8, 64)
    codes = gaussian(2048, layout)
    bits = measure(codes, layout).bits
    found = entropy(unscaled(codes, layout))
    assert found == pytest.approx(known, abs=0.02 if width < 8 else 0.2)
    assert bits <= min(width + 0.001, found * 1.01 + 0.01)


def test_runs_that_differ_get_tables_of_their_own() -> None:
    layout = layout_of([4] * 4, 8, 32)
    codes = gaussian(2000, layout)
    codes[:, 4:8] = 0x77  # one of the runs is constant, and costs next to nothing
    symbols = unscaled(codes, layout)
    expected = sum(8 * entropy(symbols[:, at : at + 8]) for at in range(0, 32, 8)) / 32
    assert measure(codes, layout).bits <= 1.02 * expected
    assert encode_codes(codes, layout)[1] == 1
    assert encode_codes(gaussian(300, layout), layout)[1] == 0


@pytest.mark.parametrize("codes", [torch.zeros(3, 5, dtype=torch.uint8), torch.zeros(3, 4), torch.zeros(4)])
def test_what_are_no_codes(codes: Any) -> None:
    with pytest.raises(ConfigError, match="uint8"):
        encode_codes(codes, layout_of([4], 8, 8))


def test_what_was_measured_is_what_was_coded() -> None:
    layout = layout_of([4, 3, 2], 16, 48)
    codes = gaussian(1000, layout)
    found = measure(codes, layout)
    assert found.ratio == pytest.approx(codes.numel() / len(encode_codes(codes, layout)))
    assert found.ratio > found.zlib_ratio
    assert min(found.encode_rate, found.decode_rate) > 0
    assert np.isfinite(found.bits)
