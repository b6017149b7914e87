"""What the tests of sessions share: a hybrid model, caches filled with made-up keys and values, equality of states."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from comparing import differences
from kvslim.caching.snapshot import take
from kvslim.jolt import JoltCache


def build_hybrid(window: int = 24) -> PreTrainedModel:
    """A Qwen2 whose second and third layer of four have a sliding window."""
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        initializer_range=0.1,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Qwen2ForCausalLM(config).eval()


def fill(cache: JoltCache, tokens: int, rows: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> JoltCache:
    """Append keys and values whose token spectrum falls; equal seeds have equal directions."""
    shape = cache.shape
    for index in range(len(cache.layers)):
        pair = []
        for kind in range(2):
            same = torch.Generator().manual_seed(10 * index + kind)
            mix = torch.randn(1, shape.kv_heads, 6, shape.head_dim, generator=same)
            rng = torch.Generator().manual_seed(1000 * seed + 10 * index + kind)
            basis = torch.randn(rows, shape.kv_heads, tokens, 6, generator=rng)
            noise = torch.randn(rows, shape.kv_heads, tokens, shape.head_dim, generator=rng)
            pair.append((basis @ mix + 0.1 * noise).to(dtype))
        cache.update(*pair, index)
    return cache


def compress_quietly(cache: JoltCache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prompt too short for its ratio
        cache.compress()


def contents(cache: JoltCache) -> Any:
    """Everything in a cache; exact tensors without the views that they may be."""
    state = take(cache)
    sliding = [dataclasses.replace(s, keys=s.keys.contiguous(), values=s.values.contiguous()) for s in state.sliding]
    tail = [(keys.contiguous(), values.contiguous()) for keys, values in state.tail]
    return dataclasses.replace(state, reports=(), tail=tuple(tail), sliding=tuple(sliding))


def assert_same(one: JoltCache, two: JoltCache) -> None:
    """Two caches hold the same, bit for bit, and report the same bytes."""
    assert not list(differences(contents(one), contents(two)))
    assert (one.config, one.price) == (two.config, two.price)
    mine, theirs = one.report(), two.report()
    assert dataclasses.replace(mine, tail_nbytes=0) == dataclasses.replace(theirs, tail_nbytes=0)
    assert theirs.tail_nbytes <= mine.tail_nbytes  # a sliding layer that has just grown may hold more than it needs


@pytest.fixture
def sessions() -> SimpleNamespace:
    """The helpers above; test modules cannot import each other."""
    return SimpleNamespace(fill=fill, compress=compress_quietly, assert_same=assert_same, hybrid=build_hybrid)
