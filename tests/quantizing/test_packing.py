"""Packing is lossless at every width and length, and costs what it says."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvslim.errors import ConfigError
from kvslim.quantizing.packing import pack, packed_bytes, planes, unpack


@given(bits=st.integers(1, 8), count=st.integers(1, 70), rows=st.integers(1, 3), seed=st.integers(0, 1000))
def test_round_trip_and_size(bits: int, count: int, rows: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_bytes(count, bits))
    assert torch.equal(unpack(packed, bits, count).long(), codes)


@given(bits=st.integers(1, 8))
def test_whole_bytes_are_tight(bits: int) -> None:
    assert packed_bytes(64, bits) == 8 * bits


def test_rows_are_independent() -> None:
    codes = torch.randint(0, 8, (5, 17))
    assert torch.equal(unpack(pack(codes, 3)[1:4], 3, 17), codes[1:4].to(torch.uint8))


def test_zero_bits_cost_nothing() -> None:
    assert packed_bytes(1000, 0) == 0


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_impossible_width_is_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="1 to 8 bits"):
        planes(bits)
