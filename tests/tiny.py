"""Tiny random models of every family that Palu supports, and a forward pass in chunks; shared by several tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from kvslim.errors import BudgetError

VOCAB = 128
GQA = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
       "num_key_value_heads": 2, "head_dim": 12}  # fmt: skip
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
LONGCHAT = {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama-gqa": (LlamaConfig, GQA),
    "llama-mha-bias": (LlamaConfig, GQA | {"num_key_value_heads": 4, "attention_bias": True}),
    "llama-tied": (LlamaConfig, GQA | {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-mqa": (LlamaConfig, GQA | {"num_key_value_heads": 1}),
    "longchat": (LlamaConfig, GQA | LONGCHAT),
    "mistral": (MistralConfig, GQA | {"sliding_window": 6}),
    "qwen2": (Qwen2Config, GQA),
    "qwen2-sliding": (Qwen2Config, GQA | HYBRID | {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": (Qwen3Config, GQA),
    "gemma3": (Gemma3TextConfig, GQA | HYBRID | {"num_key_value_heads": 1, "query_pre_attn_scalar": 12}),
    "phi3": (Phi3Config, GQA | {"sliding_window": 6}),
    "phi3-partial": (Phi3Config, GQA | {"head_dim": 24, "hidden_size": 96, "partial_rotary_factor": 0.5}),
    "gpt-neox": (GPTNeoXConfig, {k: GQA[k] for k in list(GQA)[:4]} | {"rotary_pct": 0.5}),
    "opt": (OPTConfig, {"hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "word_embed_proj_dim": 48}),
    "gpt2": (GPT2Config, {"n_embd": 48, "n_layer": 2, "n_head": 4}),
    "gpt2-by-layer": (GPT2Config, {"n_embd": 48, "n_layer": 2, "n_head": 4, "scale_attn_by_inverse_layer_idx": True}),
    "bloom": (BloomConfig, {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "bloom-odd-heads": (BloomConfig, {"hidden_size": 36, "n_layer": 2, "n_head": 3}),
    "mpt": (MptConfig, {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True}),
    "mpt-clip": (MptConfig, {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True,
                             "attn_config": {"clip_qkv": 0.5}}),
}  # fmt: skip


def build(kind: str, *, layers: int = 2, **changes: Any) -> PreTrainedModel:
    """A model of ``kind`` in float32 and eval mode; equal arguments give equal weights."""
    config_class, settings = KINDS[kind]
    names = {"n_layer", "n_layers", "num_hidden_layers"} & set(settings)
    types = settings.get("layer_types", ())
    depth = dict.fromkeys(names, layers) | ({"layer_types": (types * layers)[:layers]} if types else {})
    config = config_class(**{
        "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.15,
        **settings, **depth, **changes,
    })  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():  # biases are made as zeros, and would then not be tested
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def compress_within(cache: Any, tokens: int, ratio: float) -> bool:
    """Compress; check that prefix and description keep the budget. False if it was refused or stayed exact."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a prompt too short for its ratio
            cache.compress()
    except BudgetError:
        assert cache.prefix is None
        return False
    if cache.prefix is None:
        assert "stays exact" in cache.note
        return False
    assert cache.prefix_nbytes + cache._header_bytes() <= cache.shape.dense_bytes(tokens) / ratio + 1
    return True


def cache_of(out: Any) -> Any:
    """The cache of an output, under the name of any transformers version."""
    return getattr(out, "past_key_values", None) or out.cache


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def in_chunks(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, sizes: list[int], cache: Any = None
) -> tuple[Tensor, Any]:
    """Logits of ``ids`` fed in chunks through one cache, and the cache."""
    parts, start = [], 0
    takes_positions = model.config.model_type.removeprefix("kvslim_palu_") not in ("bloom", "mpt")
    for size in sizes:
        stop = start + size
        extra = {"position_ids": positions_of(mask)[:, start:stop]} if takes_positions else {}
        out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True, **extra)
        cache = cache_of(out)
        parts.append(out.logits)
        start = stop
    return torch.cat(parts, dim=1), cache
