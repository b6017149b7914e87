"""Fixtures shared by all tests: tiny random models, the real default model, and optional shared data."""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch

# Without a GPU the kernels are tested in Triton's interpreter. Triton reads this at its first import, which may be any
# of the imports below.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

SLOW_FIXTURES = {"default_model_dir", "shared_dir", "book_model_dir"}
"""A test that asks for one of these needs a real model or large data, so it is marked ``slow`` at collection."""


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores fairly between the workers of pytest-xdist; a lone process takes them all."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses a real model or shared data as ``slow``; nobody has to remember it."""
    for item in items:
        if SLOW_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def stats_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command line keeps calibration statistics in this test: not in the user's cache."""
    from kvslim.calibrating import stats_cache

    folder = tmp_path / "statistics"
    monkeypatch.setattr(stats_cache, "user_folder", lambda: folder)
    return folder


class MakeTiny(Protocol):
    """The call signature of the ``make_tiny`` fixture."""

    def __call__(
        self,
        family: str = "llama",
        *,
        kv_heads: int = 2,
        heads: int = 4,
        head_dim: int = 16,
        layers: int = 2,
        sliding_window: int | None = None,
        vocab: int = 128,
        seed: int = 0,
    ) -> PreTrainedModel: ...


def build_tiny(
    family: str = "llama",
    *,
    kv_heads: int = 2,
    heads: int = 4,
    head_dim: int = 16,
    layers: int = 2,
    sliding_window: int | None = None,
    vocab: int = 128,
    seed: int = 0,
) -> PreTrainedModel:
    """Build a random-weight model in float32 and eval mode; equal arguments give equal weights.

    The global random state of torch is left as it was. Token ids: 0 pads, 1 begins; no token ends a
    generation, so ``generate`` always makes ``max_new_tokens``.
    """
    shape: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "intermediate_size": 2 * heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,  # wide enough that logits differ between tokens
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel
        if family == "llama":
            if sliding_window is not None:
                raise ValueError("Llama has no sliding window; use family='mistral'.")
            model = LlamaForCausalLM(LlamaConfig(**shape))
        elif family == "mistral":
            model = MistralForCausalLM(MistralConfig(**shape, sliding_window=sliding_window))
        else:
            raise ValueError(f"make_tiny knows 'llama' and 'mistral', not {family!r}.")
    return model.to(torch.float32).eval()


@pytest.fixture
def make_tiny() -> MakeTiny:
    """The factory :func:`build_tiny`."""
    return build_tiny


@pytest.fixture
def tiny_llama(make_tiny: MakeTiny) -> PreTrainedModel:
    """A fresh two-layer Llama: 4 query heads, 2 KV heads, head_dim 16, vocabulary 128."""
    return make_tiny()


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """Directory of SmolLM2-135M-Instruct; made on first use (about a minute), then taken from the user cache."""
    from kvslim import models

    return models.default(progress=False)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with large test data: ``KVSLIM_SHARED``, or ``shared`` beside the repository; skips when absent."""
    path = Path(os.environ.get("KVSLIM_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set KVSLIM_SHARED to the folder that holds it")
    return path


@pytest.fixture(scope="session")
def book_model_dir(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of BookLlama-MHA (8 layers, 8 heads, 8 KV heads, head_dim 64), unpacked once per session."""
    source = shared_dir / "models" / "bookllama-mha"
    if not (source / "weights.xz").is_file():
        pytest.skip(f"no packed model at {source}")
    return unpack_book_model(source, tmp_path_factory.mktemp("bookllama-mha"))


def unpack_book_model(source: Path, target: Path) -> Path:
    """Write the packed model in ``source`` to ``target`` as a bf16 Hugging Face directory and return it.

    ``weights.xz`` is an npz archive. A tensor ``NAME`` is stored as ``NAME.plain``, or as ``NAME.codes`` in groups of
    64 values with one scale each in ``NAME.scales``; ``shapes.json`` gives its shape.
    """
    shapes: dict[str, list[int]] = json.loads((source / "shapes.json").read_text())
    with lzma.open(source / "weights.xz") as packed:
        arrays = np.load(io.BytesIO(packed.read()), allow_pickle=False)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if f"{name}.plain" in arrays:
            values = arrays[f"{name}.plain"].astype(np.float32)
        else:
            groups = arrays[f"{name}.codes"].astype(np.float32).reshape(-1, 64)
            values = groups * arrays[f"{name}.scales"].astype(np.float32).reshape(-1, 1)
        tensors[name] = torch.from_numpy(values).reshape(shape).to(torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, target / name)
    return target
