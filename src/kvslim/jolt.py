"""JoLT: compress a filled KV cache by partial Tucker factors and a rotated low-bit residual, under one byte budget.

Read top to bottom: the configuration, the choices of a cell, the plan for a sequence, the cache that carries it out.

    prefill → cells (layer group × K/V) → spectra → one Lagrangian over ranks and bits → factors + packed residual

Source: Krishnan and Schulz, "A JoLT for the KV Cache" (2026): partial Tucker, JL residual, joint allocation. Terms: a
*cell* is the tensor ``(layers · kv_heads, tokens, head_dim)`` of one layer group's keys or values.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kvslim.allocating.lagrangian import FloatArray, IntArray, allocate
from kvslim.attending.families import rope_of
from kvslim.attending.layout import compressible_layers
from kvslim.caching.block import Block
from kvslim.caching.compressed import Cell, CompressedCache, Middle
from kvslim.caching.report import header_bytes
from kvslim.caching.tucker_residual import CellPlan, cell_bytes, encode_cell
from kvslim.config import JsonConfig, is_count, is_flag, is_list, is_number
from kvslim.decomposing.tucker import Hosvd, hosvd
from kvslim.errors import BudgetError, ConfigError
from kvslim.quantizing.codebook import LEVEL_KINDS, LevelKind
from kvslim.quantizing.rotated import distortion

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHORT = 256  # tokens below which a prompt that cannot meet its ratio stays exact rather than being refused
_KEEP_VECTORS_BELOW = 1024  # slabs × features up to which a cell's singular vectors wait for the second pass


@dataclass(frozen=True)
class JoltConfig(JsonConfig):
    """Settings of :class:`JoltCache`. The defaults are the paper's preset.

    Attributes:
        ratio: bf16 bytes over measured bytes of the compressed prefix, above 1. Give this or ``budget_bytes``.
        budget_bytes: bytes for the compressed prefix of the whole batch, shared by rows in proportion to their tokens.
        bits: residual widths to choose from.
        layer_group: consecutive layers per cell.
        sinks: first tokens kept exact, and charged.
        window: last prefilled tokens kept exact, and charged.
        pre_rope: take the rotary embedding off the keys before compressing, and put it back on decoding.
        levels: codebook of the residual, ``lloyd_max`` or ``uniform``.
        seed: seed of the residual's rotation.
    """

    ratio: float | None = None
    budget_bytes: int | None = None
    bits: tuple[int, ...] = (0, 2, 4, 8)
    layer_group: int = 1
    sinks: int = 4
    window: int = 0
    pre_rope: bool = True
    levels: LevelKind = "lloyd_max"
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_list(self.bits):
            raise ConfigError(f"bits are several widths from 0 to 8, such as (0, 2, 4, 8), not {self.bits!r}.")
        object.__setattr__(self, "bits", tuple(sorted(set(self.bits))))
        if (self.ratio is None) == (self.budget_bytes is None):
            raise ConfigError("Give exactly one of ratio (e.g. ratio=3) and budget_bytes.")
        if self.ratio is not None and not (is_number(self.ratio) and self.ratio > 1):
            raise ConfigError(f"ratio must be above 1 (bf16 bytes over compressed bytes), not {self.ratio!r}.")
        if self.budget_bytes is not None and not is_count(self.budget_bytes):
            raise ConfigError(f"budget_bytes must be a positive integer, not {self.budget_bytes!r}.")
        if not self.bits or any(not is_count(bits, least=0) or bits > 8 for bits in self.bits):
            raise ConfigError(f"bits are widths from 0 to 8, not {self.bits!r}.")
        if not is_count(self.layer_group):
            raise ConfigError(f"layer_group is a number of layers ≥ 1, not {self.layer_group!r}.")
        if not (is_count(self.sinks, least=0) and is_count(self.window, least=0)):
            raise ConfigError(f"sinks and window are token counts ≥ 0, not {self.sinks!r} and {self.window!r}.")
        if not is_flag(self.pre_rope) or not is_count(self.seed, least=0):
            raise ConfigError(f"pre_rope is true or false, seed an integer ≥ 0, not {self.pre_rope!r}, {self.seed!r}.")
        if self.levels not in LEVEL_KINDS:
            raise ConfigError(f"levels is one of {', '.join(LEVEL_KINDS)}, not {self.levels!r}.")


# ---- what a cell can choose from -----------------------------------------------------------------------------------


def token_rank_grid(most: int) -> list[int]:
    """Token ranks to try: every one up to 32, then steps of about 4 %, up to ``most``."""
    ranks = list(range(min(most, 32) + 1))
    while ranks[-1] < most:
        ranks.append(min(most, ranks[-1] + max(1, ranks[-1] // 24)))
    return ranks


def feature_rank_grid(features: int) -> list[int]:
    """Feature ranks to try: untruncated, and multiples of an eighth below."""
    return sorted({features} | {max(1, features * eighths // 8) for eighths in range(1, 8)})


@dataclass(frozen=True)
class CellChoices:
    """All plans of one cell with what each costs and loses. The three sequences run in parallel."""

    plans: list[CellPlan]
    costs: IntArray
    errors: FloatArray


def choices_of(spectra: Hosvd, shape: tuple[int, int, int], config: JoltConfig) -> CellChoices:
    """Enumerate ranks and bits for a cell of ``shape`` (slabs, tokens, features).

    The relative squared error of a choice is ``ε²(b) · τ(r_T, r_d)``: the tail that the truncation leaves, times what
    the residual codec loses of it.
    """
    slabs, tokens, features = shape
    tail = spectra.tail().cpu().numpy()
    loss = {bits: distortion(bits, features, config.levels) for bits in config.bits}
    plans, errors = [], []
    for token_rank in token_rank_grid(tail.shape[0] - 1):
        for feature_rank in feature_rank_grid(features) if token_rank else [features]:
            for bits in config.bits:
                if not token_rank and not bits:
                    continue  # a cell is never dropped altogether
                plans.append(CellPlan(token_rank, feature_rank, bits))
                errors.append(loss[bits] * tail[token_rank, feature_rank])
    costs = [cell_bytes(plan, slabs, tokens, features) for plan in plans]
    return CellChoices(plans, np.array(costs, dtype=np.int64), np.array(errors))


# ---- the cache -------------------------------------------------------------------------------------------------------


class JoltCache(CompressedCache):
    """A KV cache that compresses its prefill by JoLT; pass it as ``past_key_values`` to ``model.generate()``.

    ``JoltCache(model, ratio=3)`` or ``JoltCache(model, JoltConfig(...))``. Constructing it changes nothing on the
    model. Each row of the batch is planned on its own, so its result does not depend on its neighbours. Sliding-window
    layers stay exact and outside the ratio.

    Args:
        model: a transformers model of a supported family; only its configuration and rotary frequencies are read.
        config: settings; keyword arguments build one.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches: padding is then not stored.

    Raises:
        ConfigError: a setting is out of range or unknown.
        UnsupportedModelError: no row for this model, or its rotary frequencies change with length (use
            ``pre_rope=False`` then).
        BudgetError: on compression, when the budget is below the least cost. A short row for which a ``ratio`` leaves
            next to nothing beside its exact tokens stays exact instead, with a warning and a note in the report.
        NonFiniteError: on compression, when a layer holds NaN or Inf.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: JoltConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> None:
        if config is None:
            config = JoltConfig.from_dict(settings)
        elif settings:
            raise ConfigError("Give either a JoltConfig or keyword settings, not both.")
        super().__init__(
            *compressible_layers(model),
            sinks=config.sinks,
            window=config.window,
            rope=rope_of(model) if config.pre_rope else None,
            attention_mask=attention_mask,
        )
        self.config = config

    def _why_exact(self, tokens: int) -> str | None:
        """Also a short prompt whose exact tokens would take more than half of what its ratio allows.

        The few bytes left would not hold the rest. A longer prompt raises ``BudgetError`` instead, and a byte budget is
        always taken at its word.
        """
        if why := super()._why_exact(tokens):
            return why
        if self.config.ratio is None or tokens >= _SHORT or 2 * self._fixed_bytes(tokens) <= self._allowed(tokens):
            return None
        why = (
            f"{tokens} tokens are too few for a ratio of {self.config.ratio:g}: sinks, window and header would take "
            "more than half of its bytes"
        )
        warnings.warn(f"JoltCache: {why}; the prompt stays exact.", stacklevel=5)
        return why

    def _allowed(self, tokens: int) -> int:
        """Bytes that the ratio allows for ``tokens`` tokens."""
        return int(self.shape.dense_bytes(tokens) / (self.config.ratio or 1))

    def _fixed_bytes(self, tokens: int) -> int:
        """Bytes of a row's sinks, window and header."""
        exact = min(tokens, self.n_sinks + self.n_window)
        item_bytes = self.compressible[0].keys.element_size()
        return self.shape.dense_bytes(exact) * item_bytes // 2 + header_bytes(2 * len(self._groups()))

    def _encode(self, middles: list[Middle]) -> list[list[tuple[Cell, Block, str]]]:
        """Plan every row before any is encoded, so that a budget that cannot be met fails early."""
        tokens = [middle.row_tokens for middle in middles]
        planned = [self._plan(m, self._budget(m, sum(tokens))) if m.tokens else [] for m in middles]
        return [[self._encode_cell(*cell) for cell in row] for row in planned]

    def _budget(self, middle: Middle, all_tokens: int) -> int:
        """Bytes for the cells of one row: the user's budget less exact sinks and window, and the header."""
        tokens = middle.row_tokens
        if self.config.budget_bytes is not None:
            total = self.config.budget_bytes * tokens // all_tokens
        else:
            total = self._allowed(tokens)
        fixed = self._fixed_bytes(tokens)
        if fixed > total:
            raise BudgetError(
                f"Row {middle.row} has {tokens} tokens and a budget of {total} bytes, but its {tokens - middle.tokens} "
                f"exact tokens (sinks and window) and the header alone take {fixed} bytes. Give it more than that: "
                "lower the ratio, the sinks or the window."
            )
        return total - fixed

    def _groups(self) -> list[tuple[int, ...]]:
        size, layers = self.config.layer_group, self.shape.layers
        return [tuple(range(first, min(first + size, layers))) for first in range(0, layers, size)]

    def _plan(self, middle: Middle, budget: int) -> list[tuple[Cell, CellPlan, Hosvd]]:
        """First pass over a row: the spectra of every cell, then one allocation over all of them."""
        cells, spectra, choices = [], [], []
        for layers in self._groups():
            for kind in range(2):
                cells.append(Cell(middle, layers, kind))
                x = self._cell_tensor(cells[-1])
                found = hosvd(x)
                choices.append(choices_of(found, (x.shape[0], x.shape[1], x.shape[2]), self.config))
                keep = x.shape[0] * x.shape[2] <= _KEEP_VECTORS_BELOW
                spectra.append(found if keep else dataclasses.replace(found, token_vectors=None))
        result = allocate([c.costs for c in choices], [c.errors for c in choices], budget)
        plans = [choice.plans[index] for choice, index in zip(choices, result.choices, strict=True)]
        return list(zip(cells, plans, spectra, strict=True))

    def _encode_cell(self, cell: Cell, plan: CellPlan, spectra: Hosvd) -> tuple[Cell, Block, str]:
        """Second pass: carry the plan out."""
        block = encode_cell(
            self._cell_tensor(cell),
            plan,
            kv_heads=self.shape.kv_heads,
            levels=self.config.levels,
            seed=self.config.seed,
            spectra=spectra,
        )
        words = f"ranks {plan.token_rank} x {plan.feature_rank}, residual {plan.bits} bit"
        return cell, block, words
