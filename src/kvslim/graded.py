"""Graded latents: rank and bits as one decision, on a basis that was calibrated once with the model.

Read top to bottom: calibration, the cache, its bytes, how widths are chosen, how they are carried out.

    model + text → channels of every layer, what bits buy in each → [stored beside the model]
    prefill → latents = channels → widths by reverse water-filling under one budget → packed codes + a scale per channel

Palu decides ranks for latents from the weights, JoLT ranks and bits from the sequence. Here a channel of zero bits is a
truncated rank, all channels of keys and values of all layers share one budget, and what an error costs is measured on
the model's output (:mod:`kvslim.calibrating.cached_moments`). The plan depends on the calibration, the number of tokens
and the budget alone: nothing is decomposed at prefill, and the layout is the same for every sequence of a length.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvslim.allocating.water_filling import Filling, FloatArray, IntArray, fill
from kvslim.attending.families import rope_of, text_config
from kvslim.attending.layout import compressible_layers
from kvslim.caching.cells import Cell, Coded, gather, take_off
from kvslim.caching.graded_block import GradedBasis, clipping, encode_graded, outlier_bytes
from kvslim.caching.report import CacheReport, stretch_header_bytes
from kvslim.calibrating.corpora import default_mix, origin_of
from kvslim.calibrating.graded_stats import ChannelTable, GradedCalibration, GradedStats, calibrate_graded
from kvslim.calibrating.mixing import windows_of
from kvslim.checkpointing.session import Settings
from kvslim.checkpointing.session_cache import StoredCache
from kvslim.checkpointing.session_graded import width_bytes
from kvslim.errors import BudgetError, ConfigError
from kvslim.graded_config import PRESETS, QUALITY, SPEED, GradedConfig
from kvslim.quantizing.channels import ChannelLayout, layout_of
from kvslim.quantizing.packing import packed_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "PRESETS",
    "QUALITY",
    "SPEED",
    "GradedCache",
    "GradedCalibration",
    "GradedConfig",
    "GradedPlan",
    "GradedStats",
    "calibrate",
]

_WINDOW_LENGTH, _WINDOWS_AT_MOST = 2048, 16
_DRIFTED = 2.0
"""Errors that cost this many times what calibration predicts are reported as drift of the text."""


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any = None,
    texts: Any = None,
    settings: GradedCalibration | None = None,
    *,
    windows: int | None = None,
    at_most: int = _WINDOWS_AT_MOST,
    length: int = _WINDOW_LENGTH,
    prepend_bos: bool | None = None,
    **options: Any,
) -> GradedStats:
    """Calibrate graded latents for ``model``: minutes on a CPU for a small one, once.

    Args:
        model: an uncompressed model; it is left as it was.
        tokenizer: the model's, for texts.
        texts: a text, several, rows, a mapping of names to these (domains in equal parts), or token windows
            ``(windows, length)``; None takes a default mix of domains.
        settings: see :class:`~kvslim.calibrating.graded_stats.GradedCalibration`; keyword ``options`` of it build one.
        windows: how many windows there must be; as many as fit unless given.
        at_most: then at most this many.
        length: tokens per window.
        prepend_bos: start each window with the beginning token; by default as the tokenizer itself does with a text.
        **options: ``progress`` is called with (what, done, in all); ``origin`` describes the text.

    Raises:
        CalibrationError: the texts are unusable or too short for the model's channels.
        UnsupportedModelError, ConfigError, NonFiniteError: as
            :func:`~kvslim.calibrating.graded_stats.calibrate_graded`.
    """
    passed = {name: options.pop(name) for name in ("progress", "origin") if name in options}
    if settings is None:
        settings = GradedCalibration.from_dict(options)
    elif options:
        raise ConfigError("Give either a GradedCalibration or keyword settings, not both.")
    if texts is None:
        mix = default_mix()
        texts, passed["origin"] = {part.name: part.text for part in mix}, passed.get("origin") or origin_of(mix)
    if prepend_bos is None:
        prepend_bos = _begins_with_bos(tokenizer)
    ids = windows_of(tokenizer, texts, length, windows, prepend_bos, at_most)
    return calibrate_graded(model, ids, settings, **passed)


def _begins_with_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts its beginning token before a text."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


class GradedPlan:
    """The widths of all channels for stretches of one length: what :func:`plan_widths` decides.

    Attributes:
        layouts: per layer slot and kind (keys 0, values 1).
        predicted: what the errors of one token cost by calibration, likewise.
        outliers: exact tokens that the plan has set bytes aside for, all layers, keys and values together.
        worth: what an exact token must save to be worth its bytes at the price of all others.
        filling: the allocation.
    """

    def __init__(
        self, layouts: dict[tuple[int, int], ChannelLayout], predicted: dict[tuple[int, int], float],
        outliers: int, worth: float, filling: Filling,
    ) -> None:  # fmt: skip
        self.layouts, self.predicted = layouts, predicted
        self.outliers, self.worth, self.filling = outliers, worth, filling


def plan_widths(
    tables: list[tuple[ChannelTable, ChannelTable]], tokens: int, budget: int, config: GradedConfig
) -> GradedPlan:
    """Share ``budget`` bytes among the channels of all layers, for a stretch of ``tokens`` tokens.

    Args:
        tables: per layer slot those of keys and of values.
        tokens: coded tokens.
        budget: bytes for codes, scales and exact outliers.
        config: widths, run and outliers.

    Raises:
        BudgetError: the outliers alone exceed the budget.
    """
    every = [table for pair in tables for table in pair]
    outliers = math.ceil(config.outliers * tokens * len(every))
    kept_exact = outlier_bytes(outliers, every[0].basis.features)
    if kept_exact > budget:
        raise BudgetError(
            f"{budget} bytes are left for {tokens} tokens, and {outliers} exact outliers take {kept_exact}. "
            "Lower outliers or the ratio, or code more tokens together."
        )
    offers = [_offer(table, tokens, config) for table in every]
    errors, costs = (np.concatenate(parts) for parts in zip(*offers, strict=True))
    filling = fill(errors, costs, 8 * (budget - kept_exact))
    spent = errors[np.arange(len(errors)), filling.choices]
    layouts, predicted, at = {}, {}, 0
    for index, (table, offer) in enumerate(zip(every, offers, strict=True)):
        runs = slice(at, at + len(offer[0]))
        chosen = [config.widths[i] for i in filling.choices[runs]]
        layouts[divmod(index, 2)] = layout_of(chosen, config.run, table.basis.features)
        predicted[divmod(index, 2)] = float(spent[runs].sum())
        at = runs.stop
    worth = filling.price * tokens * 8 * outlier_bytes(1, every[0].basis.features)
    return GradedPlan(layouts, predicted, outliers, worth, filling)


def _offer(table: ChannelTable, tokens: int, config: GradedConfig) -> tuple[FloatArray, IntArray]:
    """Per run and width: what the errors of one token cost, and bits for all tokens with the scales."""
    starts = np.arange(0, table.basis.features, config.run)
    sizes = np.diff(np.append(starts, table.basis.features))
    errors = np.add.reduceat(table.errors[:, config.widths], starts, axis=0)
    bits = [[8 * (packed_bytes(size, w) * tokens + (size if w else 0)) for w in config.widths] for size in sizes]
    return errors, np.array(bits, dtype=np.int64)


class GradedCache(StoredCache):
    """A KV cache of graded latents; pass it as ``past_key_values`` to ``model.generate()``.

    ``GradedCache(model, stats, ratio=4)`` or ``GradedCache(model, stats, GradedConfig(...))``; ``preset="speed"`` with
    keywords takes :data:`~kvslim.graded_config.SPEED`. Constructing it changes nothing on the model. Sliding-window
    layers stay exact and outside the ratio.

    Args:
        model: a transformers model of a supported family.
        stats: of :func:`calibrate`, for this model in this dtype.
        config: settings; keyword arguments build one.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches: padding is then not stored.
        preset: ``quality`` or ``speed``, completed by keyword settings.

    Raises:
        ConfigError: a setting is out of range or unknown.
        UnsupportedModelError: no row for this model, or its rotary frequencies change with length (use
            ``pre_rope=False`` then).
        CacheStateError: the statistics are of another model or dtype.
        BudgetError: on compression, when the budget is below the least cost. A short row for which a ratio leaves
            next to nothing beside its exact tokens stays exact instead, with a warning and a note in the report.
        NonFiniteError: on compression, when a layer holds NaN or Inf.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stats: GradedStats,
        config: GradedConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        preset: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = _settings(config, preset, settings)
        if not isinstance(stats, GradedStats):
            raise ConfigError(f"stats is a GradedStats (kvslim.calibrate, GradedStats.load), not {stats!r:.80}.")
        stats.check_model(model)
        shape, slots = compressible_layers(model)
        config = self.config
        super().__init__(
            shape,
            slots,
            sinks=config.sinks,
            window=config.window,
            seal=config.seal,
            rope=rope_of(model) if config.pre_rope else None,
            attention_mask=attention_mask,
            ratio=config.ratio,
            budget_bytes=config.budget_bytes,
        )
        self.read_by(text_config(model))
        self._model = weakref.ref(model)
        self.stats = stats
        self._tables = list(zip(stats.of("keys" if config.pre_rope else "rotated"), stats.of("values"), strict=True))
        self.bases = bases_of(stats, pre_rope=config.pre_rope, kv_heads=shape.kv_heads)
        self._plans: dict[tuple[int, int], GradedPlan] = {}

    # ---- sessions on disk ----------------------------------------------------------------------------------------

    def session_settings(self) -> Settings:
        """What a session keeps beside the cache; the statistics by their digest."""
        return Settings(self._model(), self.config.to_dict(), method="graded", stats=self.stats.digest)

    # ---- bytes -------------------------------------------------------------------------------------------------

    def _header_bytes(self) -> int:
        """Also the widths of the runs, four bits each."""
        return super()._header_bytes() + self._width_bytes()

    def _width_bytes(self) -> int:
        features = self.shape.kv_heads * self.shape.head_dim
        return 2 * self.shape.layers * width_bytes(features, self.config.run)

    # ---- planning ----------------------------------------------------------------------------------------------

    def _plan(self, cells: list[Cell]) -> dict[Cell, Any]:
        """One plan per row, the same for all rows of a length."""
        rows = {cell.span.row: cell.span for cell in cells}
        all_tokens = sum(span.row_tokens for span in rows.values())
        plans = {
            row: self._plan_of(span.tokens, self._budget(row, span.row_tokens, all_tokens, 0))
            for row, span in rows.items()
        }
        return self._with_outliers(cells, plans)

    def _plan_seal(self, cells: list[Cell]) -> dict[Cell, Any]:
        """Later tokens under the same ratio, in a layout of their own: scales weigh more in a short stretch."""
        spans = {cell.span.row: cell.span for cell in cells}
        plans = {}
        for row, span in spans.items():
            allowed = int(self.shape.dense_bytes(span.tokens) / self._sealed_ratio())
            header = stretch_header_bytes(2 * len(self._groups())) + self._width_bytes()
            if allowed <= header:
                raise BudgetError(
                    f"{span.tokens} later tokens have {allowed} bytes, their description takes {header}. "
                    "Seal more tokens together, or lower the ratio."
                )
            plans[row] = self._plan_of(span.tokens, allowed - header)
        return self._with_outliers(cells, plans)

    def _with_outliers(self, cells: list[Cell], plans: dict[int, GradedPlan]) -> dict[Cell, Any]:
        """Each cell's plan and the tokens to keep exact: those of a row for which clipping costs most."""
        chosen: dict[Cell, Any] = {}
        for row, plan in plans.items():
            own = [cell for cell in cells if cell.span.row == row]
            costs = torch.stack([self._clipping(cell, plan).cpu() for cell in own])
            worst = costs.flatten().topk(min(plan.outliers, costs.numel()))
            exact = torch.zeros(costs.numel(), dtype=torch.bool)
            exact[worst.indices[worst.values > plan.worth]] = True
            for cell, part in zip(own, exact.view(costs.shape), strict=True):
                device = self.compressible[cell.layers[0]].keys.device
                chosen[cell] = (plan, part.nonzero().flatten().to(device))
        return chosen

    def _clipping(self, cell: Cell, plan: GradedPlan) -> Tensor:
        place = (cell.layers[0], cell.kind)
        basis = self.bases[place]
        x = take_off(gather(self.compressible, cell), cell, self.rope)
        return clipping(basis.latents(x), plan.layouts[place], basis.costs(x.device))

    def _plan_of(self, tokens: int, budget: int) -> GradedPlan:
        if (tokens, budget) not in self._plans:
            self._plans[tokens, budget] = plan_widths(self._tables, tokens, budget, self.config)
        return self._plans[tokens, budget]

    # ---- carrying plans out --------------------------------------------------------------------------------------

    def _encode_cell(self, cell: Cell, raw: Tensor, plan: tuple[GradedPlan, Tensor]) -> Coded:
        widths, at = plan
        place = (cell.layers[0], cell.kind)
        x = take_off(raw, cell, self.rope)
        made = encode_graded(x, self.bases[place], widths.layouts[place], at)
        coded_tokens = made.block.tokens - len(made.block.outlier_at)
        energy = torch.linalg.vector_norm(x, dtype=torch.float64) ** 2
        expected = widths.predicted[place] * coded_tokens
        return Coded(cell, made.block, made.block.words, energy, made.lost, made.cost, expected)

    # ---- what the text did to the plan ---------------------------------------------------------------------------

    def drift(self) -> float:
        """What the errors cost over what calibration predicts for these widths; about 1 for text like that."""
        predicted = math.fsum(cell.expected for cell in self.cells)  # the same in any order of the cells
        return math.fsum(cell.cost for cell in self.cells) / predicted if predicted else 1.0

    def report(self) -> CacheReport:
        """As :meth:`CompressedCache.report`; the note says if the text is unlike that of the calibration."""
        report = super().report()
        drift = self.drift()
        if drift <= _DRIFTED:
            return report
        worst = max(self.cells, key=lambda cell: cell.cost - cell.expected)
        words = (
            f"errors cost {drift:.1f} times what the calibration text predicts (most: {worst.kind} of layer "
            f"{worst.layers[0]}, {worst.cost / max(worst.expected, 1e-300):.1f} times): calibrate on text like this"
        )
        return report.with_note(words)


