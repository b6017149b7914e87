"""Models on disk, small enough that every step of a streamed compression can be tried."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    Qwen3Config,
)

VOCAB = 128
_GQA = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12}  # fmt: skip
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, _GQA),
    "llama-tied": (LlamaConfig, _GQA | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3": (Qwen3Config, _GQA),
    "gemma3": (Gemma3TextConfig, _GQA | {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 12,
    }),
    "phi3": (Phi3Config, _GQA | {"sliding_window": 6}),
    "gpt-neox": (GPTNeoXConfig, {k: _GQA[k] for k in list(_GQA)[:4]} | {"rotary_pct": 0.5}),
    "opt": (OPTConfig, {"hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                        "word_embed_proj_dim": 48}),
    "gpt2": (GPT2Config, {"n_embd": 48, "n_layer": 3, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}),
    "bloom": (BloomConfig, {"hidden_size": 48, "n_layer": 3, "n_head": 4}),
    "mpt": (MptConfig, {"d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 256,
                        "attn_config": {"clip_qkv": 0.5}}),
}  # fmt: skip


def build(kind: str) -> Any:
    config_class, settings = KINDS[kind]
    config = config_class(
        **{"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, **settings}
    )
    config.initializer_range = 0.15
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # biases are made as zeros, and would then not be tested
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Write a random model of three layers in float32 to ``tmp_path / "model"``."""

    def write(kind: str = "llama", **options: Any) -> Path:
        build(kind).save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return write


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
