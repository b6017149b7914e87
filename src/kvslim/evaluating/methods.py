"""Methods by name: ``jolt-3x:post-rope`` and its like, parsed and checked before any model is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvslim.baselines import IntegerCache, RotatedCache
from kvslim.errors import ConfigError
from kvslim.evaluating.baseline_methods import BASELINE_FORMS
from kvslim.evaluating.graded_methods import GRADED_FORMS
from kvslim.evaluating.method_forms import CacheMethod, Form, Method, Option, read_options
from kvslim.jolt import PAPER, JoltCache, JoltConfig
from kvslim.palu import PaluConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Uncompressed(CacheMethod):
    """The cache that the model makes itself."""

    @property
    def family(self) -> str:
        return "none"

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def make_cache(self, model: PreTrainedModel) -> Cache:
        """A ``DynamicCache``."""
        from transformers.cache_utils import DynamicCache

        return DynamicCache(config=model.config)


@dataclass(frozen=True)
class PerToken(CacheMethod):
    """Each token coded on its own: asymmetric integers, or rotated with Lloyd-Max levels."""

    bits: int
    rotated: bool

    @property
    def family(self) -> str:
        return "rotated" if self.rotated else "integer"

    @property
    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits}

    def make_cache(self, model: PreTrainedModel) -> Cache:
        return (RotatedCache if self.rotated else IntegerCache)(model, self.bits)


@dataclass(frozen=True)
class Jolt(CacheMethod):
    """JoLT at a ratio."""

    config: JoltConfig

    @property
    def family(self) -> str:
        return "jolt"

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.config.to_dict(), "bits": list(self.config.bits)}

    def make_cache(self, model: PreTrainedModel) -> Cache:
        return JoltCache(model, self.config)


@dataclass(frozen=True)
class Palu(Method):
    """A model compressed by Palu; it has to be made before it can be measured."""

    config: PaluConfig

    @property
    def family(self) -> str:
        return "palu"

    @property
    def settings(self) -> dict[str, Any]:
        return self.config.to_dict()

    @property
    def needs_calibration(self) -> bool:
        return self.config.needs_calibration


def _per_token(name: str, found: re.Match[str], options: list[str]) -> Method:
    if options:
        raise ConfigError(f"{name!r}: {found[1]} takes no options.")
    return PerToken(name, int(found[2]), rotated=found[1] == "rot")


def _uncompressed(name: str, found: re.Match[str], options: list[str]) -> Method:
    if options:
        raise ConfigError(f"{name!r}: none takes no options.")
    return Uncompressed(name)


_SHARE = r"(0?\.\d+|1(?:\.0)?)"

_JOLT_OPTIONS = (
    Option("pre-rope", "pre-rope", lambda _: {"pre_rope": True}),
    Option("post-rope", "post-rope", lambda _: {"pre_rope": False}),
    Option("paper", "paper", lambda _: dict(PAPER)),
    Option("rank-only", "rank-only", lambda _: {"bits": (0,)}),
    Option("no-backbone", "no-backbone", lambda _: {"backbone": False}),
    Option("bits=0/2/4", r"bits=(\d+(?:/\d+)*)", lambda value: {"bits": tuple(map(int, value.split("/")))}),
    Option("sinks=N", r"sinks=(\d+)", lambda value: {"sinks": int(value)}),
    Option("window=N", r"window=(\d+)", lambda value: {"window": int(value)}),
    Option("layers=N", r"layers=(\d+)", lambda value: {"layer_group": int(value)}),
    Option("levels=KIND", r"levels=([a-z_]+)", lambda value: {"levels": value}),
    Option("seed=N", r"seed=(\d+)", lambda value: {"seed": int(value)}),
    Option("seal=N|off", r"seal=(\d+|off)", lambda value: {"seal": None if value == "off" else int(value)}),
    Option("joint|uniform|greedy", "(joint|uniform|greedy)", lambda value: {"allocation": value}),
    Option("split=SHARE", f"split={_SHARE}", lambda value: {"split": float(value)}),
    Option("slabs=SHARE", f"slabs={_SHARE}", lambda value: {"slab_share": float(value)}),
    Option("exact|gram|randomized", "(exact|gram|randomized)", lambda value: {"spectra": value}),
    Option("keys=WEIGHT", r"keys=(\d+(?:\.\d+)?)", lambda value: {"key_weight": float(value)}),
)

_PALU_OPTIONS = (
    Option(
        "uniform|fisher|fisher-rms|spectral",
        "(uniform|fisher|fisher-rms|spectral)",
        lambda value: {"ranks": value},
    ),
    Option("whitened|loss-aware|svd", "(whitened|loss-aware|svd)", lambda value: {"decomposition": value}),
    Option("sequential", "sequential", lambda _: {"sequential": True}),
    Option("gsN", r"gs(\d+)", lambda value: {"group_size": int(value)}),
    Option("joint", "joint", lambda _: {"group_size": None}),
    Option("multiple=N", r"multiple=(\d+)", lambda value: {"rank_multiple": int(value)}),
    Option("floor=SHARE", r"floor=([01]|0?\.\d+)", lambda value: {"rank_floor": float(value)}),
    Option("Nbit", r"(\d+)bit", lambda value: {"bits": int(value)}),
    Option("graded=BITS", r"graded=(\d+(?:\.\d+)?|\.\d+)", lambda value: {"graded": float(value)}),
    Option("no-hadamard", "no-hadamard", lambda _: {"hadamard": False}),
    Option("sinks=N", r"sinks=(\d+)", lambda value: {"sinks": int(value)}),
    Option("window=N", r"window=(\d+)", lambda value: {"window": int(value)}),
)


def _jolt(name: str, found: re.Match[str], options: list[str]) -> Method:
    return Jolt(name, JoltConfig(ratio=float(found[1]), **read_options(name, options, _JOLT_OPTIONS)))


def _palu(name: str, found: re.Match[str], options: list[str]) -> Method:
    return Palu(name, PaluConfig(rate=float(found[1]) / 100, **read_options(name, options, _PALU_OPTIONS)))


_NUMBER = r"(\d+(?:\.\d+)?)"
_FORMS = (
    Form(re.compile("none"), "none", _uncompressed),
    Form(re.compile("(int)([1-8])"), "int8, int4, int3, int2", _per_token),
    Form(re.compile("(rot)([1-8])"), "rot6 … rot2", _per_token),
    *BASELINE_FORMS,
    Form(
        re.compile(f"jolt-{_NUMBER}x"),
        "jolt-3x, jolt-2.5x:post-rope, jolt-4x:paper, jolt-4x:bits=0/3/16:window=64",
        _jolt,
    ),
    Form(
        re.compile(f"palu-{_NUMBER}"),
        "palu-30, palu-50:spectral:loss-aware, palu-50:sequential, palu-30:gs1, palu-30:svd, "
        "palu-30:spectral:4bit, palu-0:graded=3 (percent removed)",
        _palu,
    ),
    *GRADED_FORMS,
)

METHOD_FORMS = "; ".join(form.example for form in _FORMS)
"""The forms of a method name, by example."""


def parse_method(name: str) -> Method:
    """Read one method name: a form of :data:`METHOD_FORMS`, options after colons.

    Raises:
        ConfigError: no such form or option, or a value out of range; the message lists what there is.
    """
    head, *options = name.strip().split(":")
    for form in _FORMS:
        if found := form.pattern.fullmatch(head):
            return form.build(name.strip(), found, options)
    raise ConfigError(f"Unknown method {name.strip()!r}. The forms are: {METHOD_FORMS}.")


def parse_methods(names: str) -> list[Method]:
    """Read a comma-separated list of method names, each once.

    Raises:
        ConfigError: as :func:`parse_method`, or the list is empty or names a method twice.
    """
    methods = [parse_method(name) for name in names.split(",") if name.strip()]
    if not methods:
        raise ConfigError(f"Name at least one method. The forms are: {METHOD_FORMS}.")
    seen = [method.name for method in methods]
    if twice := sorted({name for name in seen if seen.count(name) > 1}):
        raise ConfigError(f"Named twice: {', '.join(twice)}.")
    return methods


def check_methods(methods: Sequence[Method], *, calibrated: bool) -> None:
    """Refuse a list that cannot be run.

    Raises:
        ConfigError: a method needs calibration text and there is none.
    """
    needing = [method.name for method in methods if method.needs_calibration]
    if needing and not calibrated:
        raise ConfigError(
            f"{', '.join(needing)} must be calibrated on text other than the test text: give it (--calibration FILE). "
            "Palu by plain SVD with uniform ranks (for example palu-30:svd) needs none."
        )
