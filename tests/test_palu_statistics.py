"""Statistics that are too few or damaged are refused by layer, before anything is replaced."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.calibrating.grams import GramStats
from kvslim.errors import CalibrationError, KvslimError, NonFiniteError
from kvslim.palu import PaluConfig

WINDOWS = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(7))
BEST = PaluConfig(rate=0.5, ranks="spectral", decomposition="loss-aware")


def negative(gram: Tensor) -> Tensor:
    """With one eigenvalue of a thousandth of the trace below zero."""
    energies, vectors = torch.linalg.eigh(gram)
    energies[0] = -1e-3 * energies.sum()
    return (vectors * energies) @ vectors.T


def lopsided(gram: Tensor) -> Tensor:
    gram = gram.clone()
    gram[0, 1] += gram.diagonal().sum()
    return gram


def broken(gram: Tensor) -> Tensor:
    gram = gram.clone()
    gram[3, 3] = float("nan")
    return gram


DAMAGE = [
    pytest.param(torch.zeros_like, "is zero", CalibrationError, id="zero"),
    pytest.param(negative, "not positive semi-definite", CalibrationError, id="indefinite"),
    pytest.param(torch.neg, "not symmetric and positive", CalibrationError, id="negative"),
    pytest.param(lopsided, "not symmetric", CalibrationError, id="lopsided"),
    pytest.param(broken, "NaN or Inf", NonFiniteError, id="nan"),
    pytest.param(lambda gram: gram[:-1], "not square", CalibrationError, id="shape"),
]


def refused(model: PreTrainedModel, config: PaluConfig, stats: Any, error: type[KvslimError], message: str) -> None:
    own = model.model.layers[0].self_attn
    with pytest.raises(error, match=message):
        palu.compress_with(model, config, grams=stats[0], fisher=stats[1])
    assert model.model.layers[0].self_attn is own
    assert not hasattr(model, "palu")


@pytest.mark.parametrize(("damage", "words", "error"), DAMAGE)
@pytest.mark.parametrize("settings", [{}, {"ranks": "spectral"}, {"ranks": "spectral", "decomposition": "svd"}])
def test_damaged_gram_matrices_name_the_layer(
    tiny_llama: PreTrainedModel, settings: dict[str, Any], damage: Any, words: str, error: type[KvslimError]
) -> None:
    config = PaluConfig(rate=0.5, **settings)
    grams, fisher = palu.calibrate(tiny_llama, config, WINDOWS)
    bad = GramStats((grams.grams[0], damage(grams.grams[1])), grams.tokens)
    refused(tiny_llama, config, (bad, fisher), error, rf"layer 1's inputs.*{words}")
    palu.compress_with(tiny_llama, config, grams=grams, fisher=fisher)


@pytest.mark.parametrize(("damage", "words", "error"), DAMAGE[:-1])
def test_damaged_output_gradients_name_the_layer(
    tiny_llama: PreTrainedModel, damage: Any, words: str, error: type[KvslimError]
) -> None:
    grams, fisher = palu.calibrate(tiny_llama, BEST, WINDOWS)
    first, last = fisher.output_grams
    bad = replace(fisher, output_grams=(first, torch.stack([last[0], damage(last[1])])))
    refused(tiny_llama, BEST, (grams, bad), error, rf"gradients by layer 1's values.*{words}")


def test_fewer_tokens_than_features_are_noted(tiny_llama: PreTrainedModel) -> None:
    def notes(tokens: int, **settings: Any) -> tuple[str, ...]:
        slim = palu.compress(copy.deepcopy(tiny_llama), None, PaluConfig(rate=0.5, **settings), WINDOWS[:1, :tokens])
        return slim.palu.plan.notes

    for settings in ({}, {"sequential": True}, {"decomposition": "loss-aware"}):
        assert "Calibrated on 20 tokens, fewer than the 64 features" in notes(20, **settings)[0]
    assert notes(20, decomposition="svd") == ()
    slim = palu.compress(copy.deepcopy(tiny_llama), None, PaluConfig(rate=0.5), WINDOWS)
    assert slim.palu.plan.notes == ()


@pytest.mark.parametrize("sequential", [False, True])
def test_fewer_tokens_than_channels_are_refused(tiny_llama: PreTrainedModel, sequential: bool) -> None:
    config = PaluConfig(rate=0.5, ranks="uniform", decomposition="whitened", sequential=sequential)  # 16 of 32 channels
    with pytest.raises(CalibrationError, match="15 calibration tokens cannot choose 16 channels"):
        palu.compress(tiny_llama, None, config, WINDOWS[:1, :15])
    exact = PaluConfig(rate=0.0, ranks="uniform", decomposition="whitened", sequential=sequential)
    palu.compress(copy.deepcopy(tiny_llama), None, exact, WINDOWS[:1, :15])
    palu.compress(tiny_llama, None, config, WINDOWS[:1, :16])


def test_a_singular_gram_matrix_is_no_damage(tiny_llama: PreTrainedModel) -> None:
    """Fewer tokens than features make one."""
    grams, _ = palu.calibrate(tiny_llama, PaluConfig(ranks="uniform", decomposition="whitened"), WINDOWS[:1, :30])
    assert int(torch.linalg.matrix_rank(grams.grams[1], rtol=1e-5)) <= 30
    palu.compress_with(tiny_llama, PaluConfig(rate=0.5, ranks="uniform", decomposition="whitened"), grams=grams)
