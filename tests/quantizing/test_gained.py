"""Tokens coded with one gain: the search against all gains, portions, what is not finite, and bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvslim.quantizing import gained
from kvslim.quantizing.channels import ChannelLayout, layout_of
from kvslim.quantizing.gained import GainedCodes

LAYOUT = layout_of([8] * 3 + [5] * 8 + [0] * 4 + [2] * 9 + [1] * 3, 1, 27)


def latents(tokens: int, layout: ChannelLayout = LAYOUT, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(1, tokens, 1, generator=generator).mul(0.5).exp()
    return torch.randn(1, tokens, layout.channels, generator=generator) * sizes


def weighed_errors(x: Tensor, stored: GainedCodes, layout: ChannelLayout) -> Tensor:
    weights = torch.tensor([4.0**width if width else 0.0 for width in layout.widths], dtype=torch.float64)
    return ((gained.decode(stored, layout).double() - x.double()).square() * weights).sum(-1)


@given(
    widths=st.lists(st.integers(0, 8), min_size=1, max_size=40),
    tokens=st.integers(0, 5),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_layout_is_coded_in_its_bytes(widths: list[int], tokens: int, batch: int, seed: int) -> None:
    layout = layout_of(widths, 1, len(widths))
    x = latents(batch * tokens, layout, seed).view(batch, tokens, len(widths))
    stored, outliers = gained.encode(x, layout)
    decoded = gained.decode(stored, layout)
    assert stored.codes.shape == (batch, tokens, layout.row_bytes)
    assert stored.codes.dtype == stored.gains.dtype == torch.uint8
    assert stored.codes.numel() + stored.gains.numel() == batch * tokens * gained.token_bytes(layout)
    assert decoded.shape == x.shape
    assert torch.isfinite(decoded).all()
    assert (decoded[..., torch.tensor(widths) == 0] == 0).all()
    assert 0 <= int(outliers) <= batch * tokens
    for token in range(tokens):  # portions change nothing
        alone, _ = gained.encode(x[:, token : token + 1], layout)
        assert torch.equal(alone.codes[:, 0], stored.codes[:, token])
        assert torch.equal(alone.gains[:, 0], stored.gains[:, token])


def test_the_search_finds_nearly_the_best_of_all_gains() -> None:
    x = latents(64)
    stored, _ = gained.encode(x, LAYOUT)
    found = weighed_errors(x, stored, LAYOUT)
    every = []
    for code in range(60, 200):
        gains = torch.full_like(stored.gains, code)
        value = float(gained.gain_values(gains)[0, 0])
        kept = x[0][:, list(LAYOUT.kept)] / value
        codes = torch.cat([gained.pack(gained._nearest(kept[:, c].contiguous(), w), w) for w, c, _ in LAYOUT.parts], 1)
        every.append(weighed_errors(x, GainedCodes(codes[None], gains), LAYOUT))
    best = torch.stack(every).min(0).values
    assert (found >= best * (1 - 1e-6)).all()
    assert found.sum() < 1.25 * best.sum()
    unit = every[128 - 60]
    assert found.sum() < 0.5 * unit.sum()  # tokens do differ in size


def test_gaussian_channels_err_as_predicted() -> None:
    layout = layout_of([4] * 400 + [2] * 400, 1, 800)  # so many that the gain has little to fit
    x = torch.randn(1, 200, 800, generator=torch.Generator().manual_seed(3))
    missed = (gained.decode(gained.encode(x, layout)[0], layout) - x).square().mean((0, 1))
    for width, part in ((4, missed[:400]), (2, missed[400:])):
        assert float(part.mean()) == pytest.approx(gained.unit_error(width), rel=0.1)
    assert gained.unit_error(0) == 1
    assert gained.unit_error(1) == pytest.approx(1 - 2 / torch.pi)


def test_what_is_not_finite_shows_and_zeros_stay() -> None:
    x = latents(4)
    x[0, 0] = 0
    x[0, 1, 2], x[0, 2, 20] = float("nan"), float("inf")
    stored, _ = gained.encode(x, LAYOUT)
    decoded = gained.decode(stored, LAYOUT)[0][:, list(LAYOUT.kept)]
    assert not decoded[0].any()
    assert decoded[1].isnan().all()
    assert decoded[2].isnan().all()
    assert decoded[3].isfinite().all()
    assert stored.gains[0, :3].tolist() == [0, 255, 255]


def test_outliers_are_counted() -> None:
    x = torch.randn(1, 50, LAYOUT.channels, generator=torch.Generator().manual_seed(1))
    assert int(gained.encode(x, LAYOUT)[1]) == 0
    x[0, 7] *= 100
    x[0, 9, 20] = 300.0  # one channel alone
    assert int(gained.encode(x, LAYOUT)[1]) == 2


def test_a_large_input_is_searched_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    x = latents(33)
    whole, outliers = gained.encode(x, LAYOUT)
    monkeypatch.setattr(gained, "_PORTION", 200)
    parts, again = gained.encode(x, LAYOUT)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.gains, parts.gains)
    assert torch.equal(outliers, again)
