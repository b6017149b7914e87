"""Sequential calibration: each layer is measured behind the compressed layers before it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.calibrating.grams import calibrate_grams
from kvslim.calibrating.sequential import replace_in_turn
from kvslim.errors import CalibrationError, ConfigError, NonFiniteError

WINDOWS = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(7))
TURN = {"rate": 0.5, "sequential": True}


def compressed(model: PreTrainedModel, **settings: Any) -> PreTrainedModel:
    return palu.compress(copy.deepcopy(model), None, palu.PaluConfig(**settings), WINDOWS)


def factors(model: PreTrainedModel, layer: int) -> Tensor:
    return model.model.layers[layer].self_attn.k_latent.down.weight.detach()


def test_the_first_layer_is_as_ever_and_the_next_is_not(make_tiny: Any) -> None:
    model = make_tiny(layers=3)
    usual, turn = compressed(model, rate=0.5), compressed(model, **TURN)
    assert torch.allclose(factors(turn, 0), factors(usual, 0), atol=1e-5)
    assert all((factors(turn, layer) - factors(usual, layer)).abs().max() > 1e-3 for layer in (1, 2))
    assert turn.palu.calibration_tokens == 160
    assert turn.palu.config.sequential


def test_what_a_layer_reads_is_reproduced_better(make_tiny: Any) -> None:
    """The keys of the last layer for the inputs it really gets: no factors of that rank come closer."""
    model = make_tiny(layers=3, kv_heads=4)
    own = model.model.layers[2].self_attn.k_proj
    turn = compressed(model, **TURN)
    inputs: list[Tensor] = []
    handle = turn.model.layers[2].self_attn.k_latent.register_forward_pre_hook(lambda m, a: inputs.append(a[0]))
    with torch.no_grad():
        turn(WINDOWS, use_cache=False)
    handle.remove()
    errors = {}
    for name, settings in (("turn", TURN), ("usual", {"rate": 0.5})):
        latent = compressed(model, **settings).model.layers[2].self_attn.k_latent
        errors[name] = float((latent.rebuild(latent(inputs[0])) - own(inputs[0])).detach().norm())
    assert errors["turn"] < errors["usual"]


@pytest.mark.parametrize("settings", [{"ranks": "spectral"}, {"decomposition": "loss-aware"}, {"ranks": "fisher"}])
def test_ranks_and_gradients_come_from_the_uncompressed_model(tiny_llama: PreTrainedModel, settings: Any) -> None:
    usual, turn = compressed(tiny_llama, rate=0.5, **settings), compressed(tiny_llama, **TURN, **settings)
    assert turn.palu.plan == usual.palu.plan
    assert not torch.equal(factors(turn, 1), factors(usual, 1))


def test_a_model_in_training_stays_so_and_keeps_no_hooks(tiny_llama: PreTrainedModel) -> None:
    tiny_llama.train()
    own = [layer.self_attn for layer in tiny_llama.model.layers]
    seen: list[tuple[int, int]] = []

    def build(layer: int, gram: Tensor) -> nn.Module:
        assert tiny_llama.model.layers[layer].self_attn is own[layer]
        assert gram.shape == (64, 64)
        return copy.deepcopy(own[layer])

    built = replace_in_turn(tiny_llama, WINDOWS, build, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 2), (2, 2)]
    assert all(module.training for module in (tiny_llama, *own, *built))
    assert [layer.self_attn for layer in tiny_llama.model.layers] == own
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny_llama.modules())


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_leaves_the_model_as_it_was(tiny_llama: PreTrainedModel, failing: int) -> None:
    own, logits = [layer.self_attn for layer in tiny_llama.model.layers], tiny_llama(WINDOWS).logits

    def build(layer: int, _: Tensor) -> nn.Module:
        if layer == failing:
            raise KeyboardInterrupt
        return copy.deepcopy(own[layer])

    with pytest.raises(KeyboardInterrupt):
        replace_in_turn(tiny_llama, WINDOWS, build)
    assert torch.equal(tiny_llama(WINDOWS).logits, logits)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in tiny_llama.modules())


def test_broken_weights_name_the_layer(tiny_llama: PreTrainedModel) -> None:
    with torch.no_grad():
        tiny_llama.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="layer 1 holds NaN"):
        palu.compress(tiny_llama, None, palu.PaluConfig(**TURN), WINDOWS)
    assert not hasattr(tiny_llama, "palu")


def test_half_precision(tiny_llama: PreTrainedModel) -> None:
    turn = compressed(tiny_llama.to(torch.bfloat16), **TURN)
    assert torch.isfinite(turn(WINDOWS).logits).all()


def test_what_does_not_go_together(tiny_llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="weighs none"):
        palu.PaluConfig(sequential=True, decomposition="svd")
    with pytest.raises(ConfigError, match="true or false"):
        palu.PaluConfig(sequential=1)
    with pytest.raises(CalibrationError, match="pass windows"):
        palu.compress_with(tiny_llama, palu.PaluConfig(**TURN), grams=calibrate_grams(tiny_llama, WINDOWS))
    with pytest.raises(CalibrationError, match="needs calibration"):
        palu.compress(tiny_llama, None, palu.PaluConfig(**TURN))
    assert palu.PaluConfig(sequential=True, ranks="spectral").needs_grams
    assert not palu.PaluConfig(ranks="uniform", decomposition="whitened", sequential=True).needs_grams
