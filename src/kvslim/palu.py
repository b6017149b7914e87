"""Palu: compress the KV cache by low-rank projection, once per model (Chang et al., 2024, arXiv:2407.21118).

The key and value projection of every layer are factored, ``W ≈ A B``; the model then caches the small latents
``h = x A`` and rebuilds keys and values from them. In order: :func:`calibrate` the model, :func:`plan` the ranks,
:func:`compress_with` them. :func:`compress` does all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.allocating.ranks import proportional_ranks, uniform_ranks
from kvslim.allocating.spectral import spectral_ranks
from kvslim.attending.families import attention_modules, base_model_of, family_of, kv_shape_of, rotary_of
from kvslim.attending.latent_attention import LatentAttention
from kvslim.attending.latent_forms import Forms, choose_forms
from kvslim.attending.latent_model import (
    LatentModelMixin,
    Snapshot,
    install,
    layer_places,
    layer_size_of,
    restore,
    snapshot,
)
from kvslim.attending.projections import Part, projections_of
from kvslim.caching.latent import LatentCache
from kvslim.calibrating.fisher import FISHER_LENGTH, FisherStats, calibrate_fisher
from kvslim.calibrating.grams import GramStats, calibrate_grams
from kvslim.calibrating.windows import check_windows, windows_from_texts
from kvslim.checkpointing.latent_model import read_latent_model, write_latent_model
from kvslim.decomposing.whitened import Decomposition, loss_aware_svd, output_energies, plain_svd, whitened_svd
from kvslim.errors import CalibrationError, CheckpointError, ConfigError, NonFiniteError, UnsupportedModelError
from kvslim.palu_config import PaluConfig, PaluPlan, PaluReport
from kvslim.types import LowRankFactors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "PaluConfig",
    "PaluPlan",
    "PaluReport",
    "Snapshot",
    "calibrate",
    "compress",
    "compress_with",
    "load",
    "new_cache",
    "plan",
    "restore",
    "save",
    "snapshot",
]

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""

_WINDOWS_AT_MOST = 256
"""Calibration windows taken from long texts unless a number is given (SVD-LLM's setting)."""


def compress(
    model: PreTrainedModel,
    tokenizer: Any,
    config: PaluConfig,
    calibration: str | Iterable[str] | Tensor | None = None,
    *,
    calibration_windows: int | None = None,
    window_length: int = 2048,
    prepend_bos: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Compress ``model`` **in place** and return it.

    Everything is checked and computed before the first module is replaced: a call that fails leaves the model as it
    was. To keep the original, use :func:`snapshot` (no copy) or ``copy.deepcopy``.

    Args:
        model: a causal language model of a supported family with plain float weights.
        tokenizer: its tokenizer; may be ``None`` if ``calibration`` is token windows.
        config: what to do.
        calibration: text, several texts, or ``(windows, length)`` token ids. Not needed for plain SVD with uniform
            ranks.
        calibration_windows: windows to cut from the texts; ``None`` takes as many as fit, at most 256.
        window_length: tokens per window.
        prepend_bos: start each window with the beginning-of-text token, for models trained so.
        progress: called with stage, steps done and steps in all.

    Raises:
        UnsupportedModelError: the model is of no supported family, compressed already, quantized or adapted.
        ConfigError: the group size does not divide the KV heads, or the rate cannot be met.
        CalibrationError: calibration data is missing or too short.
        NonFiniteError: weights or activations hold NaN or Inf; the message names the layer.
    """
    _check(model, config)
    grams = fisher = None
    if config.needs_grams or config.needs_fisher:
        if calibration is None:
            raise CalibrationError(
                f"decomposition={config.decomposition!r} with ranks={config.ranks!r} needs calibration text. Pass "
                f"calibration=..., or use decomposition='svd' with ranks='uniform'."
            )
        windows = (
            calibration
            if isinstance(calibration, Tensor)
            else windows_from_texts(
                tokenizer, calibration, window_length, calibration_windows, prepend_bos, _WINDOWS_AT_MOST
            )
        )
        grams, fisher = calibrate(model, config, windows, progress=progress)
    return compress_with(model, config, grams=grams, fisher=fisher, progress=progress)


def calibrate(
    model: PreTrainedModel, config: PaluConfig, windows: Tensor, *, progress: Progress | None = None
) -> tuple[GramStats | None, FisherStats | None]:
    """Collect the statistics that ``config`` needs from ``(windows, length)`` token ids; ``None`` for the others.

    The Fisher pass uses the first 1024 tokens of each window. Errors as in :func:`compress`.
    """
    windows = check_windows(windows, model.config.vocab_size)
    grams = fisher = None
    if config.needs_grams:
        grams = calibrate_grams(model, windows, progress=_stage(progress, "gram matrices"))
    if config.needs_fisher:
        fisher = calibrate_fisher(
            model,
            windows[:, :FISHER_LENGTH],
            output_grams=config.needs_output_grams,
            progress=_stage(progress, "fisher information"),
        )
    return grams, fisher


def plan(
    config_or_model: Any, config: PaluConfig, fisher: FisherStats | None = None, grams: GramStats | None = None
) -> PaluPlan:
    """Choose the rank of every group; needs no weights, except for ``ranks="spectral"``.

    Args:
        config_or_model: the model or, for the other rules, its transformers configuration.
        config: rate, group size and rule.
        fisher: the information that every rule but ``uniform`` needs.
        grams: the statistics that ``ranks="spectral"`` needs too.

    Raises:
        UnsupportedModelError, ConfigError, CalibrationError: as in :func:`compress`.
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
    return PaluPlan(tuple(cells[0::2]), tuple(cells[1::2]), group_size=size, full_rank=full, notes=notes)


def compress_with(
    model: PreTrainedModel,
    config: PaluConfig,
    *,
    grams: GramStats | None = None,
    fisher: FisherStats | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Compress ``model`` **in place** from statistics collected before, and return it.

    One calibration serves any number of configurations: ``saved = snapshot(model)``, then ``compress_with`` and
    ``restore(model, saved)`` in turn. Arguments and errors as in :func:`compress`.
    """
    _check(model, config)
    if config.needs_grams and grams is None:
        raise CalibrationError(f"decomposition={config.decomposition!r} needs grams=calibrate_grams(model, windows).")
    chosen = plan(model, config, fisher, grams)
    replacements = _build(model, config, chosen, _metrics(model, config, grams, fisher), progress)
    size = layer_size_of(model)
    install(model, replacements)
    model.palu = PaluReport(
        config=config,
        plan=chosen,
        forms=tuple((module.forms.key, module.forms.value) for module in replacements),
        dense_parameters=size.dense * len(replacements),
        parameters=sum(
            size.compressed(module.forms, module.k_latent.ranks, module.v_latent.ranks) for module in replacements
        ),
        calibration_tokens=grams.tokens if grams is not None and config.needs_grams else 0,
        fisher_windows=fisher.windows if fisher is not None and config.needs_fisher else 0,
    )
    return model


def new_cache(model: PreTrainedModel) -> LatentCache:
    """An empty cache for a compressed model. ``generate`` and ``model(...)`` make one by themselves.

    Raises:
        UnsupportedModelError: the model is not compressed.
    """
    if not isinstance(model, LatentModelMixin):
        raise UnsupportedModelError("The model is not compressed. Call kvslim.compress first.")
    return LatentCache(model.palu_layout)


def save(model: PreTrainedModel, directory: str | Path, tokenizer: Any = None) -> None:
    """Write a compressed model to a new directory: safetensors and JSON, all or nothing. :func:`load` reads it.

    Raises:
        UnsupportedModelError: the model is not compressed.
        ConfigError: the place is taken or cannot be written.
    """
    if not isinstance(model, LatentModelMixin):
        raise UnsupportedModelError("The model is not compressed. Call kvslim.compress first.")
    write_latent_model(model, Path(directory), model.palu.to_dict(), tokenizer)


def load(directory: str | Path) -> PreTrainedModel:
    """Read a model that :func:`save` wrote: on the CPU, in its dtype, ready for ``generate``.

    Raises:
        ModelSourceError: there is no such checkpoint.
        CheckpointError: it is truncated, was edited, or is of a newer format.
    """
    model, about = read_latent_model(Path(directory))
    try:
        model.palu = PaluReport.from_dict(about)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{directory} does not say what was done to it: {error!r}. Copy it again.") from error
    return model


def _check(model: PreTrainedModel, config: PaluConfig) -> None:
    """Refuse what cannot be compressed, before any work."""
    if isinstance(model, LatentModelMixin):
        raise UnsupportedModelError("This model is compressed already. Restore or load the original first.")
    family_of(model)
    if base_model_of(model) is model:
        raise UnsupportedModelError(
            f"Pass the model with its language-model head, not the bare {type(model).__name__}."
        )
    rotary_of(model, all_layers=True)
    for layer, parts in enumerate(projections_of(model)):
        for kind, part in (("query", parts.query), ("key", parts.key), ("value", parts.value)):
            if not all(bool(torch.isfinite(held).all()) for held in (part.weight, part.bias) if held is not None):
                raise NonFiniteError(f"The {kind} projection of layer {layer} holds NaN or Inf. Load the model again.")
    # The budget is the same for every rule, so an impossible one shows before the calibration; so does the fusion.
    chosen = plan(model, PaluConfig(rate=config.rate, group_size=config.group_size, rank_multiple=config.rank_multiple))
    _forms(model, config, chosen, 0)


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


_Metric = tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]
"""How a layer weighs errors: the Gram matrix of its inputs, and those of its output gradients, keys and values."""


def _metrics(
    model: PreTrainedModel, config: PaluConfig, grams: GramStats | None, fisher: FisherStats | None
) -> list[_Metric]:
    """The metric of each layer, as far as the decomposition asks for it."""
    layers = len(projections_of(model))
    inputs: Sequence[Tensor | None] = grams.grams if grams is not None and config.needs_grams else [None] * layers
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
    metrics = _metrics(model, config, grams, fisher)
    for parts, gram, (_, outputs) in zip(projections_of(model), grams.grams, metrics, strict=True):
        for part, output_gram in zip((parts.key, parts.value), outputs, strict=True):
            for weight, metric in _groups(part, groups, output_gram):
                found.append(output_energies(weight, gram, metric).tolist())
    return found


def _groups(part: Part, count: int, output_gram: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """The weight ``(in_features, group features)`` of each group of heads, and its block of the output metric."""
    weights = torch.chunk(part.weight, count, dim=1)
    if output_gram is None:
        return [(weight, None) for weight in weights]
    size = weights[0].shape[1]
    places = [slice(start, start + size) for start in range(0, count * size, size)]
    return [(weight, output_gram[place, place]) for weight, place in zip(weights, places, strict=True)]


def _build(
    model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan, metrics: list[_Metric], progress: Progress | None
) -> list[LatentAttention]:
    """The attention modules that will replace the model's own."""
    projections, places = projections_of(model), layer_places(model)
    step, built = _stage(progress, "decomposition"), []
    for layer, (original, parts) in enumerate(zip(attention_modules(model), projections, strict=True)):
        ranks = (chosen.key_ranks[layer], chosen.value_ranks[layer])
        gram, outputs = metrics[layer]
        key, value = (
            _factor(part, wanted, gram, output_gram)
            for part, wanted, output_gram in zip((parts.key, parts.value), ranks, outputs, strict=True)
        )
        module = LatentAttention(original, places[layer], parts, *ranks, _forms(model, config, chosen, layer))
        built.append(module.fill(parts, key, value))
        if step is not None:
            step(layer + 1, len(projections))
    return built


def _forms(model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan, layer: int) -> Forms:
    """How the second factors of a layer are used (Palu, Eq. 5 and 6)."""
    family, attention = family_of(model), attention_modules(model)[layer]
    return choose_forms(
        config.fusion,
        layer_size_of(model),
        chosen.key_ranks[layer],
        chosen.value_ranks[layer],
        rotated=family.rotary is not None or family.key_norm is not None,
        clipped=family.clip is not None and bool(getattr(attention, family.clip)),
    )


def _factor(
    part: Part, ranks: tuple[int, ...], gram: Tensor | None, output_gram: Tensor | None
) -> list[LowRankFactors]:
    """Factor each group of a projection's heads to its rank."""
    groups = _groups(part, len(ranks), output_gram)
    return [
        _decompose(weight, gram, metric).truncate(rank) for (weight, metric), rank in zip(groups, ranks, strict=True)
    ]


def _decompose(weight: Tensor, gram: Tensor | None, output_gram: Tensor | None) -> Decomposition:
    """By as much of the metric as there is: none is plain SVD."""
    if gram is None:
        return plain_svd(weight)
    return whitened_svd(weight, gram) if output_gram is None else loss_aware_svd(weight, gram, output_gram)


def _stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
