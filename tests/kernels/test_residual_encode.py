"""The fused encoder: its reference against the codec, its kernel against the reference."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvslim.errors import ConfigError
from kvslim.kernels.residual_encode import reference, residual_encode
from kvslim.quantizing import rotated
from kvslim.quantizing.codebook import LEVEL_KINDS, LevelKind, gaussian_levels, midpoints
from kvslim.quantizing.gain import power_of_two_gain
from kvslim.quantizing.packing import packed_bytes, unpack
from kvslim.quantizing.rotation import rotation

Kernel = Callable[[str], ModuleType]
RandomCell = Callable[..., tuple[Tensor, Tensor]]


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 300),
    tokens=st.integers(0, 4),
    bits=st.integers(1, 8),
    power=st.integers(-60, 60),
    seed=st.integers(0, 99),
    kind=st.sampled_from(LEVEL_KINDS),
)
def test_without_a_backbone_the_reference_is_the_codec(
    size: int, tokens: int, bits: int, power: int, seed: int, kind: LevelKind
) -> None:
    x = torch.randn(2, tokens, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    stored = rotated.encode(x, bits, kind=kind, seed=seed)
    codes, scales = residual_encode(x, None, stored.gain, bits, kind, seed)
    assert torch.equal(codes, stored.codes)
    assert torch.equal(scales, stored.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_the_reference_encodes_what_the_backbone_leaves(random_cell: RandomCell, bits: int, dtype: torch.dtype) -> None:
    x, backbone = random_cell(2, 50, 96, bits, dtype)
    rest = x.to(torch.float32) / 0.25 - backbone
    stored = rotated.encode(rest, bits, seed=5)
    assert stored.gain == power_of_two_gain(rest)
    codes, scales = reference.residual_encode(x, backbone, 0.25, bits, "lloyd_max", 5)
    assert torch.equal(codes, stored.codes)
    assert torch.equal(scales.to(torch.float64), stored.scales.to(torch.float64) * stored.gain)


def assert_equal_but_for_ties(
    ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], rows: Tensor, bits: int, kind: LevelKind
) -> None:
    """Scales are equal or one float16 step apart; codes under equal scales differ by one, and only at a threshold.

    ``rows`` are the rotated rows in float64. A tie is a ratio to the scale within 1e-5 of a row's root mean square. A
    tie while the scale is being fitted moves the scale of its row by some steps: rare, and the row is coded as well.
    """
    (codes, scales), (expected_codes, expected_scales) = ours, theirs
    steps = (scales.view(torch.int16).int() - expected_scales.view(torch.int16).int()).abs()
    moved = steps > 1
    assert int(moved.sum()) <= 1 + 0.005 * steps.numel()
    if moved.any():
        levels = gaussian_levels(bits, kind).to(rows.device)
        size, lost = rows.shape[-1], []
        for kept, by in ((codes, scales), (expected_codes, expected_scales)):
            values = levels[unpack(kept[moved], bits, size).int()] * by[moved].to(torch.float64)[:, None]
            lost.append((values - rows[moved]).square().sum(-1))
        assert torch.allclose(lost[0], lost[1], rtol=0.2)
    assert int((steps > 0).sum()) <= 1 + 0.01 * steps.numel()
    ratio = rows / scales.to(torch.float64).clamp_min(1e-30)[..., None]
    size = rows.shape[-1]
    found, expected = unpack(codes, bits, size).int(), unpack(expected_codes, bits, size).int()
    differs = (found != expected) & (steps == 0)[..., None]
    assert int((found - expected)[differs].abs().sum()) == int(differs.sum())
    thresholds = midpoints(gaussian_levels(bits, kind)).to(rows.device)
    at = torch.maximum(found, expected)[differs].long() - 1
    tolerance = 1e-5 * ratio.square().mean(-1, keepdim=True).sqrt().expand_as(ratio)[differs]
    assert bool(((ratio[differs] - thresholds[at]).abs() <= tolerance).all())
    assert int(differs.sum()) <= 2 + 5e-4 * differs.numel()


def rotated_rows(x: Tensor, backbone: Tensor | None, gain: float, seed: int) -> Tensor:
    rest = x.to(torch.float64) / gain - (0 if backbone is None else backbone.to(torch.float64))
    return rest @ rotation(x.shape[-1], seed, x.device).to(torch.float64)


def test_the_kernel_is_the_reference(
    kernel: Kernel, random_cell: RandomCell, poison: Callable[[int], None], tokens: int, size: int, bits: int
) -> None:
    x, backbone = random_cell(3, tokens, size, bits + size)
    arguments = (x, backbone, 0.25, bits, "lloyd_max", 11)
    expected = reference.residual_encode(*arguments)
    for byte in (255, 0):
        poison(byte)
        ours = kernel("residual_encode").residual_encode(*arguments)
        assert ours[0].shape == (3, tokens, packed_bytes(size, bits))
        assert_equal_but_for_ties(ours, expected, rotated_rows(x, backbone, 0.25, 11), bits, "lloyd_max")


@pytest.mark.parametrize("kind", LEVEL_KINDS)
@pytest.mark.parametrize("with_backbone", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4])
def test_the_kernel_takes_every_dtype_and_kind(
    kernel: Kernel, random_cell: RandomCell, bits: int, dtype: torch.dtype, with_backbone: bool, kind: LevelKind
) -> None:
    x, backbone = random_cell(2, 70, 64, bits, dtype)
    taken_off = backbone if with_backbone else None
    ours = kernel("residual_encode").residual_encode(x, taken_off, 0.25, bits, kind, 2)
    expected = reference.residual_encode(x, taken_off, 0.25, bits, kind, 2)
    assert_equal_but_for_ties(ours, expected, rotated_rows(x, taken_off, 0.25, 2), bits, kind)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_the_kernel_leaves_the_error_of_the_codec(kernel: Kernel, device: str, bits: int) -> None:
    x = torch.randn(4, 100, 128, generator=torch.Generator().manual_seed(bits)).to(device)
    codes, scales = kernel("residual_encode").residual_encode(x, None, 2.0, bits, "lloyd_max", 0)
    decoded = rotated.decode(rotated.RotatedCodes(codes, scales, bits, 128, "lloyd_max", 0, 2.0))
    error = float((decoded - x).square().sum() / x.square().sum())
    assert error == pytest.approx(rotated.distortion(bits, 128), rel=0.03)


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 256), bits=st.integers(1, 8), power=st.integers(-30, 30), seed=st.integers(0, 999))
def test_any_size_and_magnitude(kernel: Kernel, device: str, size: int, bits: int, power: int, seed: int) -> None:
    x = (torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed)) * 2.0**power).to(device)
    gain = power_of_two_gain(x)
    ours = kernel("residual_encode").residual_encode(x, None, gain, bits, "lloyd_max", seed)
    expected = reference.residual_encode(x, None, gain, bits, "lloyd_max", seed)
    assert_equal_but_for_ties(ours, expected, rotated_rows(x, None, gain, seed), bits, "lloyd_max")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rows_of_zeros_and_of_tiny_numbers(kernel: Kernel, device: str, bits: int) -> None:
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(0)).to(device)
    x[0, 10:20] = 0
    x[0, 20:30] *= 1e-12  # its scale is zero in float16
    codes, scales = kernel("residual_encode").residual_encode(x, None, 1.0, bits, "lloyd_max", 0)
    assert bool((scales[0, 10:30] == 0).all())
    assert bool((scales[0, :10] > 0).all())
    expected = reference.residual_encode(x, None, 1.0, bits, "lloyd_max", 0)
    assert torch.equal(codes[0, 10:20], expected[0][0, 10:20])
    assert torch.equal(scales[0, 10:30], expected[1][0, 10:30])


@pytest.mark.parametrize("bits", [2, 5])
def test_strides_do_not_matter(kernel: Kernel, device: str, bits: int) -> None:
    x = torch.randn(50, 128, 3, generator=torch.Generator().manual_seed(1)).to(device)
    turned = x.permute(2, 0, 1)  # features far apart
    backbone = torch.randn(50, 3, 128, generator=torch.Generator().manual_seed(2)).to(device).transpose(0, 1)
    encode = kernel("residual_encode").residual_encode
    ours = encode(turned, backbone, 1.0, bits, "lloyd_max", 0)
    plain = encode(turned.contiguous(), backbone.contiguous(), 1.0, bits, "lloyd_max", 0)
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])


def test_nothing_to_encode(kernel: Kernel, device: str) -> None:
    codes, scales = kernel("residual_encode").residual_encode(
        torch.zeros(3, 0, 64, device=device), None, 1.0, 4, "lloyd_max", 0
    )
    assert codes.shape == (3, 0, 32)
    assert scales.shape == (3, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 64)}, "slabs, T, d"),
        ({"x": torch.zeros(1, 4, 64, dtype=torch.int32)}, "dtype"),
        ({"backbone": torch.zeros(1, 5, 64)}, "backbone"),
        ({"backbone": torch.zeros(1, 4, 64, dtype=torch.float16)}, "backbone"),
        ({"gain": 0.3}, "power of two"),
        ({"gain": 0.0}, "power of two"),
        ({"gain": 2.0**-130}, "power of two"),
        ({"bits": 9}, "1 to 8 bits"),
        ({"bits": 0}, "1 to 8 bits"),
        ({"kind": "absmax"}, "absmax"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {
        "x": torch.zeros(1, 4, 64), "backbone": None, "gain": 1.0, "bits": 4, "kind": "lloyd_max", "seed": 0
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        residual_encode(**{**arguments, **change})  # type: ignore[arg-type]
