"""Methods by name: ``jolt-3x:post-rope`` and its like, parsed and checked before any model is loaded."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvslim.baselines import IntegerCache, RotatedCache
from kvslim.errors import ConfigError
from kvslim.jolt import PAPER, JoltCache, JoltConfig
from kvslim.palu import PaluConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache


@dataclass(frozen=True)
class Method(ABC):
    """One way to keep the cache.

    Attributes:
        name: as the user wrote it.
    """

    name: str

    @property
    @abstractmethod
    def family(self) -> str:
        """What plots and tables group by."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Every setting as a JSON value, defaults included."""


@dataclass(frozen=True)
class CacheMethod(Method):
    """A method that works on any model at run time."""

    @abstractmethod
    def make_cache(self, model: PreTrainedModel) -> Cache:
        """An empty cache for ``model``.

        Raises:
            UnsupportedModelError: the model is of no supported family.
        """


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


@dataclass(frozen=True)
class _Form:
    pattern: re.Pattern[str]
    example: str
    build: Callable[[str, re.Match[str], list[str]], Method]


def _per_token(name: str, found: re.Match[str], options: list[str]) -> Method:
    if options:
        raise ConfigError(f"{name!r}: {found[1]} takes no options.")
    return PerToken(name, int(found[2]), rotated=found[1] == "rot")


def _uncompressed(name: str, found: re.Match[str], options: list[str]) -> Method:
    if options:
        raise ConfigError(f"{name!r}: none takes no options.")
    return Uncompressed(name)


@dataclass(frozen=True)
class _Option:
    form: str
    pattern: str
    read: Callable[[str], dict[str, Any]]


_SHARE = r"(0?\.\d+|1(?:\.0)?)"

_JOLT_OPTIONS = (
    _Option("pre-rope", "pre-rope", lambda _: {"pre_rope": True}),
    _Option("post-rope", "post-rope", lambda _: {"pre_rope": False}),
    _Option("paper", "paper", lambda _: dict(PAPER)),
    _Option("rank-only", "rank-only", lambda _: {"bits": (0,)}),
    _Option("no-backbone", "no-backbone", lambda _: {"backbone": False}),
    _Option("bits=0/2/4", r"bits=(\d+(?:/\d+)*)", lambda value: {"bits": tuple(map(int, value.split("/")))}),
    _Option("sinks=N", r"sinks=(\d+)", lambda value: {"sinks": int(value)}),
    _Option("window=N", r"window=(\d+)", lambda value: {"window": int(value)}),
    _Option("layers=N", r"layers=(\d+)", lambda value: {"layer_group": int(value)}),
    _Option("levels=KIND", r"levels=([a-z_]+)", lambda value: {"levels": value}),
    _Option("seed=N", r"seed=(\d+)", lambda value: {"seed": int(value)}),
    _Option("seal=N|off", r"seal=(\d+|off)", lambda value: {"seal": None if value == "off" else int(value)}),
    _Option("joint|uniform|greedy", "(joint|uniform|greedy)", lambda value: {"allocation": value}),
    _Option("split=SHARE", f"split={_SHARE}", lambda value: {"split": float(value)}),
    _Option("slabs=SHARE", f"slabs={_SHARE}", lambda value: {"slab_share": float(value)}),
    _Option("exact|gram|randomized", "(exact|gram|randomized)", lambda value: {"spectra": value}),
    _Option("keys=WEIGHT", r"keys=(\d+(?:\.\d+)?)", lambda value: {"key_weight": float(value)}),
)

_PALU_OPTIONS = (
    _Option(
        "uniform|fisher|fisher-rms|spectral",
        "(uniform|fisher|fisher-rms|spectral)",
        lambda value: {"ranks": value},
    ),
    _Option("whitened|loss-aware|svd", "(whitened|loss-aware|svd)", lambda value: {"decomposition": value}),
    _Option("sequential", "sequential", lambda _: {"sequential": True}),
    _Option("gsN", r"gs(\d+)", lambda value: {"group_size": int(value)}),
    _Option("joint", "joint", lambda _: {"group_size": None}),
    _Option("multiple=N", r"multiple=(\d+)", lambda value: {"rank_multiple": int(value)}),
    _Option("floor=SHARE", r"floor=([01]|0?\.\d+)", lambda value: {"rank_floor": float(value)}),
    _Option("Nbit", r"(\d+)bit", lambda value: {"bits": int(value)}),
    _Option("graded=BITS", r"graded=(\d+(?:\.\d+)?|\.\d+)", lambda value: {"graded": float(value)}),
    _Option("no-hadamard", "no-hadamard", lambda _: {"hadamard": False}),
    _Option("sinks=N", r"sinks=(\d+)", lambda value: {"sinks": int(value)}),
    _Option("window=N", r"window=(\d+)", lambda value: {"window": int(value)}),
)


def _options(name: str, options: list[str], known: tuple[_Option, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for option in options:
        matches = [(one, found) for one in known if (found := re.fullmatch(one.pattern, option))]
        if not matches:
            forms = ", ".join(one.form for one in known)
            raise ConfigError(f"{name!r}: unknown option {option!r}. Known: {forms}.")
        one, found = matches[0]
        settings |= one.read(found[1] if found.re.groups else "")
    return settings


def _jolt(name: str, found: re.Match[str], options: list[str]) -> Method:
    return Jolt(name, JoltConfig(ratio=float(found[1]), **_options(name, options, _JOLT_OPTIONS)))


def _palu(name: str, found: re.Match[str], options: list[str]) -> Method:
    return Palu(name, PaluConfig(rate=float(found[1]) / 100, **_options(name, options, _PALU_OPTIONS)))


_NUMBER = r"(\d+(?:\.\d+)?)"
_FORMS = (
    _Form(re.compile("none"), "none", _uncompressed),
    _Form(re.compile("(int)([1-8])"), "int8, int4, int3, int2", _per_token),
    _Form(re.compile("(rot)([1-8])"), "rot6 … rot2", _per_token),
    _Form(
        re.compile(f"jolt-{_NUMBER}x"),
        "jolt-3x, jolt-2.5x:post-rope, jolt-4x:paper, jolt-4x:bits=0/3/16:window=64",
        _jolt,
    ),
    _Form(
        re.compile(f"palu-{_NUMBER}"),
        "palu-30, palu-50:spectral:loss-aware, palu-50:sequential, palu-30:gs1, palu-30:svd, "
        "palu-30:spectral:4bit, palu-0:graded=3 (percent removed)",
        _palu,
    ),
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
    needing = [method.name for method in methods if isinstance(method, Palu) and method.needs_calibration]
    if needing and not calibrated:
        raise ConfigError(
            f"{', '.join(needing)} must be calibrated on text other than the test text: give it (--calibration FILE), "
            "or ask for plain SVD with uniform ranks (for example palu-30:svd)."
        )
