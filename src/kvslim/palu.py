"""Palu: compress the KV cache by low-rank projection, once per model (Chang et al., 2024, arXiv:2407.21118).

The key and value projection of every layer are factored, ``W ≈ A B``; the model then caches the small latents
``h = x A`` and rebuilds keys and values from them. In order: :func:`calibrate` the model, :func:`plan` the ranks,
:func:`compress_with` them. :func:`compress` does all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.allocating.ranks import proportional_ranks, uniform_ranks
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
from kvslim.calibrating.windows import check_windows, windows_from_texts, windows_hash
from kvslim.checkpointing.latent_model import load_latent_model, save_latent_model
from kvslim.decomposing.whitened import Decomposition, plain_svd, whitened_svd
from kvslim.errors import CalibrationError, ConfigError, NonFiniteError, UnsupportedModelError
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
    grams = fisher = windows = None
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
    compress_with(model, config, grams=grams, fisher=fisher, progress=progress)
    if windows is not None:
        model.palu = replace(model.palu, calibration_sha256=windows_hash(windows))
    return model


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
        fisher = calibrate_fisher(model, windows[:, :FISHER_LENGTH], progress=_stage(progress, "fisher information"))
    return grams, fisher


def plan(config_or_model: Any, config: PaluConfig, fisher: FisherStats | None = None) -> PaluPlan:
    """Choose the rank of every group; needs no weights.

    Args:
        config_or_model: the model or its transformers configuration.
        config: rate, group size and rule.
        fisher: the information that ``ranks="fisher"`` and ``"fisher-rms"`` need.

    Raises:
        UnsupportedModelError, ConfigError, CalibrationError: as in :func:`compress`.
    """
    family_of(config_or_model)
    shape = kv_shape_of(config_or_model)
    size, notes = _group_size(config.group_size, shape.kv_heads)
    groups = shape.kv_heads // size
    full = min(size * shape.head_dim, getattr(config_or_model, "config", config_or_model).hidden_size)
    caps = [full] * (shape.layers * 2 * groups)
    if config.needs_fisher:
        scores = _group_scores(config, fisher, (shape.layers, 2, shape.kv_heads), groups)
        flat = proportional_ranks(scores, caps, config.rate, config.rank_multiple, config.rank_floor)
    else:
        flat = uniform_ranks(caps, config.rate, config.rank_multiple)
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
        raise CalibrationError("decomposition='whitened' needs grams=calibrate_grams(model, windows).")
    chosen = plan(model, config, fisher)
    replacements = _build(model, config, chosen, grams, progress)
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


def save(
    model: PreTrainedModel, directory: str | Path, tokenizer: Any = None, quality: dict[str, Any] | None = None
) -> None:
    """Write a compressed model to a new directory: safetensors, JSON and a model card, all or nothing.

    As ``model.save_pretrained(directory)``, with a tokenizer. :func:`load` reads it, and so does
    ``AutoModelForCausalLM.from_pretrained`` where kvslim is imported.

    Args:
        model: a model that :func:`compress` has compressed.
        directory: must not exist, or be empty.
        tokenizer: written beside the model if given.
        quality: what was measured of the model, as JSON values, for the metadata and the model card.

    Raises:
        UnsupportedModelError: the model is not compressed, or its weights are of several dtypes or not in memory.
        ConfigError: the place is taken or cannot be written.
    """
    if not isinstance(model, LatentModelMixin):
        raise UnsupportedModelError("The model is not compressed. Call kvslim.compress first.")
    save_latent_model(model, directory, tokenizer, quality=quality)


def load(directory: str | Path, **options: Any) -> PreTrainedModel:
    """Read a model that :func:`save` wrote: on the CPU, in its dtype, in eval mode, unless the options say otherwise.

    Args:
        directory: the checkpoint.
        **options: of ``from_pretrained``, such as ``dtype`` or ``device_map``.

    Raises:
        ModelSourceError: there is no such checkpoint.
        CheckpointError: it is truncated, was edited, or is of another format.
    """
    return load_latent_model(Path(directory), **options)


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
    """One score per (layer, key or value, group), in this order."""
    if fisher is None:
        raise CalibrationError(f"ranks={config.ranks!r} needs fisher=calibrate_fisher(model, windows).")
    per_head = fisher.sum_squares if config.ranks == "fisher" else fisher.mean_rms
    if tuple(per_head.shape) != expected:
        raise CalibrationError(
            f"The Fisher information is of shape {tuple(per_head.shape)}, this model needs {expected}. Calibrate it."
        )
    grouped = per_head.reshape(expected[0], 2, groups, -1)
    scores = grouped.sum(-1) if config.ranks == "fisher" else grouped.mean(-1)
    return [float(score) for score in scores.flatten()]


def _build(
    model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan, grams: GramStats | None, progress: Progress | None
) -> list[LatentAttention]:
    """The attention modules that will replace the model's own."""
    projections, places = projections_of(model), layer_places(model)
    matrices = grams.grams if grams is not None and config.needs_grams else [None] * len(projections)
    if len(matrices) != len(projections):
        raise CalibrationError(f"{len(matrices)} Gram matrices for {len(projections)} layers. Calibrate this model.")
    step, built = _stage(progress, "decomposition"), []
    for layer, (original, parts) in enumerate(zip(attention_modules(model), projections, strict=True)):
        ranks = (chosen.key_ranks[layer], chosen.value_ranks[layer])
        key, value = (
            _factor(part, wanted, matrices[layer], config.decomposition)
            for part, wanted in zip((parts.key, parts.value), ranks, strict=True)
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


def _factor(part: Part, ranks: tuple[int, ...], gram: Tensor | None, decomposition: str) -> list[LowRankFactors]:
    """Factor each group of a projection's heads to its rank."""
    groups = torch.chunk(part.weight, len(ranks), dim=1)
    return [_decompose(group, gram, decomposition).truncate(rank) for group, rank in zip(groups, ranks, strict=True)]


def _decompose(weight: Tensor, gram: Tensor | None, decomposition: str) -> Decomposition:
    if decomposition == "svd" or gram is None:
        return plain_svd(weight)
    return whitened_svd(weight, gram)


def _stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
