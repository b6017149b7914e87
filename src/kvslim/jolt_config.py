"""Settings of JoLT, checked when they are made; JSON both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvslim.allocating.strategies import STRATEGIES, Strategy
from kvslim.caching.tucker_residual import COPY_BITS
from kvslim.config import JsonConfig, is_count, is_flag, is_list, is_number
from kvslim.decomposing.hosvd import ROUTES, SpectrumRoute
from kvslim.errors import ConfigError
from kvslim.quantizing.codebook import LEVEL_KINDS, LevelKind

PAPER_BITS = (0, 2, 4, 8)
"""Residual widths of the paper."""
PAPER: dict[str, Any] = {"bits": PAPER_BITS, "key_weight": 1.0, "spectra": "exact"}
"""What the paper's preset sets; FlashJoLT is the same with ``spectra="randomized"``."""
OUR_BITS = (0, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class JoltConfig(JsonConfig):
    """Settings of :class:`JoltCache`. The paper's preset is ``JoltConfig(ratio=3, **PAPER)``.

    Attributes:
        ratio: bf16 bytes over measured bytes of the compressed prefix, at least 1. Give this or ``budget_bytes``.
        budget_bytes: bytes for the compressed prefix of the whole batch, shared by rows in proportion to their tokens.
        bits: residual widths to choose from, 0 to 8; 16 is an exact copy in the model's dtype.
        layer_group: consecutive layers per cell.
        sinks: first tokens kept exact, and charged.
        window: last prefilled tokens kept exact, and charged.
        pre_rope: take the rotary embedding off the keys before compressing, and put it back on decoding.
        levels: codebook of the residual, ``lloyd_max`` or ``uniform``.
        seed: seed of the residual's rotation.
        seal: tokens after the prefill that are compressed together under the same ratio; None keeps them exact.
        drift: a sealed cell may get a basis of its own once the energy outside the old basis exceeds this many times
            what the old basis missed of its own tokens.
        spectra: how a cell's spectra are found: ``gram`` (FlashJoLT by Gram matrices and subspace steps),
            ``randomized`` (FlashJoLT as the paper has it) or ``exact``.
        key_weight: importance of a key cell's relative squared error beside a value cell's. 1 is the paper's sum; more
            is better, as attention is more sensitive to its scores than to what it averages.
        weights: importance of each cell's relative squared error, keys and values of layer group 0, then of group 1 …;
            None weighs all alike.
        allocation: ``joint`` (the Lagrangian), or to compare with ``uniform`` (equal bytes per cell) or ``greedy``.
        split: fixed share of the cells' bytes for keys, or None to let the allocation decide.
        backbone: False leaves the Tucker factors out: pure rotated quantization.
        slab_share: below 1, the mode of heads and layers is truncated too (full Tucker, the paper's ablation).
    """

    ratio: float | None = None
    budget_bytes: int | None = None
    bits: tuple[int, ...] = OUR_BITS
    layer_group: int = 1
    sinks: int = 4
    window: int = 0
    pre_rope: bool = True
    levels: LevelKind = "lloyd_max"
    seed: int = 0
    seal: int | None = 256
    drift: float = 2.0
    spectra: SpectrumRoute = "gram"
    key_weight: float = 4.0
    weights: tuple[float, ...] | None = None
    allocation: Strategy = "joint"
    split: float | None = None
    backbone: bool = True
    slab_share: float = 1.0

    def __post_init__(self) -> None:
        if not is_list(self.bits):
            raise ConfigError(f"bits are several widths from 0 to 8, such as (0, 2, 4, 8), not {self.bits!r}.")
        object.__setattr__(self, "bits", tuple(sorted(set(self.bits))))
        if (self.ratio is None) == (self.budget_bytes is None):
            raise ConfigError("Give exactly one of ratio (e.g. ratio=3) and budget_bytes.")
        if self.ratio is not None and not (is_number(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio is at least 1 (bf16 bytes over compressed bytes), not {self.ratio!r}.")
        if self.budget_bytes is not None and not is_count(self.budget_bytes):
            raise ConfigError(f"budget_bytes must be a positive integer, not {self.budget_bytes!r}.")
        if not self.bits or any(not is_count(b, least=0) or (b > 8 and b != COPY_BITS) for b in self.bits):
            raise ConfigError(f"bits are widths from 0 to 8, or 16 for an exact copy, not {self.bits!r}.")
        if not is_count(self.layer_group):
            raise ConfigError(f"layer_group is a number of layers ≥ 1, not {self.layer_group!r}.")
        if not (is_count(self.sinks, least=0) and is_count(self.window, least=0)):
            raise ConfigError(f"sinks and window are token counts ≥ 0, not {self.sinks!r} and {self.window!r}.")
        if not is_flag(self.pre_rope) or not is_count(self.seed, least=0):
            raise ConfigError(f"pre_rope is true or false, seed an integer ≥ 0, not {self.pre_rope!r}, {self.seed!r}.")
        if self.levels not in LEVEL_KINDS:
            raise ConfigError(f"levels is one of {', '.join(LEVEL_KINDS)}, not {self.levels!r}.")
        self._check_streaming()
        self._check_comparison()

    def _check_streaming(self) -> None:
        if self.seal is not None and not is_count(self.seal):
            raise ConfigError(f"seal is a number of tokens ≥ 1, or None to keep later tokens exact, not {self.seal!r}.")
        if not (is_number(self.drift) and self.drift >= 1):
            raise ConfigError(f"drift is a factor ≥ 1, not {self.drift!r}.")
        if not (is_number(self.key_weight) and self.key_weight > 0):
            raise ConfigError(f"key_weight is a positive number, not {self.key_weight!r}.")
        if self.weights is not None:
            if not is_list(self.weights) or not all(is_number(w) and w > 0 for w in self.weights):
                raise ConfigError(f"weights are positive numbers, one per cell, or None, not {self.weights!r}.")
            object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))

    def _check_comparison(self) -> None:
        if self.spectra not in ROUTES:
            raise ConfigError(f"spectra is one of {', '.join(ROUTES)}, not {self.spectra!r}.")
        if self.allocation not in STRATEGIES:
            raise ConfigError(f"allocation is one of {', '.join(STRATEGIES)}, not {self.allocation!r}.")
        if self.split is not None and not (is_number(self.split) and 0 < self.split < 1):
            raise ConfigError(f"split is the keys' share of the bytes, between 0 and 1, or None, not {self.split!r}.")
        if not is_flag(self.backbone):
            raise ConfigError(f"backbone is true or false, not {self.backbone!r}.")
        if not (is_number(self.slab_share) and 0 < self.slab_share <= 1):
            raise ConfigError(f"slab_share is above 0 and at most 1, not {self.slab_share!r}.")
        if not self.backbone and not any(self.bits):
            raise ConfigError("Without backbone and without a width above 0 nothing is stored. Add widths to bits.")


@dataclass(frozen=True)
class Price(JsonConfig):
    """What an earlier prompt's allocation says about the next one, so that layers can be coded as they arrive.

    Attributes:
        per_share: the multiplier λ times the row's budget: error per share of the budget.
        shares: expected share of the budget per layer group; they sum to 1.
    """

    per_share: float
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not is_number(self.per_share) or self.per_share < 0:
            raise ConfigError(f"per_share is a number ≥ 0, not {self.per_share!r}.")
        if not is_list(self.shares) or not self.shares or not all(is_number(s) and s > 0 for s in self.shares):
            raise ConfigError(f"shares are positive numbers, one per layer group, not {self.shares!r}.")
        object.__setattr__(self, "shares", tuple(float(share) for share in self.shares))
