"""Baselines by name, ``kivi-2:window=128`` and its like; most are one dataclass, a cache class with settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvslim.baselines import Float8Cache, KiviCache, KvquantCache, KvtcCache, TransformersCache, XkvCache
from kvslim.baselines.kivi import GROUP
from kvslim.baselines.kvtc import KVTC_SINKS
from kvslim.baselines.xkv import SINKS, SPLIT
from kvslim.calibrating.graded_stats import GradedCalibration
from kvslim.errors import ConfigError
from kvslim.evaluating.graded_methods import StatsMethod
from kvslim.evaluating.method_forms import CacheMethod, Form, Method, Option, read_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Baseline(CacheMethod):
    """A method that others have published, as a cache class of :mod:`kvslim.baselines`.

    Attributes:
        kind: what plots and tables group by.
        make: the cache from a model and the settings as keywords.
        chosen: every setting, defaults included.
    """

    kind: str
    make: Callable[..., Cache]
    chosen: tuple[tuple[str, Any], ...]

    @property
    def family(self) -> str:
        return self.kind

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.chosen)

    def make_cache(self, model: PreTrainedModel) -> Cache:
        return self.make(model, **self.settings)


@dataclass(frozen=True)
class Kvtc(StatsMethod):
    """KVTC-like caches at a ratio.

    Attributes:
        chosen: every setting, defaults included.
    """

    chosen: tuple[tuple[str, Any], ...]

    @property
    def family(self) -> str:
        return "kvtc"

    @property
    def settings(self) -> dict[str, Any]:
        return {**dict(self.chosen), "calibration": self.calibration.to_dict()}

    def make_cache(self, model: PreTrainedModel) -> Cache:
        """An empty cache.

        Raises:
            CalibrationError: the method was not bound to statistics.
        """
        return KvtcCache(model, self.bound_stats(), **dict(self.chosen))


def _count(setting: str) -> Option:
    return Option(f"{setting}=N", rf"{setting}=(\d+)", lambda value: {setting: int(value)})


def _share(setting: str, word: str) -> Option:
    return Option(f"{word}=SHARE", rf"{word}=(0|0?\.\d+)", lambda value: {setting: float(value)})


_EXACT: dict[str, Any] = {"sinks": 0, "window": 0, "seal": None}
_EXACT_OPTIONS = (
    _count("sinks"),
    _count("window"),
    Option("seal=N|off", r"seal=(\d+|off)", lambda value: {"seal": None if value == "off" else int(value)}),
)
_PRE_ROPE = Option("pre-rope", "pre-rope", lambda _: {"pre_rope": True})
_POST_ROPE = Option("post-rope", "post-rope", lambda _: {"pre_rope": False})
_NUMBER = r"(\d+(?:\.\d+)?)"


def _form(
    pattern: str, example: str, make: Callable[..., Cache], defaults: dict[str, Any], options: tuple[Option, ...],
    named: tuple[str, Callable[[str], Any]] | None = None, check: Callable[[dict[str, Any]], str | None] | None = None,
) -> Form:  # fmt: skip
    """A form whose cache takes keyword settings.

    Args:
        pattern: of the name; with a group if the name holds a number.
        example: what the user is shown.
        make: the cache class.
        defaults: settings and their defaults.
        options: that change them.
        named: the setting that the number in the name is for, and how it is read.
        check: says what is wrong with settings, or None; so that it is said before a model is loaded.
    """
    kind = re.split(r"-", example)[0].split(",")[0]

    def build(name: str, found: re.Match[str], given: list[str]) -> Method:
        chosen = dict(defaults) if named is None else {named[0]: named[1](found[1]), **defaults}
        chosen |= read_options(name, given, options)
        if chosen.get("seal") == 0:
            raise ConfigError(f"{name!r}: seal is a number of tokens ≥ 1 or off.")
        if check is not None and (wrong := check(chosen)):
            raise ConfigError(f"{name!r}: {wrong}.")
        return Baseline(name, kind, make, tuple(chosen.items()))

    return Form(re.compile(pattern), example, build)


def _quantized(backend: str, widths: str) -> Form:
    return _form(
        rf"{backend}-([{widths}])", f"{backend}-4", TransformersCache,
        {"backend": backend, "group": 64, "residual_length": 128},
        (_count("group"), Option("residual=N", r"residual=(\d+)", lambda value: {"residual_length": int(value)})),
        ("bits", int),
    )  # fmt: skip


def _wrong_kivi(settings: dict[str, Any]) -> str | None:
    return "group is a number of values ≥ 2 that share a step" if settings["group"] < 2 else None


def _wrong_kvquant(settings: dict[str, Any]) -> str | None:
    return "outliers is a share of at most 0.5" if settings["outliers"] > 0.5 else None


def _wrong_xkv(settings: dict[str, Any]) -> str | None:
    if settings["ratio"] < 1:
        return "ratio is at least 1"
    if settings["layers"] < 1:
        return "layers is a number of adjacent layers ≥ 1"
    return "split is the keys' share of the ranks, between 0 and 1" if not 0 < settings["split"] < 1 else None


def _kvtc(name: str, found: re.Match[str], given: list[str]) -> Method:
    chosen = {"ratio": float(found[1]), **_EXACT, "sinks": KVTC_SINKS} | read_options(name, given, _EXACT_OPTIONS)
    if chosen["ratio"] < 1:
        raise ConfigError(f"{name!r}: ratio is at least 1.")
    if chosen["seal"] == 0:
        raise ConfigError(f"{name!r}: seal is a number of tokens ≥ 1 or off.")
    return Kvtc(name, GradedCalibration(metric="energy"), tuple(chosen.items()))


BASELINE_FORMS = (
    _form(
        "kivi-([2-8])", "kivi-2, kivi-4, kivi-2:window=128:seal=128 (as published)", KiviCache,
        {"group": GROUP, **_EXACT}, (_count("group"), *_EXACT_OPTIONS), ("bits", int), _wrong_kivi,
    ),
    _form(
        "kvquant-([2-8])", "kvquant-3, kvquant-3:outliers=0", KvquantCache,
        {"outliers": 0.01, **_EXACT, "sinks": 1, "pre_rope": True},
        (_share("outliers", "outliers"), _PRE_ROPE, _POST_ROPE, *_EXACT_OPTIONS), ("bits", int), _wrong_kvquant,
    ),
    _form("fp8", "fp8", Float8Cache, {**_EXACT, "pre_rope": False}, (_PRE_ROPE, _POST_ROPE, *_EXACT_OPTIONS)),
    _form(
        f"xkv-{_NUMBER}x", "xkv-3x, xkv-3x:layers=2:post-rope", XkvCache,
        {"layers": 4, "split": SPLIT, "pre_rope": True, **_EXACT, "sinks": SINKS},
        (_count("layers"), _share("split", "split"), _PRE_ROPE, _POST_ROPE, *_EXACT_OPTIONS), ("ratio", float),
        _wrong_xkv,
    ),
    Form(re.compile(f"kvtc-{_NUMBER}x"), "kvtc-4x, kvtc-4x:window=128 (the paper's)", _kvtc),
    _quantized("quanto", "24"),
    _quantized("hqq", "12348"),
)  # fmt: skip
"""The forms of baselines' names."""
