"""Models on disk, small enough that every step of a streamed compression can be tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import build

KINDS = ("llama-gqa", "llama-tied", "qwen3", "gemma3", "phi3", "gpt-neox", "opt", "gpt2-by-layer", "bloom", "mpt-clip")


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a random model of three layers in float32 to ``tmp_path / "model"``."""

    def write(kind: str = "llama-gqa", **options: Any) -> Path:
        build(kind, layers=3).save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return write


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
