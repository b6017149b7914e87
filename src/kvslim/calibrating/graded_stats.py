"""The calibration sidecar of graded latents: channels of every layer's cached keys and values, and what bits buy there.

Made once per model in minutes (:func:`calibrate_graded`), kept in one safetensors file beside the model, and used by an
unchanged model at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from kvslim.attending.families import kv_shape_of
from kvslim.attending.layout import compressible_layers
from kvslim.caching.graded_block import GradedBasis, clipping
from kvslim.calibrating.cached_moments import (
    CachedMoments,
    Moments,
    cached_tokens,
    cached_windows,
    calibrate_moments,
    rope_or_none,
)
from kvslim.calibrating.stats_file import read_about, read_stats, stats_digest, write_stats
from kvslim.checkpointing.fingerprint import ModelIdentity, identity_of
from kvslim.config import JsonConfig, is_count
from kvslim.decomposing.channel_basis import METRICS, ChannelBasis, Metric, channel_basis
from kvslim.errors import CacheStateError, CalibrationError, CheckpointError, ConfigError
from kvslim.quantizing.channels import WIDTHS, curve, layout_of
from kvslim.quantizing.codebook import gaussian_levels, gaussian_mse
from kvslim.types import KVShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
"""Called with (what is done, windows done, windows in all)."""

TOKENS_PER_CHANNEL = 4
"""Calibration tokens per channel at least: a covariance from fewer is mostly noise in its faint directions."""

_CURVE_WINDOWS = 2
"""Windows on which quantization is measured."""

_CURVE_WIDTH, _OUTLYING = 4, 20.0
"""Curves are measured without the tokens whose clipping at this width costs so many times the expected error."""


@dataclass(frozen=True)
class GradedCalibration(JsonConfig):
    """How the channels are found.

    Attributes:
        metric: what an error costs, see :mod:`kvslim.decomposing.channel_basis`.
        group_size: KV heads that share channels; None takes all of a layer (joint).
        sinks: first tokens of each window that are left out: their statistics are others, and the cache keeps them.
        seed: of the tokens drawn from the model's predictions.
    """

    metric: Metric = "loss"
    group_size: int | None = None
    sinks: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ConfigError(f"metric is one of {', '.join(METRICS)}, not {self.metric!r}.")
        if self.group_size is not None and not is_count(self.group_size):
            raise ConfigError(f"group_size is a number of KV heads, or None for all, not {self.group_size!r}.")
        if not is_count(self.sinks, least=0) or not is_count(self.seed, least=0):
            raise ConfigError(f"sinks and seed are integers ≥ 0, not {self.sinks!r} and {self.seed!r}.")

    def groups(self, kv_heads: int) -> int:
        """Groups per layer.

        Raises:
            ConfigError: the group size does not divide the KV heads.
        """
        size = min(self.group_size or kv_heads, kv_heads)
        if kv_heads % size:
            divisors = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
            raise ConfigError(f"group_size {size} does not divide {kv_heads} KV heads. It can be {divisors}.")
        return kv_heads // size


@dataclass(frozen=True, eq=False)
class GradedTables:
    """The tensors of a sidecar, per compressed layer; ``keys_*`` are empty if keys cannot be un-rotated.

    Attributes:
        keys_directions, …: as in :class:`~kvslim.decomposing.channel_basis.ChannelBasis`.
        keys_curves, …: ``(features, 9)`` float32, measured squared error at 0 … 8 bits over energy.
        tokens: calibration tokens that were cached.
    """

    keys_directions: tuple[Tensor, ...]
    keys_deviations: tuple[Tensor, ...]
    keys_mean: tuple[Tensor, ...]
    keys_costs: tuple[Tensor, ...]
    keys_curves: tuple[Tensor, ...]
    rotated_directions: tuple[Tensor, ...]
    rotated_deviations: tuple[Tensor, ...]
    rotated_mean: tuple[Tensor, ...]
    rotated_costs: tuple[Tensor, ...]
    rotated_curves: tuple[Tensor, ...]
    values_directions: tuple[Tensor, ...]
    values_deviations: tuple[Tensor, ...]
    values_mean: tuple[Tensor, ...]
    values_costs: tuple[Tensor, ...]
    values_curves: tuple[Tensor, ...]
    tokens: int


KINDS = ("keys", "rotated", "values")
_PARTS = ("directions", "deviations", "mean", "costs", "curves")


@dataclass(frozen=True)
class ChannelTable:
    """One layer's keys or values: its channels, and the measured error of each at every width.

    Attributes:
        basis: the channels.
        curves: ``(features, 9)`` float32.
    """

    basis: ChannelBasis
    curves: Tensor

    @property
    def errors(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """What each channel costs per token at 0 … 8 bits: ``(features, 9)`` float64."""
        found: np.ndarray[Any, np.dtype[np.float64]] = (
            self.basis.costs.double()[:, None] * self.curves.double()
        ).numpy()
        return found


@dataclass(frozen=True, eq=False)
class GradedStats:
    """A sidecar.

    Attributes:
        tables: its tensors.
        model: the model that it belongs to.
        calibration: how it was made.
        origin: the calibration text, in words.
    """

    tables: GradedTables
    model: ModelIdentity
    calibration: GradedCalibration
    origin: str = ""

    def of(self, kind: str) -> tuple[ChannelTable, ...]:
        """Per compressed layer the channels of ``keys``, ``rotated`` (keys) or ``values``; empty if there are none."""
        parts = [getattr(self.tables, f"{kind}_{part}") for part in _PARTS]
        return tuple(ChannelTable(ChannelBasis(*one[:4]), one[4]) for one in zip(*parts, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        parts = (getattr(self.tables, f"{kind}_{part}") for kind in KINDS for part in _PARTS)
        return sum(t.numel() * t.element_size() for part in parts for t in part)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all tables: what codes made with them are bound to. Computed once, a second per gigabyte or so."""
        return stats_digest(self.tables)

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse another model, or the same in another dtype.

        Raises:
            CacheStateError: with what differs.
        """
        mine = identity_of(model)
        if difference := mine.difference(self.model):
            raise CacheStateError(
                f"These statistics belong to another model: it has {difference}; this model is {mine.summary()}. "
                "Calibrate this one: kvslim calibrate MODEL -o stats.safetensors."
            )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, whole or not at all.

        Raises:
            ConfigError: it cannot be written.
        """
        about = {"model": self.model.to_dict(), "calibration": self.calibration.to_dict(), "origin": self.origin}
        write_stats(self.tables, Path(path), about)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            ModelSourceError: there is no such file.
            CheckpointError: it is damaged, truncated, of a newer format, or holds other statistics.
        """
        path = Path(path)
        tables, about = read_stats(GradedTables, path), read_about(path)
        try:
            stats = cls(
                tables,
                ModelIdentity.from_dict(about["model"]),
                GradedCalibration.from_dict(about["calibration"]),
                str(about["origin"]),
            )
            _check_tables(stats)
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: {error}. Calibrate again.") from error
        return stats


def calibrate_graded(
    model: PreTrainedModel,
    windows: Tensor,
    settings: GradedCalibration | None = None,
    *,
    origin: str = "",
    progress: Progress | None = None,
) -> GradedStats:
    """Find the channels of a model from ``(windows, length)`` token ids, and measure what bits buy in each.

    Args:
        model: an uncompressed model of a family whose cache run-time methods understand; it is left as it was.
        windows: token ids without padding, of text like the one to be read later.
        settings: see there.
        origin: the text, in words.
        progress: called after each window.

    Raises:
        UnsupportedModelError: the family is unknown.
        CalibrationError: the windows are unusable, or too few for the channels; the message says how many it takes.
        ConfigError: the group size does not divide the KV heads.
        NonFiniteError: a layer holds NaN or Inf.
    """
    settings = settings or GradedCalibration()
    shape, _ = compressible_layers(model)
    groups = settings.groups(shape.kv_heads)
    _require_tokens(windows, shape, groups, settings.sinks)

    def stage(name: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(name, done, of)

    moments = calibrate_moments(
        model, windows, sinks=settings.sinks, seed=settings.seed, progress=stage("channels: moments and gradients")
    )
    bases = {kind: _bases(part, groups, settings.metric) for kind, part in _kinds(moments).items() if part is not None}
    curves = _measure_curves(model, windows[:_CURVE_WINDOWS], bases, settings.sinks, stage("channels: what bits buy"))
    fields: dict[str, Any] = {f"{kind}_{part}": () for kind in KINDS for part in _PARTS}
    for kind, found in bases.items():
        for part in _PARTS[:4]:
            fields[f"{kind}_{part}"] = tuple(getattr(basis, part).cpu() for basis in found)
        fields[f"{kind}_curves"] = tuple(curves[kind])
    tables = GradedTables(**fields, tokens=moments.values.tokens)
    return GradedStats(tables, identity_of(model), settings, origin)


def _kinds(moments: CachedMoments) -> dict[str, Moments | None]:
    return {"keys": moments.keys, "rotated": moments.rotated_keys, "values": moments.values}


def _require_tokens(windows: Tensor, shape: KVShape, groups: int, sinks: int) -> None:
    per_window = cached_tokens(windows.shape[1]) - sinks
    channels = shape.kv_heads * shape.head_dim // groups
    if windows.shape[0] * per_window < TOKENS_PER_CHANNEL * channels:
        needed = -(-TOKENS_PER_CHANNEL * channels // max(1, per_window))
        raise CalibrationError(
            f"{windows.shape[0]} windows leave {windows.shape[0] * max(0, per_window)} tokens for {channels} channels; "
            f"at least {TOKENS_PER_CHANNEL * channels} are needed, {needed} windows of {windows.shape[1]}. "
            "Give more text, or a smaller group_size."
        )


def _bases(moments: Moments, groups: int, metric: Metric) -> list[ChannelBasis]:
    parts = zip(moments.squares, moments.sums, moments.gradients, strict=True)
    return [channel_basis(*part, moments.tokens, groups=groups, metric=metric) for part in parts]


def _measure_curves(
    model: PreTrainedModel,
    windows: Tensor,
    bases: dict[str, list[ChannelBasis]],
    sinks: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, list[Tensor]]:
    """Squared error over energy of every channel at every width, each window coded as one sequence."""
    heads, rope = kv_shape_of(model).kv_heads, rope_or_none(model)
    graded = {kind: [GradedBasis(basis, heads) for basis in found] for kind, found in bases.items()}
    lost: dict[str, list[Tensor | None]] = {kind: [None] * len(found) for kind, found in bases.items()}
    for done, window in enumerate(cached_windows(model, windows, gradients=False)):
        for kind, found in graded.items():
            for layer, basis in enumerate(found):
                x = (window.values if kind == "values" else window.keys)[layer][:, sinks:]
                if kind == "keys" and rope is not None:
                    places = torch.arange(sinks, sinks + x.shape[1], device=x.device)
                    x = rope.rotate(x.float(), places, inverse=True)
                errors = _channel_errors(basis.latents(x), basis.costs(x.device))
                before = lost[kind][layer]
                lost[kind][layer] = errors if before is None else before + errors
        if progress is not None:
            progress(done + 1, windows.shape[0])
    return {kind: [_relative(part) for part in parts if part is not None] for kind, parts in lost.items()}


def _channel_errors(latents: Tensor, costs: Tensor) -> Tensor:
    """``(features, 9)`` float64 squared errors, outlying tokens left out as the cache leaves them out."""
    whole = layout_of([_CURVE_WIDTH], latents.shape[1], latents.shape[1])
    expected = float(costs.sum()) * gaussian_mse(gaussian_levels(_CURVE_WIDTH))
    return curve(latents[clipping(latents, whole, costs) <= _OUTLYING * expected], WIDTHS).double()


def _relative(errors: Tensor) -> Tensor:
    energy = errors[:, :1]
    shares = torch.where(energy > 0, errors / energy.clamp_min(1e-300), torch.zeros_like(errors))
    shares[:, 0] = 1.0
    return shares.float().cpu()


def _check_tables(stats: GradedStats) -> None:
    """Shapes that fit the model and each other.

    Raises:
        ValueError: they do not.
    """
    model = stats.model
    layers, features = model.layers - model.sliding, model.kv_heads * model.head_dim
    groups = stats.calibration.groups(model.kv_heads)
    size = features // groups
    forms = {
        "directions": (torch.float16, (groups, size, size)),
        "deviations": (torch.float32, (features,)),
        "mean": (torch.float32, (features,)),
        "costs": (torch.float32, (features,)),
        "curves": (torch.float32, (features, len(WIDTHS))),
    }
    for kind in KINDS:
        for part, (dtype, shape) in forms.items():
            tensors = getattr(stats.tables, f"{kind}_{part}")
            if len(tensors) != layers and not (kind == "keys" and not tensors):
                raise ValueError(f"it has {len(tensors)} tables of {kind} for {layers} layers")
            if any(tensor.dtype != dtype or tuple(tensor.shape) != shape for tensor in tensors):
                raise ValueError(f"the {part} of its {kind} are not of its model's shape")
            if part in ("costs", "curves", "deviations") and any((tensor < 0).any() for tensor in tensors):
                raise ValueError(f"the {part} of its {kind} are negative")
