"""Graded caches among the methods: their names, and the statistics that they are bound to before they are measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvslim.calibrating.graded_stats import GradedCalibration, GradedStats, Progress, calibrate_graded
from kvslim.errors import CalibrationError
from kvslim.evaluating.method_forms import CacheMethod, Form, Method, Option, read_options
from kvslim.graded import PRESETS, GradedCache, GradedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class StatsMethod(CacheMethod):
    """A method whose caches need statistics of the model.

    Attributes:
        calibration: settings of the statistics.
        stats: the statistics, once there are any.
    """

    calibration: GradedCalibration
    stats: GradedStats | None = field(default=None, kw_only=True)

    @property
    def needs_calibration(self) -> bool:
        return self.stats is None

    def bound_stats(self) -> GradedStats:
        """The statistics.

        Raises:
            CalibrationError: there are none.
        """
        if self.stats is None:
            raise CalibrationError(f"{self.name} has no statistics: see kvslim.evaluating.graded_methods.bind().")
        return self.stats


@dataclass(frozen=True)
class Graded(StatsMethod):
    """Graded latents at a ratio.

    Attributes:
        config: settings of the cache.
    """

    config: GradedConfig

    @property
    def family(self) -> str:
        return "graded" if self.config.pre_rope else "graded, rotated keys"

    @property
    def settings(self) -> dict[str, Any]:
        config = self.config.to_dict()
        return {**config, "widths": list(self.config.widths), "calibration": self.calibration.to_dict()}

    def make_cache(self, model: PreTrainedModel) -> Cache:
        """An empty cache.

        Raises:
            CalibrationError: the method was not bound to statistics.
        """
        return GradedCache(model, self.bound_stats(), self.config)


def bind(
    model: PreTrainedModel,
    methods: Sequence[Method],
    calibration: Tensor | None,
    progress: Progress | None = None,
    stats: GradedStats | None = None,
) -> list[Method]:
    """The methods with statistics for those that need them, one calibration for each set of calibration settings.

    Args:
        model: the uncompressed model.
        methods: any methods.
        calibration: ``(windows, length)`` token ids of text other than the test text, or None.
        progress: see :func:`~kvslim.calibrating.graded_stats.calibrate_graded`.
        stats: statistics that are there already; they serve methods with their settings.

    Raises:
        CalibrationError: there are neither statistics nor text for a method, or the text is too short.
        CacheStateError: ``stats`` are of another model.
        UnsupportedModelError, ConfigError, NonFiniteError: of the model and the settings.
    """
    found: dict[GradedCalibration, GradedStats] = {} if stats is None else {stats.calibration: stats}
    if stats is not None:
        stats.check_model(model)
    bound: list[Method] = []
    for method in methods:
        if isinstance(method, StatsMethod) and method.stats is None:
            if method.calibration not in found:
                if calibration is None:
                    raise CalibrationError(
                        f"{method.name} needs calibration text other than the test text (--calibration FILE), or "
                        "statistics with its settings (kvslim calibrate)."
                    )
                found[method.calibration] = calibrate_graded(model, calibration, method.calibration, progress=progress)
            bound.append(replace(method, stats=found[method.calibration]))
        else:
            bound.append(method)
    return bound


_CALIBRATION = ("metric", "group_size")

_OPTIONS = (
    Option("quality|speed", "(quality|speed)", lambda value: dict(PRESETS[value])),  # type: ignore[index]
    Option("pre-rope", "pre-rope", lambda _: {"pre_rope": True}),
    Option("post-rope", "post-rope", lambda _: {"pre_rope": False}),
    Option("loss|diagonal|layer|energy", "(loss|diagonal|layer|energy)", lambda value: {"metric": value}),
    Option("gsN", r"gs(\d+)", lambda value: {"group_size": int(value)}),
    Option("widths=0/2/4", r"widths=(\d+(?:/\d+)*)", lambda value: {"widths": tuple(map(int, value.split("/")))}),
    Option("run=N", r"run=(\d+)", lambda value: {"run": int(value)}),
    Option("sinks=N", r"sinks=(\d+)", lambda value: {"sinks": int(value)}),
    Option("window=N", r"window=(\d+)", lambda value: {"window": int(value)}),
    Option("seal=N|off", r"seal=(\d+|off)", lambda value: {"seal": None if value == "off" else int(value)}),
    Option("outliers=SHARE", r"outliers=(0|0?\.\d+)", lambda value: {"outliers": float(value)}),
)


def _graded(name: str, found: re.Match[str], options: list[str]) -> Method:
    settings = read_options(name, options, _OPTIONS)
    calibration = {key: settings.pop(key) for key in _CALIBRATION if key in settings}
    return Graded(name, GradedCalibration(**calibration), GradedConfig(ratio=float(found[1]), **settings))


GRADED_FORMS = (
    Form(
        re.compile(r"graded-(\d+(?:\.\d+)?)x"), "graded-4x, graded-4x:speed, graded-3x:post-rope:energy, graded-4x:gs1",
        _graded,
    ),
)  # fmt: skip
"""The forms of graded caches' names."""
