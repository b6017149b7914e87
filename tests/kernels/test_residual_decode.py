"""The fused decoder: its reference against the codec, its kernel against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvslim.errors import ConfigError
from kvslim.kernels.residual_decode import reference, residual_decode
from kvslim.quantizing import rotated
from kvslim.quantizing.codebook import LEVEL_KINDS, LevelKind, gaussian_levels
from kvslim.quantizing.packing import packed_bytes, unpack
from kvslim.quantizing.rotation import rotation

Kernel = Callable[[str], ModuleType]
Poison = Callable[[int], None]


def random_codes(slabs: int, tokens: int, size: int, bits: int, device: str) -> tuple[Tensor, Tensor]:
    """Codes as the encoder packs them (padding bits zero) and scales over the whole range, seeded by the shape."""
    generator = torch.Generator().manual_seed(slabs + tokens + size + bits)
    x = torch.randn(slabs, tokens, size, generator=generator)
    codes = rotated.encode(x, bits).codes
    scales = torch.randn(slabs, tokens, generator=generator).mul(3).exp2().to(torch.float16)
    return codes.to(device), scales.to(device)


def exact(codes: Tensor, scales: Tensor, bits: int, size: int, kind: LevelKind, seed: int) -> Tensor:
    levels = gaussian_levels(bits, kind).to(codes.device)
    rows = levels[unpack(codes, bits, size).long()] * scales.to(torch.float64)[..., None]
    return rows @ rotation(size, seed, codes.device).to(torch.float64).T


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.to(torch.float64) - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("size", [80, 300])
def test_the_reference_is_the_codec(bits: int, size: int) -> None:
    x = torch.randn(2, 20, size, generator=torch.Generator().manual_seed(bits))
    stored = rotated.encode(x, bits, seed=3)
    arguments = (stored.codes, stored.scales, bits, size, "lloyd_max", 3, stored.gain)
    decoded = rotated.decode(stored)
    assert torch.equal(reference.residual_decode(*arguments, torch.float32), decoded)
    assert torch.equal(reference.residual_decode(*arguments, torch.bfloat16), decoded.to(torch.bfloat16))
    backbone = torch.randn(2, 20, size)
    together = (backbone + decoded / stored.gain) * stored.gain
    assert torch.equal(residual_decode(*arguments, torch.float16, backbone), together.to(torch.float16))
    out = residual_decode(*arguments, torch.float32, backbone)
    assert out is backbone
    assert torch.equal(out, together)


def test_the_kernel_is_exact_to_float32(
    kernel: Kernel, device: str, poison: Poison, tokens: int, size: int, bits: int
) -> None:
    codes, scales = random_codes(3, tokens, size, bits, device)
    poison(255)
    out = kernel("residual_decode").residual_decode(codes, scales, bits, size, "lloyd_max", 11, 0.5, torch.float32)
    assert relative(out, exact(codes, scales, bits, size, "lloyd_max", 11) * 0.5) < 1e-6


@pytest.mark.parametrize("kind", LEVEL_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [3, 4])
def test_the_kernel_adds_a_backbone(
    kernel: Kernel, device: str, poison: Poison, bits: int, dtype: torch.dtype, kind: LevelKind
) -> None:
    codes, scales = random_codes(2, 70, 96, bits, device)
    backbone = torch.randn(2, 70, 96, generator=torch.Generator().manual_seed(bits)).to(device)
    expected = (exact(codes, scales, bits, 96, kind, 1) + backbone.to(torch.float64)) * 0.5
    kept = backbone.clone()
    poison(255)
    out = kernel("residual_decode").residual_decode(codes, scales, bits, 96, kind, 1, 0.5, dtype, backbone)
    assert out.dtype == dtype
    assert (out is backbone) == (dtype == torch.float32)
    assert dtype == torch.float32 or torch.equal(backbone, kept)
    # Triton's interpreter cuts numbers off on the way to bfloat16; a GPU rounds.
    assert relative(out, expected) < {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 4e-4}[dtype]


@pytest.mark.parametrize("bits", [4, 5])
def test_slices_of_slabs_and_tokens(kernel: Kernel, device: str, bits: int) -> None:
    codes, scales = random_codes(5, 90, 128, bits, device)
    part = (slice(1, 4), slice(7, 80))
    backbone = torch.randn(73, 3, 128, generator=torch.Generator().manual_seed(0)).to(device).transpose(0, 1)
    expected = exact(codes[part], scales[part], bits, 128, "uniform", 0) + backbone.to(torch.float64)
    out = kernel("residual_decode").residual_decode(
        codes[part], scales[part], bits, 128, "uniform", 0, 1.0, torch.float32, backbone
    )
    assert relative(out, expected) < 1e-6


@pytest.mark.parametrize("bits", [2, 3, 7])
def test_encode_then_decode(kernel: Kernel, device: str, bits: int) -> None:
    x = torch.randn(2, 100, 80, generator=torch.Generator().manual_seed(bits)).to(device)
    codes, scales = kernel("residual_encode").residual_encode(x, None, 4.0, bits, "lloyd_max", 9)
    out = kernel("residual_decode").residual_decode(codes, scales, bits, 80, "lloyd_max", 9, 4.0, torch.float32)
    assert relative(out, x.to(torch.float64)) ** 2 == pytest.approx(rotated.distortion(bits, 80), rel=0.06)


def test_nothing_to_decode(kernel: Kernel, device: str) -> None:
    codes, scales = random_codes(3, 0, 64, 4, device)
    out = kernel("residual_decode").residual_decode(codes, scales, 4, 64, "lloyd_max", 0, 1.0, torch.bfloat16)
    assert out.shape == (3, 0, 64)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(1, 4, 31, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.zeros(1, 4, 32, dtype=torch.int8)}, "codes"),
        ({"scales": torch.zeros(1, 4)}, "scales"),
        ({"scales": torch.zeros(4, dtype=torch.float16)}, "codes"),
        ({"backbone": torch.zeros(1, 4, 63)}, "backbone"),
        ({"out_dtype": torch.float64}, "out_dtype"),
        ({"gain": 3.0}, "power of two"),
        ({"bits": 9}, "1 to 8 bits"),
        ({"kind": "absmax"}, "absmax"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {
        "codes": torch.zeros(1, 4, packed_bytes(64, 4), dtype=torch.uint8),
        "scales": torch.zeros(1, 4, dtype=torch.float16),
        "bits": 4,
        "size": 64,
        "kind": "lloyd_max",
        "seed": 0,
        "gain": 1.0,
        "out_dtype": torch.float32,
    }
    with pytest.raises(ConfigError, match=message):
        residual_decode(**{**arguments, **change})  # type: ignore[arg-type]
