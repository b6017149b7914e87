"""Which implementation runs where."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvslim.kernels import dispatch
from kvslim.kernels.residual_decode import residual_decode
from kvslim.kernels.residual_encode import residual_encode
from kvslim.kernels.unrotate import unrotate

Kernel = Callable[[str], ModuleType]


def encode(device: str, size: int = 64) -> Tensor:
    return residual_encode(torch.ones(1, 2, size, device=device), None, 1.0, 4, "lloyd_max", 0)[0]


def decode(device: str, size: int = 64) -> Tensor:
    codes = torch.zeros(1, 2, size // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(1, 2, dtype=torch.float16, device=device)
    return residual_decode(codes, scales, 4, size, "lloyd_max", 0, 1.0, torch.float32)


def turn(device: str, size: int = 64) -> Tensor:
    return unrotate(torch.ones(1, 2, size, device=device), torch.ones(size // 2, device=device), size, 0)


CALLS = {"residual_encode": encode, "residual_decode": decode, "unrotate": turn}


def forbid(monkeypatch: pytest.MonkeyPatch, operation: str, implementation: str) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError(f"{operation} ran its {implementation}")

    monkeypatch.setattr(import_module(f"kvslim.kernels.{operation}.{implementation}"), operation, refuse)


@pytest.mark.parametrize("operation", CALLS)
def test_cpu_tensors_get_the_reference(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, operation: str) -> None:
    kernel(operation)
    forbid(monkeypatch, operation, "triton")
    assert CALLS[operation]("cpu").shape[:2] == (1, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operation", CALLS)
def test_cuda_tensors_get_the_kernel(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.delenv(dispatch.REFERENCE_VARIABLE, raising=False)
    assert dispatch.implementation() == "triton"
    forbid(monkeypatch, operation, "reference")
    assert CALLS[operation]("cuda").is_cuda


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("operation", CALLS)
def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setenv(dispatch.REFERENCE_VARIABLE, "1")
    assert dispatch.implementation() == "reference"
    forbid(monkeypatch, operation, "triton")
    assert CALLS[operation]("cuda").is_cuda


@pytest.mark.parametrize("operation", CALLS)
def test_where_a_kernel_runs_the_package_calls_it(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, device: str, operation: str
) -> None:
    kernel(operation)
    monkeypatch.setattr(import_module(f"kvslim.kernels.{operation}"), "runs_triton", lambda _: True)
    forbid(monkeypatch, operation, "reference")
    assert CALLS[operation](device).shape[:2] == (1, 2)


@pytest.mark.parametrize("operation", ["residual_encode", "residual_decode"])
def test_rows_too_long_for_the_kernel_get_the_reference(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, device: str, operation: str
) -> None:
    kernel(operation)
    monkeypatch.setattr(import_module(f"kvslim.kernels.{operation}"), "runs_triton", lambda _: True)
    forbid(monkeypatch, operation, "triton")
    assert CALLS[operation](device, 320).shape[:2] == (1, 2)


def test_without_a_gpu_or_triton_it_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.REFERENCE_VARIABLE, raising=False)
    for gpu in (True, False):
        for has_triton in (True, False):
            monkeypatch.setattr(dispatch, "_has_nvidia_gpu", lambda gpu=gpu: gpu)
            monkeypatch.setattr(dispatch, "_has_triton", lambda has_triton=has_triton: has_triton)
            assert dispatch.implementation() == ("triton" if gpu and has_triton else "reference")


def test_importing_the_operations_does_not_import_triton() -> None:
    modules = ", ".join(f"kvslim.kernels.{operation}" for operation in CALLS)
    code = f"import sys; sys.modules['triton'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
