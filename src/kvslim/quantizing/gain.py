"""A common power of two keeps what is stored in float16 inside its normal range, and costs no precision."""

from __future__ import annotations

import math

from torch import Tensor

_LARGEST = 10  # magnitudes end up at most 2**10: far from overflow at 2**16, 24 powers above the subnormals at 2**-14


def power_of_two_gain(x: Tensor) -> float:
    """The gain ``g`` that brings the largest magnitude of ``x / g`` to between 2**9 and 2**10; 1.0 for zeros."""
    largest = float(x.abs().max()) if x.numel() else 0.0
    return 2.0 ** (math.frexp(largest)[1] - _LARGEST) if largest > 0 else 1.0
