"""Cells with realistic spectra, and the arithmetic of a GPU on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvslim.decomposing import flash, subspace

MakeCell = Callable[..., torch.Tensor]


def build_cell(slabs: int, tokens: int, features: int, *, fall: float = 1.6, seed: int = 0) -> torch.Tensor:
    """A cell whose squared singular values along tokens fall like ``i ** -fall``, features like half of that."""
    rng = torch.Generator().manual_seed(seed)
    columns = slabs * features
    power = torch.arange(1, columns + 1, dtype=torch.float64) ** (-fall / 2)
    turn = torch.linalg.qr(torch.randn(columns, columns, generator=rng, dtype=torch.float64)).Q
    unfolded = (torch.randn(tokens, columns, generator=rng, dtype=torch.float64) * power) @ turn.T
    cell = unfolded.unflatten(1, (slabs, features)).transpose(0, 1)
    weights = torch.arange(1, features + 1, dtype=torch.float64) ** (-fall / 4)
    mixing = torch.linalg.qr(torch.randn(features, features, generator=rng, dtype=torch.float64)).Q
    return ((cell * weights) @ mixing).to(torch.float32).contiguous()


@pytest.fixture
def make_cell() -> MakeCell:
    return build_cell


@pytest.fixture(params=["cpu", "gpu"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test by the way of a CPU, and by that of a GPU: same operations and roundings, on the CPU.

    Small matrices, which are otherwise decomposed in full, are iterated on like large ones.
    """
    monkeypatch.setattr(flash, "_FULL_BELOW", 8)
    if request.param == "gpu":
        monkeypatch.setattr(subspace, "on_gpu", lambda _: True)
        monkeypatch.setattr(subspace, "half_product", lambda a, b: a.float() @ b.float())
    return str(request.param)
