"""What the kernel tests share: Triton's interpreter where there is no GPU, shapes for either, poisoned outputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

HAS_GPU = os.environ["TRITON_INTERPRET"] != "1"  # tests/conftest.py sets it where there is none

TOKENS = (1, 63, 64, 65, 500, 4001) if HAS_GPU else (1, 63, 65)
SIZES = (64, 80, 96, 128, 192, 256)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``tokens``, ``size`` and ``bits`` together: every width, size and length, not their whole product."""
    if {"tokens", "size", "bits"} <= set(metafunc.fixturenames):
        cases = {(65, 128, bits) for bits in range(1, 9)} | {(65, size, bits) for size in SIZES for bits in (3, 8)}
        cases |= {(tokens, size, bits) for tokens in TOKENS for size, bits in ((128, 4), (80, 3))}
        if HAS_GPU:
            cases |= {(tokens, size, bits) for tokens in TOKENS for size in SIZES for bits in (3, 8)}
        metafunc.parametrize(("tokens", "size", "bits"), sorted(cases))


@pytest.fixture(scope="session")
def device() -> str:
    """``cuda`` if there is one; else the kernels run in Triton's interpreter on the CPU."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def kernel() -> Callable[[str], ModuleType]:
    """``kernel(operation)`` is the module with the operation's Triton kernel; skips without Triton."""
    triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'kvslim[dev]' on Linux x86_64")
    if not HAS_GPU and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not work with numpy 2.4; 3.7 does")
    return lambda operation: import_module(f"kvslim.kernels.{operation}.triton")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``poison(byte)`` fills whatever ``torch.empty`` returns from now on; bytes of 255 are NaN in every float type."""
    empty = torch.empty

    def start(byte: int) -> None:
        def filled(*shape: Any, **options: Any) -> torch.Tensor:
            out = empty(*shape, **options)
            out.view(torch.uint8).fill_(byte)
            return out

        monkeypatch.setattr(torch, "empty", filled)

    return start


@pytest.fixture
def random_cell(device: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``random_cell(slabs, tokens, size, seed, dtype)``: rows of very different norms, and most of them as a backbone.

    The backbone is in units of the gain 0.25. Both are views with NaN around them, as slices of a cache are.
    """

    def make(
        slabs: int, tokens: int, size: int, seed: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(slabs, tokens, size, generator=generator)
        x *= torch.randn(slabs, tokens, 1, generator=generator).mul(2).exp2()
        x[..., size // 3] *= 20  # an outlier channel
        backbone = (x + torch.randn(x.shape, generator=generator) * 0.3) / 0.25
        around = torch.full((2, slabs, tokens + 5, size + 16), torch.nan)
        around[0, :, 3:-2, :size], around[1, :, 3:-2, :size] = x, backbone
        around = around.to(device)
        return around[0].to(dtype)[:, 3:-2, :size], around[1][:, 3:-2, :size]

    return make
