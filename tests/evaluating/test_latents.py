"""Latents of one layer: captured as the cache gets them, flat after the rotation, drawn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.caching.latent import LatentCache
from kvslim.errors import ConfigError, UnsupportedModelError
from kvslim.evaluating.latents import capture_latents, outlier_ratio, plot_latents
from kvslim.palu import PaluConfig

IDS = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(0))


def test_captured_latents_are_what_the_cache_keeps(tiny_llama: PreTrainedModel) -> None:
    slim = palu.compress(tiny_llama, None, PaluConfig(rate=0.5, decomposition="svd"))
    keys, values = capture_latents(slim, IDS, 1)
    with torch.no_grad():
        out = slim(IDS[None], use_cache=True)
    cache: Any = getattr(out, "past_key_values", None) or out.cache
    assert isinstance(cache, LatentCache)
    torch.testing.assert_close(keys, cache.layers[1].keys[0])
    torch.testing.assert_close(values, cache.layers[1].values[0])
    attention = slim.model.layers[1].self_attn
    assert not attention.k_latent._forward_hooks
    assert not attention.v_latent._forward_hooks


def test_the_rotation_flattens_and_both_are_drawn(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    with torch.no_grad():
        for layer in tiny_llama.model.layers:
            layer.self_attn.k_proj.weight[0] *= 20  # a key channel far larger than the others
    drawn = {}
    for label, hadamard in (("before", False), ("after", True)):
        config = PaluConfig(rate=0.5, decomposition="svd", bits=4, hadamard=hadamard)
        drawn[label], _ = capture_latents(palu.compress(copy.deepcopy(tiny_llama), None, config), IDS, 0)
    assert outlier_ratio(drawn["before"]) > 1.5 * outlier_ratio(drawn["after"])
    plot_latents(drawn, tmp_path / "latents.png", "keys of layer 0")
    assert (tmp_path / "latents.png").read_bytes()[:4] == b"\x89PNG"


def test_outlier_ratio_by_hand() -> None:
    assert outlier_ratio(torch.tensor([[3.0, 1.0, 1.0, 1.0], [-3.0, 1.0, -1.0, 1.0]])) == pytest.approx(3**0.5)
    assert outlier_ratio(torch.zeros(2, 3)) == 1.0


def test_wrong_use(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="Palu-compressed"):
        capture_latents(tiny_llama, IDS, 0)
    slim = palu.compress(tiny_llama, None, PaluConfig(decomposition="svd"))
    for ids, layer in ((IDS, 2), (IDS, -1), (IDS[:0], 0), (IDS[None], 0)):
        with pytest.raises(ConfigError, match="layer from 0 to 1"):
            capture_latents(slim, ids, layer)
    for latents in ({}, {"x": torch.zeros(0, 3)}, {"x": torch.zeros(3)}):
        with pytest.raises(ConfigError, match="tokens, channels"):
            plot_latents(latents, tmp_path / "x.png", "")
