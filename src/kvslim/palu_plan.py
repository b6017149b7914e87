"""Palu's plan: a rank for every group of KV heads, and what errors in each of them cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvslim.allocating.ranks import proportional_ranks, uniform_ranks
from kvslim.allocating.spectral import spectral_ranks
from kvslim.attending.families import family_of, kv_shape_of
from kvslim.attending.projections import Part, projections_of
from kvslim.calibrating.fisher import FisherStats
from kvslim.calibrating.grams import GramStats
from kvslim.decomposing.whitened import output_energies, plain_output_energies
from kvslim.errors import CalibrationError, ConfigError
from kvslim.palu_config import PaluConfig, PaluPlan
from kvslim.palu_grading import graded_plan


def plan(
    config_or_model: Any, config: PaluConfig, fisher: FisherStats | None = None, grams: GramStats | None = None
) -> PaluPlan:
    """Choose the rank of every group; needs no weights, except for ``ranks="spectral"`` and ``graded``.

    Args:
        config_or_model: the model or, for the other rules, its transformers configuration.
        config: rate, group size and rule; the widths of channels too if it is ``graded``.
        fisher: the information that every rule but ``uniform`` needs.
        grams: the statistics that ``ranks="spectral"`` needs too.

    Raises:
        UnsupportedModelError, ConfigError, CalibrationError, BudgetError: as in :func:`compress`.
    """
    family_of(config_or_model)
    shape = kv_shape_of(config_or_model)
    size, notes = _group_size(config.group_size, shape.kv_heads)
    groups = shape.kv_heads // size
    full = min(size * shape.head_dim, getattr(config_or_model, "config", config_or_model).hidden_size)
    caps = [full] * (shape.layers * 2 * groups)
    if config.ranks == "uniform":
        flat = uniform_ranks(caps, config.rate, config.rank_multiple)
    else:
        scores = _group_scores(config, fisher, (shape.layers, 2, shape.kv_heads), groups)
        limits = (config.rate, config.rank_multiple, config.rank_floor)
        if config.ranks == "spectral":
            flat = spectral_ranks(_group_energies(config_or_model, config, groups, grams, fisher), scores, *limits)
        else:
            flat = proportional_ranks(scores, caps, *limits)
    cells = [tuple(flat[start : start + groups]) for start in range(0, len(flat), groups)]
    chosen = PaluPlan(tuple(cells[0::2]), tuple(cells[1::2]), group_size=size, full_rank=full, notes=notes)
    if config.graded is None:
        return chosen
    costing = replace(config, ranks="spectral")
    scores = _group_scores(costing, fisher, (shape.layers, 2, shape.kv_heads), groups)
    energies = _group_energies(config_or_model, costing, groups, grams, fisher)
    channels = 2 * shape.layers * shape.kv_heads * shape.head_dim
    rotary = family_of(config_or_model).rotary is not None
    return graded_plan(chosen, energies, scores, config.graded, channels, rotary=rotary)


def _group_size(requested: int | None, kv_heads: int) -> tuple[int, tuple[str, ...]]:
    if requested is None or requested == kv_heads:
        return kv_heads, ()
    if requested > kv_heads:
        return kv_heads, (f"group_size {requested} is more than the {kv_heads} KV heads: decomposed jointly (J-LRD).",)
    if kv_heads % requested:
        divisors = ", ".join(str(size) for size in range(1, kv_heads + 1) if kv_heads % size == 0)
        raise ConfigError(
            f"group_size {requested} does not divide the {kv_heads} KV heads. Use one of {divisors}, or None for joint."
        )
    return requested, ()


def _group_scores(
    config: PaluConfig, fisher: FisherStats | None, expected: tuple[int, int, int], groups: int
) -> list[float]:
    """One score per (layer, key or value, group), in this order; for ``spectral``, the cost of a unit of energy."""
    if fisher is None:
        raise CalibrationError(f"ranks={config.ranks!r} needs fisher=calibrate_fisher(model, windows).")
    rules = {"fisher": fisher.sum_squares, "fisher-rms": fisher.mean_rms, "spectral": fisher.output_squares}
    per_head = rules[config.ranks]
    if tuple(per_head.shape) != expected:
        raise CalibrationError(
            f"The Fisher information is of shape {tuple(per_head.shape)}, this model needs {expected}. Calibrate it."
        )
    grouped = per_head.reshape(expected[0], 2, groups, -1)
    scores = grouped.sum(-1) if config.ranks == "fisher" else grouped.mean(-1)
    if config.needs_output_grams and config.ranks == "spectral":
        scores = torch.ones_like(scores)  # these energies are costs already
    return [float(score) for score in scores.flatten()]


Metric = tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]
"""How a layer weighs errors: the Gram matrix of its inputs, and those of its output gradients, keys and values."""


def metrics_of(model: Any, config: PaluConfig, grams: GramStats | None, fisher: FisherStats | None) -> list[Metric]:
    """The metric of each layer, as far as the decomposition asks for it and it does not come in turn.

    Gram matrices are sums over tokens; for ``graded`` means, so that singular values are deviations of the latents.
    """
    layers = len(projections_of(model))
    used = None if config.decomposition == "svd" or config.sequential else grams
    inputs: Sequence[Tensor | None] = [None] * layers if used is None else used.grams
    if config.graded is not None and used is not None:
        inputs = [gram / used.tokens for gram in used.grams]
    if len(inputs) != layers:
        raise CalibrationError(f"{len(inputs)} Gram matrices for {layers} layers. Calibrate this model.")
    if not config.needs_output_grams:
        return [(gram, (None, None)) for gram in inputs]
    if fisher is None or fisher.output_grams is None:
        raise CalibrationError(
            f"decomposition={config.decomposition!r} needs fisher=calibrate_fisher(model, windows, output_grams=True)."
        )
    if len(fisher.output_grams) != layers:
        raise CalibrationError(f"Output gradients of {len(fisher.output_grams)} layers for {layers}. Calibrate it.")
    return [(gram, (pair[0], pair[1])) for gram, pair in zip(inputs, fisher.output_grams, strict=True)]


def _group_energies(
    model: Any, config: PaluConfig, groups: int, grams: GramStats | None, fisher: FisherStats | None
) -> list[list[float]]:
    """The squared singular values of each group, in the order of :func:`_group_scores`."""
    if not hasattr(model, "config"):
        raise ConfigError("ranks='spectral' depends on the weights: pass the model, not its configuration.")
    if grams is None:
        raise CalibrationError("ranks='spectral' needs grams=calibrate_grams(model, windows).")
    found = []
    metrics = metrics_of(model, config, grams, fisher)
    for parts, gram, (_, outputs) in zip(projections_of(model), grams.grams, metrics, strict=True):
        for part, output_gram in zip((parts.key, parts.value), outputs, strict=True):
            for weight, metric in groups_of(part, groups, output_gram):
                if config.decomposition == "svd":
                    found.append(plain_output_energies(weight, gram).tolist())
                else:
                    found.append(output_energies(weight, gram, metric).tolist())
    return found


def groups_of(part: Part, count: int, output_gram: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """The weight ``(in_features, group features)`` of each group of heads, and its block of the output metric."""
    weights = torch.chunk(part.weight, count, dim=1)
    if output_gram is None:
        return [(weight, None) for weight in weights]
    size = weights[0].shape[1]
    places = [slice(start, start + size) for start in range(0, count * size, size)]
    return [(weight, output_gram[place, place]) for weight, place in zip(weights, places, strict=True)]
