"""The base of all configuration dataclasses: JSON round trip, unknown fields rejected."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

from kvslim.errors import ConfigError


class JsonConfig:
    """Mixin for frozen dataclasses whose fields are JSON values.

    Subclasses are ``@dataclass(frozen=True)`` and check their own ranges in ``__post_init__``,
    raising :class:`~kvslim.errors.ConfigError`.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a plain dictionary that ``json.dumps`` accepts."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]  # only dataclasses mix this in

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build the configuration from :meth:`to_dict`'s output.

        Raises:
            ConfigError: a field is unknown (the message lists the known ones), or a value is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ConfigError(
                f"{cls.__name__} has no field {', '.join(map(repr, unknown))}. Known fields: {', '.join(known)}."
            )
        return cls(**data)


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite int or float; a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_flag(value: object) -> bool:
    """Whether ``value`` is true or false."""
    return isinstance(value, bool)


def is_list(value: object) -> bool:
    """Whether ``value`` is a tuple or a list."""
    return isinstance(value, tuple | list)


def is_count(value: object, least: int = 1) -> bool:
    """Whether ``value`` is an int of at least ``least``; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
