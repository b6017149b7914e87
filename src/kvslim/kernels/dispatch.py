"""Which implementation of an operation runs: the Triton kernel on a GPU, else the torch reference."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Implementation = Literal["triton", "reference"]

REFERENCE_VARIABLE = "KVSLIM_REFERENCE"
"""Environment variable: ``1`` forces the references."""


def implementation() -> Implementation:
    """What CUDA tensors get in this process.

    ``"triton"``, or ``"reference"`` where there is no NVIDIA GPU, Triton is not installed, or ``KVSLIM_REFERENCE=1``.
    """
    if os.environ.get(REFERENCE_VARIABLE) == "1" or not _has_nvidia_gpu() or not _has_triton():
        return "reference"
    return "triton"


def runs_triton(x: Tensor) -> bool:
    """Whether an operation on ``x`` runs its Triton kernel: a CUDA tensor, and :func:`implementation` says so."""
    return x.is_cuda and implementation() == "triton"


def _has_nvidia_gpu() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None
