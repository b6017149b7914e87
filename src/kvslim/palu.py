"""Palu: compress the KV cache by low-rank projection, once per model (Chang et al., 2024, arXiv:2407.21118).

The key and value projection of every layer are factored, ``W ≈ A B``; the model then caches the small latents
``h = x A`` and rebuilds keys and values from them. In order: :func:`calibrate` the model, :func:`plan` the ranks,
:func:`compress_with` them. :func:`compress` does all three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvslim.allocating.ranks import proportional_ranks, uniform_ranks
from kvslim.attending.families import (
    attention_modules,
    base_model_of,
    family_of,
    kv_projections,
    kv_shape_of,
    rotary_of,
    sliding_window_of,
)
from kvslim.attending.latent_attention import LatentAttention, LowRankProjection
from kvslim.attending.latent_model import LatentModelMixin, Snapshot, install, restore, snapshot
from kvslim.caching.latent import LatentCache, LatentLayout, layout_of
from kvslim.caching.latent_codes import LatentCodes
from kvslim.calibrating.fisher import FISHER_LENGTH, FisherStats, calibrate_fisher
from kvslim.calibrating.grams import GramStats, calibrate_grams
from kvslim.calibrating.windows import check_windows, windows_from_texts
from kvslim.checkpointing.latent_model import read_latent_model, write_latent_model
from kvslim.decomposing.whitened import Decomposition, plain_svd, whitened_svd
from kvslim.errors import CalibrationError, CheckpointError, ConfigError, NonFiniteError, UnsupportedModelError
from kvslim.palu_config import PaluConfig, PaluPlan, PaluReport
from kvslim.quantizing.folding import rotated_factors

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
    family_of(config_or_model, palu=True)
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
    layout = _layout(model, config, chosen)
    install(model, _build(model, config, chosen, layout, grams, progress), layout)
    model.palu = PaluReport(
        config=config,
        plan=chosen,
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
    family_of(model, palu=True)
    if base_model_of(model) is model:
        raise UnsupportedModelError(
            f"Pass the model with its language-model head, not the bare {type(model).__name__}."
        )
    rotary_of(model)
    for layer, pair in enumerate(kv_projections(model)):
        for kind, projection in zip(("key", "value"), pair, strict=True):
            if not all(bool(torch.isfinite(part).all()) for part in projection.parameters()):
                raise NonFiniteError(f"The {kind} projection of layer {layer} holds NaN or Inf. Load the model again.")
    # The budget is the same for every rule, so an impossible one shows before the calibration.
    plan(model, PaluConfig(rate=config.rate, group_size=config.group_size, rank_multiple=config.rank_multiple))


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
    model: PreTrainedModel,
    config: PaluConfig,
    chosen: PaluPlan,
    layout: LatentLayout,
    grams: GramStats | None,
    progress: Progress | None,
) -> list[LatentAttention]:
    """The attention modules that will replace the model's own."""
    family, rotary, built = family_of(model), rotary_of(model), []
    projections = kv_projections(model)
    matrices = grams.grams if grams is not None and config.needs_grams else [None] * len(projections)
    if len(matrices) != len(projections):
        raise CalibrationError(f"{len(matrices)} Gram matrices for {len(projections)} layers. Calibrate this model.")
    step = _stage(progress, "decomposition")
    for layer, (original, pair) in enumerate(zip(attention_modules(model), projections, strict=True)):
        ranks = (chosen.key_ranks[layer], chosen.value_ranks[layer])
        key, value = (
            _factor(projection, wanted, matrices[layer], config) for projection, wanted in zip(pair, ranks, strict=True)
        )
        built.append(LatentAttention(original, family, rotary, key, value, layout))
        if step is not None:
            step(layer + 1, len(projections))
    return built


def _factor(
    projection: nn.Linear, ranks: tuple[int, ...], gram: Tensor | None, config: PaluConfig
) -> LowRankProjection:
    """Factor each group of a projection's heads to its rank."""
    weight = projection.weight.detach().T
    groups = torch.chunk(weight, len(ranks), dim=1)
    parts = [(_decompose(group, gram, config.decomposition), rank) for group, rank in zip(groups, ranks, strict=True)]
    exponent = 0.25 if config.hadamard else 0.5  # of 0, ¼ and ½ none measured better, at 2 and 3 bits
    factors = [part.balanced(rank, exponent) if config.coded else part.truncate(rank) for part, rank in parts]
    if config.coded and config.hadamard:
        factors = [rotated_factors(one) for one in factors]
    return LowRankProjection.from_factors(projection, factors)


def _decompose(weight: Tensor, gram: Tensor | None, decomposition: str) -> Decomposition:
    if decomposition == "svd" or gram is None:
        return plain_svd(weight)
    return whitened_svd(weight, gram)


def _layout(model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan) -> LatentLayout:
    codes = None
    if config.coded:
        codes = LatentCodes(config.bits, config.sinks, config.window, chosen.key_ranks, chosen.value_ranks)
    return layout_of(kv_shape_of(model), sliding_window_of(model), codes=codes)


def _stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
