"""Settings of graded caches, checked when they are made; JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvslim.config import JsonConfig, is_count, is_flag, is_list, is_number
from kvslim.errors import ConfigError
from kvslim.quantizing.channels import KERNEL_WIDTHS, WIDTHS

Preset = Literal["quality", "speed"]

QUALITY: dict[str, Any] = {"pre_rope": True, "widths": WIDTHS, "run": 8}
"""Un-rotated keys, any width: the least error per byte. Keys are rebuilt and rotated to be read."""

SPEED: dict[str, Any] = {"pre_rope": False, "widths": KERNEL_WIDTHS, "run": 16}
"""Rotated keys, widths that unpack without crossing bit planes: queries are projected once, nothing is rebuilt."""

PRESETS: dict[Preset, dict[str, Any]] = {"quality": QUALITY, "speed": SPEED}


@dataclass(frozen=True)
class GradedConfig(JsonConfig):
    """Settings of :class:`~kvslim.graded.GradedCache`: ``GradedConfig(ratio=4)``, ``GradedConfig(ratio=4, **SPEED)``.

    Attributes:
        ratio: bf16 bytes over measured bytes of the compressed prefix, at least 1. Give this or ``budget_bytes``.
        budget_bytes: bytes for the compressed prefix of the whole batch, shared by rows in proportion to their tokens.
        pre_rope: code keys un-rotated.
        widths: code widths to choose from, 0 to 8 bits, 0 among them.
        run: neighbouring channels that share a width, a multiple of 8 so that every width fills whole bytes.
        sinks: first tokens kept exact, and charged.
        window: last prefilled tokens kept exact, and charged.
        seal: tokens after the prefill that are coded together under the same ratio; None keeps them exact.
        outliers: share of tokens, over all layers, keys and values, that may be kept exact because they lie outside the
            levels of the others; the bytes are set aside, and the report says how many were.
    """

    ratio: float | None = None
    budget_bytes: int | None = None
    pre_rope: bool = True
    widths: tuple[int, ...] = WIDTHS
    run: int = 8
    sinks: int = 4
    window: int = 0
    seal: int | None = 128
    outliers: float = 0.004

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.budget_bytes is None):
            raise ConfigError("Give exactly one of ratio (e.g. ratio=4) and budget_bytes.")
        if self.ratio is not None and not (is_number(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio is at least 1 (bf16 bytes over compressed bytes), not {self.ratio!r}.")
        if self.budget_bytes is not None and not is_count(self.budget_bytes):
            raise ConfigError(f"budget_bytes must be a positive integer, not {self.budget_bytes!r}.")
        if not is_flag(self.pre_rope):
            raise ConfigError(f"pre_rope is true or false, not {self.pre_rope!r}.")
        if not is_list(self.widths) or any(not is_count(w, least=0) or w > 8 for w in self.widths):
            raise ConfigError(f"widths are numbers of bits from 0 to 8, not {self.widths!r}.")
        object.__setattr__(self, "widths", tuple(sorted(set(self.widths))))
        if self.widths[:1] != (0,) or len(self.widths) < 2:
            raise ConfigError(f"widths are 0 and at least one more, not {self.widths!r}.")
        if not is_count(self.run) or self.run % 8:
            raise ConfigError(f"run is a multiple of 8 channels, not {self.run!r}.")
        if not (is_count(self.sinks, least=0) and is_count(self.window, least=0)):
            raise ConfigError(f"sinks and window are token counts ≥ 0, not {self.sinks!r} and {self.window!r}.")
        if self.seal is not None and not is_count(self.seal):
            raise ConfigError(f"seal is a number of tokens ≥ 1, or None to keep later tokens exact, not {self.seal!r}.")
        if not (is_number(self.outliers) and 0 <= self.outliers < 1):
            raise ConfigError(f"outliers is a share of tokens from 0 to below 1, not {self.outliers!r}.")
