"""Argument checks that the operations share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvslim.errors import ConfigError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_POWER = 120


def check_slabs(x: Tensor, name: str) -> None:
    """Raise :class:`ConfigError` unless ``x`` is ``(slabs, T, d)``, d ≥ 1, of a supported float type."""
    if x.ndim != 3 or x.shape[2] == 0 or x.dtype not in FLOATS:
        raise ConfigError(
            f"{name} must have shape (slabs, T, d) and dtype float32, bfloat16 or float16, "
            f"not {tuple(x.shape)} and {x.dtype}."
        )


def check_like(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device, name: str) -> None:
    """Raise :class:`ConfigError` unless ``x`` is of the given dtype and shape and on the given device."""
    if x.dtype != dtype or tuple(x.shape) != shape or x.device != device:
        raise ConfigError(f"{name} must be {dtype} {shape} on {device}, not {x.dtype} {tuple(x.shape)} on {x.device}.")


def check_gain(gain: float) -> None:
    """Raise :class:`ConfigError` unless ``gain`` is a power of two that float32 holds, and its inverse too."""
    fraction, exponent = math.frexp(gain)
    if fraction != 0.5 or abs(exponent - 1) > _LARGEST_POWER:
        raise ConfigError(
            f"The gain must be a power of two from 2**-{_LARGEST_POWER} to 2**{_LARGEST_POWER}, not {gain}."
        )
