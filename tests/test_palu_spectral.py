"""Palu by what errors cost: spectral ranks and the loss-aware decomposition, on tiny random models."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.calibrating.fisher import FisherStats
from kvslim.calibrating.grams import GramStats
from kvslim.errors import CalibrationError, ConfigError
from kvslim.palu import PaluConfig

WINDOWS = torch.randint(3, 128, (4, 48), generator=torch.Generator().manual_seed(7))
BEST = PaluConfig(rate=0.5, group_size=2, ranks="spectral", decomposition="loss-aware")


@pytest.fixture
def model(make_tiny: Any) -> PreTrainedModel:
    """Four KV heads of 16 in two layers."""
    made: PreTrainedModel = make_tiny(kv_heads=4, heads=8)
    return made


@pytest.fixture
def stats(model: PreTrainedModel) -> tuple[GramStats, FisherStats]:
    grams, fisher = palu.calibrate(model, BEST, WINDOWS)
    assert grams is not None
    assert fisher is not None
    return grams, fisher


@torch.no_grad()
def cost(model: PreTrainedModel, slim: PreTrainedModel, stats: tuple[GramStats, FisherStats], metric: str) -> float:
    """What the truncation costs by its definition: trace of ``F E``, with ``E`` the moments of the output errors."""
    grams, fisher = stats
    assert fisher.output_grams is not None
    total = 0.0
    for layer, (own, new) in enumerate(zip(model.model.layers, slim.model.layers, strict=True)):
        pairs = (
            (own.self_attn.k_proj, new.self_attn.k_latent, 0),
            (own.self_attn.v_proj, new.self_attn.v_latent, 1),
        )
        for linear, latent, kind in pairs:
            difference = linear.weight.double().T - latent.rebuild(latent.down.weight.T).double()  # no bias here
            errors = difference.T @ grams.grams[layer] @ difference
            for start in range(0, 64, 32):  # groups of two heads: correlations between groups are not seen
                block = slice(start, start + 32)
                gradients = fisher.output_grams[layer][kind][block, block]
                if metric == "squares":
                    gradients = gradients.diagonal().mean() * torch.eye(32, dtype=torch.float64)
                total += float((gradients * errors[block, block]).sum())
    return total


def variants(model: PreTrainedModel, stats: tuple[GramStats, FisherStats], **fields: Any) -> PreTrainedModel:
    config = PaluConfig.from_dict({**BEST.to_dict(), "fusion": "apply", **fields})
    return palu.compress_with(copy.deepcopy(model), config, grams=stats[0], fisher=stats[1])


def test_spectral_ranks_cost_least_of_all_rules(model: PreTrainedModel, stats: tuple[GramStats, FisherStats]) -> None:
    for decomposition, metric in (("whitened", "squares"), ("loss-aware", "moments")):
        costs = {
            ranks: cost(model, variants(model, stats, ranks=ranks, decomposition=decomposition), stats, metric)
            for ranks in ("spectral", "uniform", "fisher", "fisher-rms")
        }
        assert costs["spectral"] == min(costs.values())
        assert costs["spectral"] < 0.95 * costs["uniform"]


def test_spectral_ranks_are_the_best_of_all_plans(model: PreTrainedModel, stats: tuple[GramStats, FisherStats]) -> None:
    """Joint, steps of 16: all plans of four cells can be tried."""
    fields = {"group_size": None, "rank_multiple": 16, "rank_floor": 0.0}
    config = PaluConfig.from_dict({**BEST.to_dict(), "fusion": "apply", **fields})
    chosen = palu.plan(model, config, stats[1], stats[0])
    flat = [rank for pair in zip(chosen.key_ranks, chosen.value_ranks, strict=True) for (rank,) in pair]
    tails = []
    for layer in range(2):
        attention = model.model.layers[layer].self_attn
        for kind, linear in enumerate((attention.k_proj, attention.v_proj)):
            assert stats[1].output_grams is not None
            f = stats[1].output_grams[layer][kind]
            f = f + 0.1 * f.diagonal().mean() * torch.eye(64, dtype=torch.float64)
            weight = linear.weight.detach().double()
            energies = torch.linalg.eigvals(weight @ stats[0].grams[layer] @ weight.T @ f).real
            energies = energies.sort(descending=True).values
            tails.append({rank: float(energies[rank:].sum()) for rank in range(16, 65, 16)})
    best = min(
        math.fsum(tail[rank] for tail, rank in zip(tails, plan, strict=True))
        for plan in itertools.product(range(16, 65, 16), repeat=4)
        if sum(plan) <= 128
    )
    ours = math.fsum(tail[rank] for tail, rank in zip(tails, flat, strict=True))
    assert sum(flat) == 128
    assert ours == pytest.approx(best, rel=1e-4)


def test_the_loss_aware_decomposition_costs_less_at_equal_ranks(
    model: PreTrainedModel, stats: tuple[GramStats, FisherStats]
) -> None:
    costs = {
        name: cost(model, variants(model, stats, ranks="uniform", decomposition=name), stats, "moments")
        for name in ("loss-aware", "whitened", "svd")
    }
    assert costs["loss-aware"] < costs["whitened"]
    assert costs["loss-aware"] < costs["svd"]


def test_the_cost_foretells_the_divergence(model: PreTrainedModel, stats: tuple[GramStats, FisherStats]) -> None:
    """The cheaper plan really is nearer to the model, at a small rate where the second order counts."""

    @torch.no_grad()
    def divergence(slim: PreTrainedModel) -> float:
        own, ours = (each(WINDOWS, use_cache=False).logits.double().log_softmax(-1) for each in (model, slim))
        return float((own.exp() * (own - ours)).sum(-1).mean())

    by_rule = {
        name: divergence(variants(model, stats, rate=0.15, **fields))
        for name, fields in {
            "both": {},
            "neither": {"ranks": "uniform", "decomposition": "whitened"},
        }.items()
    }
    assert by_rule["both"] < by_rule["neither"]


def test_calibrating_gives_what_the_configuration_needs(model: PreTrainedModel) -> None:
    _, fisher = palu.calibrate(model, PaluConfig(decomposition="whitened"), WINDOWS)
    assert fisher is not None
    assert fisher.output_grams is None
    slim = palu.compress(copy.deepcopy(model), None, BEST, WINDOWS)
    assert (slim.palu.calibration_tokens, slim.palu.fisher_windows) == (192, 4)
    grams, fisher = palu.calibrate(model, PaluConfig(decomposition="loss-aware"), WINDOWS)
    assert grams is not None
    assert fisher is not None
    assert fisher.output_grams is not None


def test_missing_or_foreign_statistics_are_refused(
    make_tiny: Any, model: PreTrainedModel, stats: tuple[GramStats, FisherStats]
) -> None:
    grams, fisher = stats
    with pytest.raises(CalibrationError, match=r"needs fisher=calibrate_fisher\(model, windows, output_grams=True\)"):
        palu.compress_with(model, PaluConfig(ranks="uniform"), grams=grams)
    with pytest.raises(CalibrationError, match="needs fisher"):
        palu.plan(model, BEST, grams=grams)
    with pytest.raises(CalibrationError, match="needs grams"):
        palu.plan(model, BEST, fisher)
    with pytest.raises(ConfigError, match="pass the model"):
        palu.plan(model.config, BEST, fisher, grams)
    taller = make_tiny(kv_heads=4, heads=8, layers=3)
    with pytest.raises(CalibrationError, match="2 Gram matrices for 3 layers"):
        palu.compress_with(taller, PaluConfig(ranks="uniform", decomposition="whitened"), grams=grams)
    others, _ = palu.calibrate(taller, PaluConfig(), WINDOWS)
    with pytest.raises(CalibrationError, match="Output gradients of 2 layers for 3"):
        palu.compress_with(taller, PaluConfig(ranks="uniform"), grams=others, fisher=fisher)


def test_half_precision(model: PreTrainedModel, stats: tuple[GramStats, FisherStats]) -> None:
    slim = palu.compress(copy.deepcopy(model).to(torch.bfloat16), None, BEST, WINDOWS)
    reference = variants(model, stats).palu.plan
    pairs: list[tuple[Tensor, Tensor]] = [
        (torch.tensor(slim.palu.plan.key_ranks), torch.tensor(reference.key_ranks)),
        (torch.tensor(slim.palu.plan.value_ranks), torch.tensor(reference.value_ranks)),
    ]
    assert slim.palu.plan.channels == reference.channels
    assert all(int((ours - own).abs().max()) <= 2 for ours, own in pairs)