def _settings(config: GradedConfig | None, preset: str | None, settings: dict[str, Any]) -> GradedConfig:
    if config is not None:
        if settings or preset is not None:
            raise ConfigError("Give either a GradedConfig or a preset and keyword settings, not both.")
        return config
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"preset is one of {', '.join(PRESETS)}, not {preset!r}.")
    return GradedConfig.from_dict({**(PRESETS[preset] if preset else {}), **settings})


_BASES: weakref.WeakKeyDictionary[GradedStats, dict[bool, dict[tuple[int, int], GradedBasis]]] = (
    weakref.WeakKeyDictionary()
)


def bases_of(stats: GradedStats, *, pre_rope: bool, kv_heads: int) -> dict[tuple[int, int], GradedBasis]:
    """The channels of every layer slot and kind, made once per statistics and shared by all its caches.

    Raises:
        ConfigError: ``pre_rope``, and the statistics have no un-rotated keys.
    """
    made = _BASES.setdefault(stats, {})
    if pre_rope not in made:
        keys, values = stats.of("keys" if pre_rope else "rotated"), stats.of("values")
        if not keys:
            raise ConfigError(
                "These statistics have no un-rotated keys, as the model's rotation changes with length. "
                "Use pre_rope=False or preset='speed'."
            )
        made[pre_rope] = {
            (slot, kind): GradedBasis(table.basis, kv_heads)
            for slot, pair in enumerate(zip(keys, values, strict=True))
            for kind, table in enumerate(pair)
        }
    return made[pre_rope]
