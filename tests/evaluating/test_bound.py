"""The Gaussian bound on cases that are known by hand, and caches beside it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvslim.baselines import IntegerCache, RotatedCache
from kvslim.evaluating.bound import bits_at, channel_energies, distortion_at, gap
from kvslim.evaluating.continuation import ContinuationConfig, run_reference, score_cache
from tiny import build


def test_equal_channels_halve_their_amplitude_per_bit() -> None:
    energies = np.full(10, 0.1)
    assert distortion_at(energies, 3) == pytest.approx(4**-3)
    assert bits_at(energies, 4**-5) == pytest.approx(5)


def test_water_covers_faint_channels() -> None:
    """Energies 16, 1 at one bit per value: both bits go to the first, whose error ends at the height of the second."""
    energies = np.array([16.0, 1.0])
    assert distortion_at(energies, 1) == pytest.approx(2.0)
    assert bits_at(energies, 2.0) == pytest.approx(1.0)


def test_the_ends() -> None:
    energies = np.array([1.0, 2.0])
    assert bits_at(energies, 3.0) == 0
    assert bits_at(energies, 0.0) == math.inf
    assert distortion_at(energies, 0) == pytest.approx(3.0)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.floats(0.01, 10))
def test_both_ways_agree(energies: list[float], bits: float) -> None:
    channels = np.array(energies)
    assert bits_at(channels, distortion_at(channels, bits)) == pytest.approx(bits, rel=1e-6)


def test_a_gap_in_bits_is_six_decibels_each() -> None:
    energies = np.full(4, 0.25)
    found = gap(energies, 4.0, [4**-3])
    assert found.bits == pytest.approx(1.0)
    assert found.decibels == pytest.approx(20 * math.log10(2))


@torch.no_grad()
def test_no_codec_beats_the_bound_and_the_better_one_is_nearer() -> None:
    model = build("llama-gqa")
    config = ContinuationConfig(300, 8)
    reference = run_reference(model, torch.randint(2, 128, (309,), generator=torch.Generator().manual_seed(0)), config)
    energies = channel_energies(model, reference)
    assert len(energies) == 2 * 2 * 24
    assert 0 < energies.sum() <= 4 + 1e-9
    bits = []
    for cache in (IntegerCache(model, 4), RotatedCache(model, 4)):
        one = score_cache(model, cache, reference, config)
        assert len(one.layer_errors) == 4
        bits.append(gap(energies, 16 * one.nbytes / one.dense_nbytes, one.layer_errors).bits)
    assert 0 < bits[1] < bits[0]
