"""Where and how widely kernels are launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel that walks over tiles of rows is launched.

    Attributes:
        rows: rows per tile.
        warps: warps per program.
        stages: how many tiles are in flight; 1 loads a tile when it is needed.
        per_multiprocessor: programs that a multiprocessor is to hold at once. Shared memory has to allow it, and the
            registers are limited for it: if fewer fitted, the others would run alone after them.
    """

    rows: int
    warps: int
    stages: int
    per_multiprocessor: int

    @property
    def registers(self) -> int:
        """Most registers per thread; a multiprocessor has 65536."""
        return min(255, 65536 // (32 * self.warps * self.per_multiprocessor) // 8 * 8)

    def programs(self, device: torch.device, tiles: int) -> int:
        """Size of the persistent grid for ``tiles`` tiles."""
        return min(tiles, multiprocessors(device) * self.per_multiprocessor)


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for Triton's interpreter, so that programs take several tiles there too."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def launch_on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current for a launch; Triton's interpreter runs on CPU tensors and needs nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
