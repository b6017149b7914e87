"""What a method of keeping the cache is, and how its name is read: a form, then options after colons."""

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
        """Whether it must be calibrated first, on text other than the test text."""
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
    """A form of a method name.

    Attributes:
        pattern: matches the name up to the first colon.
        example: what the user is shown.
        build: the method from its whole name, the match and the options.
    """

    pattern: re.Pattern[str]
    example: str
    build: Callable[[str, re.Match[str], list[str]], Method]


@dataclass(frozen=True)
class Option:
    """An option after a colon.

    Attributes:
        form: what the user is shown.
        pattern: matches the option; with a group, that is its value.
        read: settings from the value.
    """

    form: str
    pattern: str
    read: Callable[[str], dict[str, Any]]


def read_options(name: str, options: list[str], known: tuple[Option, ...]) -> dict[str, Any]:
    """The settings that options give.

    Raises:
        ConfigError: an unknown option; the message lists the known ones.
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
