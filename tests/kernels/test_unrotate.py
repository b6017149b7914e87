"""Rotary rotation in one pass: against float64, there and back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvslim.errors import ConfigError
from kvslim.kernels.unrotate import reference, unrotate
from kvslim.types import Rope

Kernel = Callable[[str], ModuleType]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def frequencies(rotary_dim: int, base: float = 1e4) -> Tensor:
    return base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / max(1, rotary_dim))


def turned(keys: Tensor, freq: Tensor, start: int, inverse: bool) -> Tensor:
    """In float64, from the float32 phases that models use."""
    half = len(freq)
    phase = (start + torch.arange(keys.shape[1], dtype=torch.float32))[:, None] * freq
    cos, sin = phase.to(keys.device, torch.float64).cos(), phase.to(keys.device, torch.float64).sin()
    wide = keys.to(torch.float64)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    sin = -sin if inverse else sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin, wide[..., 2 * half :]), -1)


@pytest.mark.parametrize("inverse", [True, False])
def test_the_reference_is_the_rope(inverse: bool) -> None:
    keys = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    freq = frequencies(16)
    positions = torch.arange(100, 140)
    expected = Rope(freq, 16).rotate(keys, positions, inverse=inverse)
    assert torch.equal(reference.unrotate(keys, freq, 16, 100, inverse, torch.float32), expected)
    assert torch.equal(unrotate(keys, freq, 16, 100, inverse, torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize(("slabs", "inverse"), [(1, True), (6, False)])
@pytest.mark.parametrize(("size", "rotary_dim"), [(80, 80), (96, 48), (128, 128), (32, 0)])
@pytest.mark.parametrize("tokens", [1, 65])
def test_the_kernel_is_exact_to_float32(
    kernel: Kernel, device: str, poison: Callable[[int], None], tokens: int, size: int, rotary_dim: int, slabs: int,
    inverse: bool,
) -> None:  # fmt: skip
    keys = torch.randn(slabs, tokens, size, generator=torch.Generator().manual_seed(tokens)).to(device)
    freq = frequencies(rotary_dim)
    poison(255)
    out = kernel("unrotate").unrotate(keys, freq.to(device), rotary_dim, 17, inverse, torch.float32)
    expected = turned(keys, freq, 17, inverse)
    assert float((out - expected).abs().max()) < 2e-6 * float(keys.abs().max())


@pytest.mark.parametrize("start", [0, 4, 32_000, 500_000])
def test_far_positions(kernel: Kernel, device: str, start: int) -> None:
    keys = torch.randn(2, 65, 64, generator=torch.Generator().manual_seed(1)).to(device)
    out = kernel("unrotate").unrotate(keys, frequencies(64).to(device), 64, start, True, torch.float32)
    expected = turned(keys, frequencies(64), start, True)
    assert float((out - expected).abs().max()) < 2e-6 * float(keys.abs().max())


@pytest.mark.parametrize("to", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(kernel: Kernel, device: str, dtype: torch.dtype, to: torch.dtype) -> None:
    keys = torch.randn(2, 40, 96, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    out = kernel("unrotate").unrotate(keys, frequencies(64).to(device), 64, 5, True, to)
    assert out.dtype == to
    # Triton's interpreter cuts numbers off on the way to bfloat16; a GPU rounds.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}[to]
    torch.testing.assert_close(
        out.to(torch.float64), turned(keys, frequencies(64), 5, True), rtol=tolerance, atol=1e-6 + 1e-2 * tolerance
    )


def test_a_round_trip_and_strides(kernel: Kernel, device: str) -> None:
    keys = torch.randn(1, 50, 3, 128, generator=torch.Generator().manual_seed(3)).to(device)[0].transpose(0, 1)[:, 4:]
    freq = frequencies(128).to(device)
    off = kernel("unrotate").unrotate(keys, freq, 128, 4, True, torch.float32)
    back = kernel("unrotate").unrotate(off, freq, 128, 4, False, torch.float32)
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-5)
    assert float((off - keys).norm()) > 0.5 * float(keys.norm())


def test_no_tokens(kernel: Kernel, device: str) -> None:
    out = kernel("unrotate").unrotate(
        torch.zeros(2, 0, 64, device=device), frequencies(64).to(device), 64, 0, True, torch.bfloat16
    )
    assert out.shape == (2, 0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(4, 64)}, "slabs, T, d"),
        ({"keys": torch.zeros(1, 4, 64, dtype=torch.float64)}, "dtype"),
        ({"rotary_dim": 63}, "even"),
        ({"rotary_dim": 128}, "at most 64"),
        ({"inv_freq": torch.zeros(64)}, "frequencies"),
        ({"out_dtype": torch.float64}, "out_dtype"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], message: str) -> None:
    arguments = {"keys": torch.zeros(1, 4, 64), "inv_freq": frequencies(64), "rotary_dim": 64, "start": 0}
    with pytest.raises(ConfigError, match=message):
        unrotate(**{**arguments, **change})  # type: ignore[arg-type]
