"""Run many methods over the same windows and sum up what was measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvslim.attending.families import attention_modules, kv_shape_of
from kvslim.attending.latent_model import LatentModelMixin, install
from kvslim.caching.latent import LatentCache
from kvslim.calibrating.fisher import FISHER_LENGTH, calibrate_fisher
from kvslim.calibrating.grams import calibrate_grams
from kvslim.errors import CalibrationError, UnsupportedModelError
from kvslim.evaluating.bound import BoundGap, Energies, channel_energies, gap
from kvslim.evaluating.continuation import (
    ContinuationConfig,
    Reference,
    Scored,
    perplexity,
    run_reference,
    score_cache,
    score_palu,
)
from kvslim.evaluating.divergence import Divergence
from kvslim.evaluating.method_forms import CacheMethod, Method
from kvslim.evaluating.methods import Palu
from kvslim.palu import PaluReport, compress_with, restore, snapshot

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BOUND_CHANNELS = 1024
"""Joint channels of a layer up to which the bound is computed."""

Progress = Callable[[str, int, int], None]
"""Called with (what is done, steps done, steps in all)."""


@dataclass(frozen=True)
class MethodResult:
    """What was measured of one method, pooled over all windows.

    Attributes:
        method: its name.
        family: what plots group it by.
        settings: every setting, defaults included.
        nbytes: measured bytes of the caches after compression, all windows together.
        bytes_per_token: the same per prefilled token.
        ratio: bf16 bytes of the same tokens over ``nbytes``.
        perplexity: of the scored tokens.
        kl: mean ``KL(P_uncompressed ‖ P_compressed)`` in nats per token.
        kl_per_window: its mean within each window, to show the spread.
        agreement: share of tokens with the same most likely prediction.
        key_error, value_error: relative Frobenius error of the (rotated) keys and the values that attention sees, all
            tokens and layers together; exact sinks and recent tokens are part of both.
        seconds: mean time per window to compress, prefill excluded; for Palu of its own prefill.
        note: what differs from the request, or empty.
        key_share: share of the compressed cells' bytes that is for keys, mean over windows; None without cells.
        bits_per_value: measured bytes of the cache over the numbers that it stands for, times 8.
        bound_bits, bound_decibels: distance to the Gaussian rate-distortion bound on the same tensors, see
            :mod:`kvslim.evaluating.bound`, mean over windows; None where it was not computed.
        one_pass_perplexity: perplexity over whole windows in one forward pass, for the uncompressed model and Palu if
            it was asked for. Nothing is read back from a cache there, so run-time methods have none.
    """

    method: str
    family: str
    settings: dict[str, Any]
    nbytes: int
    bytes_per_token: float
    ratio: float
    perplexity: float
    kl: float
    kl_per_window: tuple[float, ...]
    agreement: float
    key_error: float
    value_error: float
    seconds: float
    note: str = ""
    key_share: float | None = None
    one_pass_perplexity: float | None = None
    bits_per_value: float | None = None
    bound_bits: float | None = None
    bound_decibels: float | None = None


@dataclass(frozen=True)
class PaluVariant:
    """The parts of a Palu-compressed model that differ from the original; swapped in for as long as they are used."""

    attentions: tuple[Any, ...]
    report: PaluReport

    @contextmanager
    def on(self, model: PreTrainedModel) -> Iterator[None]:
        """Make ``model`` the compressed one inside the ``with``; it is the original again afterwards."""
        saved = snapshot(model)
        install(model, self.attentions)
        try:
            yield
        finally:
            restore(model, saved)


def palu_variants(
    model: PreTrainedModel,
    methods: Sequence[Method],
    calibration: Tensor | None,
    progress: Progress | None = None,
) -> dict[str, PaluVariant]:
    """Compress ``model`` once per Palu method, from one calibration, and leave the model as it was.

    Args:
        model: an uncompressed model.
        methods: any methods; those of Palu are prepared.
        calibration: ``(windows, length)`` token ids of text other than the test text.
        progress: called with the step's name.

    Raises:
        CalibrationError: a method needs calibration and there is none, or it is unusable.
        UnsupportedModelError, ConfigError, NonFiniteError: as :func:`kvslim.palu.compress`.
    """
    wanted = [method for method in methods if isinstance(method, Palu)]
    if any(method.needs_calibration for method in wanted) and calibration is None:
        raise CalibrationError("Palu needs calibration windows, of text other than the test text.")

    def stage(name: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(name, done, of)

    grams = fisher = None
    if calibration is not None and any(method.config.needs_grams for method in wanted):
        grams = calibrate_grams(model, calibration, progress=stage("calibrating Palu: Gram matrices"))
    if calibration is not None and any(method.config.needs_fisher for method in wanted):
        fisher_windows = calibration[:, :FISHER_LENGTH]
        fisher = calibrate_fisher(
            model,
            fisher_windows,
            output_grams=any(method.config.needs_output_grams for method in wanted),
            progress=stage("calibrating Palu: Fisher information"),
        )
    variants = {}
    for done, method in enumerate(wanted):
        saved = snapshot(model)
        # Factors are applied, not folded, so that keys and values can be compared; the function is the same.
        config = replace(method.config, fusion="apply")
        compress_with(model, config, grams=grams, fisher=fisher, windows=calibration)
        variants[method.name] = PaluVariant(tuple(attention_modules(model)), model.palu)
        restore(model, saved)
        if progress is not None:
            progress("factoring the projections for Palu", done + 1, len(wanted))
    return variants


def compare(
    model: PreTrainedModel,
    methods: Sequence[Method],
    windows: Tensor,
    config: ContinuationConfig,
    *,
    variants: dict[str, PaluVariant] | None = None,
    progress: Progress | None = None,
) -> list[MethodResult]:
    """Measure every method on every window of ``(count, T + N + 1)`` token ids; the model is left as it was.

    Args:
        model: an uncompressed model in eval mode.
        methods: what to measure, in the order of the result.
        windows: token ids, see :func:`kvslim.evaluating.windows.evenly_spaced_windows`.
        config: T, N and how they are fed.
        variants: of :func:`palu_variants`, for the methods of Palu.
        progress: called before each window and method, and once at the end.

    Raises:
        CalibrationError: a Palu method has no variant.
        ConfigError, BudgetError, NonFiniteError, UnsupportedModelError: of the windows and methods.
    """
    variants = variants or {}
    if missing := [m.name for m in methods if isinstance(m, Palu) and m.name not in variants]:
        raise CalibrationError(f"No compressed model for {', '.join(missing)}: make it with palu_variants().")
    if isinstance(model, LatentModelMixin):
        raise UnsupportedModelError(
            "This model is compressed already, so nothing shows what it has lost. Evaluate the original model with "
            "methods such as palu-30."
        )
    for method in methods:
        if isinstance(method, CacheMethod):
            method.make_cache(model)  # so that a model it does not support shows before any work
    scored: dict[str, list[Scored]] = {method.name: [] for method in methods}
    energies: list[Energies] = []
    steps = windows.shape[0] * (len(methods) + 1)
    done = 0
    for index, window in enumerate(windows):
        where = f"window {index + 1} of {windows.shape[0]}"
        _report(progress, f"{where}: uncompressed run", done, steps)
        reference = run_reference(model, window, config)
        energies += _energies(model, reference)
        for method in methods:
            done += 1
            _report(progress, f"{where}: {method.name}", done, steps)
            scored[method.name].append(_measure(model, method, variants, reference, config))
        done += 1
    _report(progress, "all methods measured", steps, steps)
    tokens = windows.shape[0] * config.tokens
    return [_pool(method, scored[method.name], tokens, variants.get(method.name), energies) for method in methods]


def measure(
    model: PreTrainedModel, method: CacheMethod, references: Sequence[Reference], config: ContinuationConfig
) -> MethodResult:
    """One run-time method on windows whose uncompressed runs are at hand, pooled as in :func:`compare`.

    For many methods one after the other, so that each can be kept as soon as it is measured.

    Raises:
        ConfigError, BudgetError, NonFiniteError, UnsupportedModelError: of the method.
    """
    scored = [score_cache(model, method.make_cache(model), reference, config) for reference in references]
    energies = [found for reference in references for found in _energies(model, reference)]
    return _pool(method, scored, len(references) * config.tokens, None, energies)


def with_one_pass(
    model: PreTrainedModel,
    results: Sequence[MethodResult],
    windows: Tensor,
    variants: dict[str, PaluVariant],
) -> list[MethodResult]:
    """Add :attr:`MethodResult.one_pass_perplexity` over ``windows`` to the results of ``none`` and of Palu."""
    added = []
    for one in results:
        if one.method in variants:
            with variants[one.method].on(model):
                added.append(dataclasses.replace(one, one_pass_perplexity=perplexity(model, windows)))
        elif one.family == "none":
            added.append(dataclasses.replace(one, one_pass_perplexity=perplexity(model, windows)))
        else:
            added.append(one)
    return added


def _report(progress: Progress | None, name: str, done: int, steps: int) -> None:
    if progress is not None:
        progress(name, done, steps)


def _measure(
    model: PreTrainedModel,
    method: Method,
    variants: dict[str, PaluVariant],
    reference: Reference,
    config: ContinuationConfig,
) -> Scored:
    if isinstance(method, CacheMethod):
        return score_cache(model, method.make_cache(model), reference, config)
    variant = variants[method.name]
    with variant.on(model):
        return score_palu(model, LatentCache(variant.attentions[0].layout), reference, config)


def _energies(model: PreTrainedModel, reference: Reference) -> list[Energies]:
    """What the bound needs of a window; none where channels are so many that it would take minutes."""
    shape = kv_shape_of(model)
    return [channel_energies(model, reference)] if shape.kv_heads * shape.head_dim <= _BOUND_CHANNELS else []


def _gaps(scored: list[Scored], energies: list[Energies]) -> list[BoundGap]:
    """The distance to the bound in each window; none for a cache without error."""
    if not energies or any(not one.layer_errors or sum(one.layer_errors) <= 0 for one in scored):
        return []
    pairs = zip(scored, energies, strict=True)
    return [gap(own, 16 * one.nbytes / one.dense_nbytes, one.layer_errors) for one, own in pairs]


def _pool(
    method: Method, scored: list[Scored], tokens: int, variant: PaluVariant | None, energies: list[Energies]
) -> MethodResult:
    gaps = _gaps(scored, energies)
    total = sum((one.divergence for one in scored), Divergence())
    nbytes = sum(one.nbytes for one in scored)
    return MethodResult(
        method=method.name,
        family=method.family,
        settings=method.settings,
        nbytes=nbytes,
        bytes_per_token=nbytes / tokens,
        ratio=sum(one.dense_nbytes for one in scored) / nbytes,
        perplexity=total.perplexity,
        kl=total.mean_kl,
        kl_per_window=tuple(one.divergence.mean_kl for one in scored),
        agreement=total.agreement,
        key_error=_relative([one.key_lost for one in scored], [one.key_energy for one in scored]),
        value_error=_relative([one.value_lost for one in scored], [one.value_energy for one in scored]),
        seconds=sum(one.seconds for one in scored) / len(scored),
        key_share=_mean([one.key_share for one in scored if one.key_share is not None]),
        note="" if variant is None else _palu_note(variant.report),
        bits_per_value=16 * nbytes / sum(one.dense_nbytes for one in scored),
        bound_bits=_mean([one.bits for one in gaps]),
        bound_decibels=_mean([one.decibels for one in gaps]),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _relative(lost: list[float], energy: list[float]) -> float:
    return math.sqrt(sum(lost) / sum(energy)) if sum(energy) else 0.0


def _palu_note(report: PaluReport) -> str:
    parts = [f"{report.rate:.1%} of the channels removed", f"calibrated on {report.calibration_tokens} tokens"]
    if report.config.graded is not None:
        parts.append(f"latents graded at {report.config.graded:g} bits per channel")
    elif report.config.coded:
        parts.append(f"latents at {report.config.bits} bits {'with' if report.config.hadamard else 'without'} Hadamard")
    return "; ".join([*parts, *report.plan.notes])
