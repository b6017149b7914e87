"""Where and how widely kernels are launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch


def launch_on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current for a launch; Triton's interpreter runs on CPU tensors and needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=16)
def programs(device: torch.device, warps: int) -> int:
    """Programs of a persistent grid: as many as fit with 16 warps on each multiprocessor."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * max(1, 16 // warps)
