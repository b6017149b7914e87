"""What a method is, and how the forms of its name are read."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvslim.errors import ConfigError

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

    @property
    def needs_calibration(self) -> bool:
        """Whether it must be calibrated on text other than the test text first."""
        return False


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
class Form:
    """One form of a name: its pattern, examples, and what reads a match."""

    pattern: re.Pattern[str]
    example: str
    build: Callable[[str, re.Match[str], list[str]], Method]


@dataclass(frozen=True)
class Option:
    """One option after a colon: how it is shown, its pattern, and the settings that it makes."""

    form: str
    pattern: str
    read: Callable[[str], dict[str, Any]]


def read_options(name: str, options: list[str], known: tuple[Option, ...]) -> dict[str, Any]:
    """The settings that the options of a name make.

    Raises:
        ConfigError: one is unknown; the message lists the known.
    """
    settings: dict[str, Any] = {}
    for option in options:
        matches = [(one, found) for one in known if (found := re.fullmatch(one.pattern, option))]
        if not matches:
            forms = ", ".join(one.form for one in known)
            raise ConfigError(f"{name!r}: unknown option {option!r}. Known: {forms}.")
        one, found = matches[0]
        settings |= one.read(found[1] if found.re.groups else "")
    return settings
