"""Palu: compress the KV cache by low-rank projection, once per model (Chang et al., 2024, arXiv:2407.21118).

The key and value projection of every layer are factored, ``W ≈ A B``; the model then caches the small latents
``h = x A`` and rebuilds keys and values from them. In order: :func:`calibrate` the model, :func:`plan` the ranks,
:func:`compress_with` them. :func:`compress` does all three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.attending.families import base_model_of, family_of, rotary_of
from kvslim.attending.latent_model import LatentModelMixin, Snapshot, install, layer_size_of, restore, snapshot
from kvslim.attending.projections import projections_of
from kvslim.caching.latent import LatentCache
from kvslim.calibrating.fisher import FISHER_LENGTH, FisherStats, calibrate_fisher
from kvslim.calibrating.grams import GramStats, calibrate_grams
from kvslim.calibrating.mixing import windows_of
from kvslim.calibrating.stats_cache import StatsCache
from kvslim.calibrating.windows import check_windows, windows_hash
from kvslim.checkpointing.latent_model import load_latent_model, save_latent_model
from kvslim.errors import CalibrationError, NonFiniteError, UnsupportedModelError
from kvslim.palu_build import Progress, build_attentions, build_in_turn, forms_of, stage
from kvslim.palu_checks import check_statistics, token_notes
from kvslim.palu_config import PaluConfig, PaluPlan, PaluReport
from kvslim.palu_plan import metrics_of, plan

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

_WINDOWS_AT_MOST = 256
"""Calibration windows taken from long texts unless a number is given (SVD-LLM's setting)."""


def compress(
    model: PreTrainedModel,
    tokenizer: Any,
    config: PaluConfig,
    calibration: str | Iterable[str | Mapping[str, Any]] | Mapping[str, Any] | Tensor | None = None,
    *,
    calibration_windows: int | None = None,
    window_length: int = 2048,
    prepend_bos: bool = False,
    stats_cache: str | Path | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Compress ``model`` **in place** and return it.

    Everything is checked and computed before the first module is replaced: a call that fails leaves the model as it
    was. To keep the original, use :func:`snapshot` (no copy) or ``copy.deepcopy``.

    Args:
        model: a causal language model of a supported family with plain float weights.
        tokenizer: its tokenizer; may be ``None`` if ``calibration`` is token windows.
        config: what to do.
        calibration: text; several texts, or rows with a field ``text`` (a data set); a mapping of names to these,
            mixed in equal shares; or ``(windows, length)`` token ids. Not needed for plain SVD with uniform ranks.
        calibration_windows: windows to cut from the texts; ``None`` takes as many as fit, at most 256.
        window_length: tokens per window.
        prepend_bos: start each window with the beginning-of-text token, for models trained so.
        stats_cache: folder that keeps calibration statistics for the next time, see :func:`calibrate`.
        progress: called with stage, steps done and steps in all.

    Raises:
        UnsupportedModelError: the model is of no supported family, compressed already, quantized or adapted.
        ConfigError: the group size does not divide the KV heads, or the rate cannot be met.
        BudgetError: ``graded`` does not even pay for what every token takes; the message names what does.
        CalibrationError: calibration data is missing, too short, or leads to statistics that are none.
        NonFiniteError: weights or activations hold NaN or Inf; the message names the layer.
    """
    _check(model, config)
    grams = fisher = windows = None
    if config.needs_calibration:
        if calibration is None:
            raise CalibrationError(
                f"decomposition={config.decomposition!r} with ranks={config.ranks!r} needs calibration text. Pass "
                f"calibration=..., or use ranks='uniform' with decomposition='svd'."
            )
        windows = windows_of(tokenizer, calibration, window_length, calibration_windows, prepend_bos, _WINDOWS_AT_MOST)
        grams, fisher = calibrate(model, config, windows, cache=stats_cache, progress=progress)
    compress_with(model, config, grams=grams, fisher=fisher, windows=windows, progress=progress)
    if windows is not None:
        model.palu = replace(model.palu, calibration_sha256=windows_hash(windows))
    return model


def calibrate(
    model: PreTrainedModel,
    config: PaluConfig,
    windows: Tensor,
    *,
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> tuple[GramStats | None, FisherStats | None]:
    """Collect the statistics that ``config`` needs from ``(windows, length)`` token ids; ``None`` for the others.

    The Fisher pass uses the first 1024 tokens of each window. With ``cache``, a folder, statistics that were collected
    before from the same weights, configuration, windows and settings are read from there, and new ones are kept there;
    see :mod:`kvslim.calibrating.stats_cache`. What sequential mode collects depends on the compression and is not kept.
    Errors as in :func:`compress`.
    """
    windows = check_windows(windows, model.config.vocab_size)
    first = windows[:, :FISHER_LENGTH]
    store = StatsCache(cache, model) if cache is not None and (config.needs_grams or config.needs_fisher) else None

    def make_grams() -> GramStats:
        return calibrate_grams(model, windows, progress=stage(progress, "gram matrices"))

    def make_fisher() -> FisherStats:
        step = stage(progress, "fisher information")
        return calibrate_fisher(model, first, output_grams=config.needs_output_grams, progress=step)

    grams = fisher = None
    if config.needs_grams:
        grams = make_grams() if store is None else store.get(GramStats, windows, {}, make_grams)
    if config.needs_fisher:
        settings = {"output_grams": config.needs_output_grams}
        fisher = make_fisher() if store is None else store.get(FisherStats, first, settings, make_fisher)
    return grams, fisher


def compress_with(
    model: PreTrainedModel,
    config: PaluConfig,
    *,
    grams: GramStats | None = None,
    fisher: FisherStats | None = None,
    windows: Tensor | None = None,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Compress ``model`` **in place** from statistics collected before, and return it.

    One calibration serves any number of configurations: ``saved = snapshot(model)``, then ``compress_with`` and
    ``restore(model, saved)`` in turn. Arguments and errors as in :func:`compress`; with ``sequential=True`` the
    decomposition runs over ``windows`` itself, ``(windows, length)`` token ids.
    """
    _check(model, config)
    if config.needs_grams and grams is None:
        raise CalibrationError(f"decomposition={config.decomposition!r} needs grams=calibrate_grams(model, windows).")
    if config.sequential and windows is None:
        raise CalibrationError("sequential=True calibrates while it compresses: pass windows=..., the token windows.")
    check_statistics(config, grams, fisher)
    tokens = _tokens(config, grams, windows)
    chosen = plan(model, config, fisher, grams)
    chosen = replace(chosen, notes=chosen.notes + token_notes(config, chosen, tokens, model.config.hidden_size))
    metrics = metrics_of(model, config, grams, fisher)
    if config.sequential and windows is not None:
        replacements = build_in_turn(model, config, chosen, metrics, windows, progress)
    else:
        replacements = build_attentions(model, config, chosen, metrics, progress)
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
        calibration_tokens=tokens,
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


def _tokens(config: PaluConfig, grams: GramStats | None, windows: Tensor | None) -> int:
    """The tokens behind the Gram matrices that the decomposition, or else the plan, used."""
    if config.sequential and windows is not None:
        return windows.numel()
    return grams.tokens if grams is not None and config.needs_grams else 0


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
    exact = replace(config, bits=16, graded=None, sinks=0, window=0)
    chosen = plan(model, replace(exact, ranks="uniform", decomposition="svd", sequential=False))
    forms_of(model, config, chosen, 0)
