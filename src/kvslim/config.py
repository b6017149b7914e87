"""The base of all configuration dataclasses: JSON round trip, unknown fields rejected."""

from __future__ import annotations

import dataclasses
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
