"""JoLT: compress a filled KV cache by partial Tucker factors and a rotated low-bit residual, under one byte budget.

Read top to bottom: the cache, its bytes, how a prefill is planned, at once or as it arrives, how later tokens are, how
plans are carried out. Settings are in :mod:`kvslim.jolt_config`, what a cell can choose from is in
:mod:`kvslim.caching.tucker_choices`.

    prefill → cells (layer group × K/V) → spectra → one Lagrangian over ranks and bits → factors + packed residual

Source: Krishnan and Schulz, "A JoLT for the KV Cache" (2026): partial Tucker, JL residual, joint allocation. Terms: a
*cell* is the tensor ``(layers · kv_heads, tokens, head_dim)`` of one layer group's keys or values.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.allocating.lagrangian import Allocation, allocate, allocate_at
from kvslim.allocating.strategies import STRATEGIES
from kvslim.attending.families import rope_of, text_config
from kvslim.attending.layout import compressible_layers
from kvslim.caching.block import ExactBlock
from kvslim.caching.cells import Cell, Coded, gather, take_off
from kvslim.caching.offers import Offer, Planned, by_row, least_of
from kvslim.caching.prefix import CodedStretch
from kvslim.caching.report import stretch_header_bytes
from kvslim.caching.tucker_choices import CellChoices, CellShape, inherited_choices, own_choices
from kvslim.caching.tucker_residual import (
    COPY_BITS,
    TuckerResidual,
    directions,
    encode_cell,
    encode_on,
    projected_tail,
)
from kvslim.checkpointing.session import Settings
from kvslim.checkpointing.session_cache import StoredCache
from kvslim.decomposing.flash import flash_cap, spectra_of_many
from kvslim.decomposing.hosvd import Hosvd, hosvd
from kvslim.decomposing.tucker import leading_slabs
from kvslim.errors import BudgetError, ConfigError
from kvslim.jolt_config import OUR_BITS, PAPER, PAPER_BITS, JoltConfig, Price

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["OUR_BITS", "PAPER", "PAPER_BITS", "JoltCache", "JoltConfig", "Price"]

_KEEP_VECTORS_BELOW = 1024  # slabs × features up to which exact singular vectors wait for the second pass
_ALL_BELOW = 512  # slabs × features up to which all directions are looked for
_STEERED = 0.75  # share of the layer groups that follow the price when they arrive one by one; the rest repair
_LEEWAY = 1.3  # a group that arrives may take so many times its expected share


class JoltCache(StoredCache):
    """A KV cache that compresses its prefill by JoLT; pass it as ``past_key_values`` to ``model.generate()``.

    ``JoltCache(model, ratio=3)`` or ``JoltCache(model, JoltConfig(...))``. Constructing it changes nothing on the
    model. Each row of the batch is planned on its own, so its result does not depend on its neighbours. Sliding-window
    layers stay exact and outside the ratio. Tokens that come later are exact until ``seal`` of them are there.

    Args:
        model: a transformers model of a supported family; only its configuration and rotary frequencies are read.
        config: settings; keyword arguments build one.
        attention_mask: ``(batch, columns)`` of the prompt for padded batches: padding is then not stored.
        price: :attr:`price` of an earlier cache of this model and ratio. Each layer group of a prefill in one piece is
            then compressed as it arrives, so that the dense cache of all layers is never in memory; the last quarter
            of the groups makes the budget come out. Without it the whole prefill is planned at once.

    Raises:
        ConfigError: a setting is out of range or unknown.
        UnsupportedModelError: no row for this model, or its rotary frequencies change with length (use
            ``pre_rope=False`` then).
        BudgetError: on compression, when the budget is below the least cost. A short row for which a ratio leaves
            next to nothing beside its exact tokens stays exact instead, with a warning and a note in the report.
        NonFiniteError: on compression, when a layer holds NaN or Inf.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: JoltConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        price: Price | None = None,
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
            seal=config.seal,
            rope=rope_of(model) if config.pre_rope else None,
            attention_mask=attention_mask,
            ratio=config.ratio,
            budget_bytes=config.budget_bytes,
        )
        self.read_by(text_config(model))
        self.config = config
        self._model = weakref.ref(model)  # what a session belongs to; a cache does not keep its model alive
        self.price = price
        """What this cache's last planning says about the next prompt; see the argument."""
        self._arrives_at = price
        self._left: dict[int, int] = {}  # bytes that arriving groups have left, per row
        groups = len(self._groups())
        if config.weights is not None and len(config.weights) != 2 * groups:
            raise ConfigError(f"weights has {len(config.weights)} entries; {groups} layer groups need {2 * groups}.")
        if price is not None and len(price.shares) != groups:
            raise ConfigError(f"price is for {len(price.shares)} layer groups, this cache has {groups}.")

    def _groups(self) -> list[tuple[int, ...]]:
        size, layers = self.config.layer_group, self.shape.layers
        return [tuple(range(first, min(first + size, layers))) for first in range(0, layers, size)]

    # ---- sessions on disk ----------------------------------------------------------------------------------------

    def session_settings(self) -> Settings:
        """What a session keeps beside the cache."""
        price = (self.price.per_share, *self.price.shares) if self.price is not None else ()
        return Settings(self._model(), self.config.to_dict(), price)

    # ---- planning a prefill --------------------------------------------------------------------------------------

    def _plan(self, cells: list[Cell]) -> dict[Cell, Any]:
        """Two passes, the first over everything: spectra of every cell, then one allocation per row."""
        rows = by_row(self._offers(cells))
        all_tokens = sum(row[0].cell.span.row_tokens for row in rows)
        planned: dict[Cell, Any] = {}
        for row in rows:
            budget = self._row_budget(row, all_tokens)
            result = self._allocate(row, budget)
            planned |= {offer.cell: offer.planned(c) for offer, c in zip(row, result.choices, strict=True)}
            self.price = self._price_of(row, result, budget)
        return planned

    def _offers(self, cells: Sequence[Cell]) -> list[Offer]:
        """The spectra of cells of the prefill, and their choices. Cells of one shape are decomposed together."""
        by_shape: dict[tuple[int, int], list[Cell]] = {}
        for cell in cells:
            by_shape.setdefault((len(cell.layers), cell.span.tokens), []).append(cell)
        offers = {offer.cell: offer for alike in by_shape.values() for offer in self._offers_alike(alike)}
        return [offers[cell] for cell in cells]

    def _offers_alike(self, cells: Sequence[Cell]) -> list[Offer]:
        span, config = cells[0].span, self.config
        slabs = len(cells[0].layers) * self.shape.kv_heads
        shape = self._shape_of(slabs, span.tokens)
        found: list[tuple[Hosvd | None, Tensor | None]] = [(None, None)] * len(cells)
        if shape.core_slabs < slabs:
            found = [self._slab_spectra(self._input(cell), shape.core_slabs) for cell in cells]
        elif config.backbone:
            cap = self._cap(slabs, span.tokens)
            inputs = (self._input(cell) for cell in cells)
            found = [(one, None) for one in spectra_of_many(inputs, config.spectra, cap=cap, seed=config.seed)]
        tables = own_choices([spectra for spectra, _ in found], shape, config.bits, config.levels)
        large = config.spectra == "exact" and slabs * self.shape.head_dim > _KEEP_VECTORS_BELOW
        offers = []
        for cell, (spectra, slab), choices in zip(cells, found, tables, strict=True):
            kept = spectra.without_vectors() if spectra is not None and large else spectra
            offers.append(Offer(cell, choices.weighted(self._weight(cell)), kept, slab))
        return offers

    def _input(self, cell: Cell) -> Tensor:
        """A cell as its spectra are taken, and as it is coded."""
        return self._taken_off(gather(self.compressible, cell), cell)

    def _taken_off(self, raw: Tensor, cell: Cell) -> Tensor:
        return take_off(raw, cell, self.rope, fits_half=self._fits_half)

    def _cap(self, slabs: int, tokens: int) -> int | None:
        """Token directions to look for: all where that is cheap, or as many as FlashJoLT does."""
        if self.config.spectra == "exact" or slabs * self.shape.head_dim <= _ALL_BELOW:
            return min(tokens, slabs * self.shape.head_dim)
        return flash_cap(tokens, self.config.ratio or 4.0)

    def _slab_spectra(self, x: Tensor, count: int) -> tuple[Hosvd, Tensor]:
        """Exact spectra after the mode of heads and layers is truncated to ``count``, and that mode's basis."""
        x = x.to(torch.float32)
        slab = leading_slabs(x, count)
        spectra = hosvd(torch.einsum("mtd,mk->ktd", x, slab))
        return dataclasses.replace(spectra, energy=float(x.double().square().sum())), slab

    def _shape_of(self, slabs: int, tokens: int) -> CellShape:
        core_slabs = max(1, int(slabs * self.config.slab_share))
        return CellShape(slabs, tokens, self.shape.head_dim, core_slabs, self._item_bytes)

    def _weight(self, cell: Cell) -> float:
        weight = self.config.key_weight if cell.kind == 0 else 1.0
        if self.config.weights is None:
            return weight
        return weight * self.config.weights[2 * (cell.layers[0] // self.config.layer_group) + cell.kind]

    def _row_budget(self, row: Sequence[Offer], all_tokens: int) -> int:
        span = row[0].cell.span
        return self._budget(span.row, span.row_tokens, all_tokens, least_of(row))

    def _allocate(self, row: Sequence[Offer], budget: int) -> Allocation:
        """Share ``budget`` bytes among the cells of one row."""
        share = STRATEGIES[self.config.allocation]
        if self.config.split is None:
            return share([o.choices.costs for o in row], [o.choices.errors for o in row], budget)
        chosen: dict[Cell, int] = {}
        parts = []
        for kind, part in enumerate((self.config.split, 1 - self.config.split)):
            of_kind = [offer for offer in row if offer.cell.kind == kind]
            costs, errors = [o.choices.costs for o in of_kind], [o.choices.errors for o in of_kind]
            parts.append(share(costs, errors, int(part * budget)))
            chosen |= {o.cell: c for o, c in zip(of_kind, parts[-1].choices, strict=True)}
        choices = tuple(chosen[offer.cell] for offer in row)
        return Allocation(choices, sum(p.cost for p in parts), sum(p.error for p in parts), max(p.price for p in parts))

    def _price_of(self, row: Sequence[Offer], result: Allocation, budget: int) -> Price:
        spent = dict.fromkeys(self._groups(), 1.0)  # a share is never zero
        for offer, choice in zip(row, result.choices, strict=True):
            spent[offer.cell.layers] += float(offer.choices.costs[choice])
        total = sum(spent.values())
        return Price(result.price * budget, tuple(cost / total for cost in spent.values()))

    # ---- planning layers as they arrive --------------------------------------------------------------------------

    def _compresses_on_arrival(self) -> bool:
        return self._arrives_at is not None

    def _plan_arrived(self, cells: list[Cell], group: int) -> dict[Cell, Any]:
        """One layer group: at the known price at first, then so that the row's budget comes out."""
        assert self._arrives_at is not None  # or nothing would arrive
        shares = self._arrives_at.shares
        rows = by_row(self._offers(cells))
        all_tokens = sum(row[0].cell.span.row_tokens for row in rows)
        planned: dict[Cell, Any] = {}
        for row in rows:
            index = row[0].cell.span.row
            if group == 0:
                self._left[index] = self._row_budget(row, all_tokens)
            left = self._left[index]
            fair = int(left * shares[group] / sum(shares[group:]))
            result = self._steer(row, fair, left / sum(shares[group:]), steered=group < _STEERED * len(shares))
            self._left[index] = left - result.cost
            planned |= {offer.cell: offer.planned(c) for offer, c in zip(row, result.choices, strict=True)}
        return planned

    def _steer(self, row: Sequence[Offer], fair: int, budget: float, *, steered: bool) -> Allocation:
        """Spend ``fair`` bytes, or in ``steered`` groups what the price says, up to some leeway."""
        costs, errors = [o.choices.costs for o in row], [o.choices.errors for o in row]
        if steered and self._arrives_at is not None:
            result = allocate_at(costs, errors, self._arrives_at.per_share / budget)
            if fair / _LEEWAY <= result.cost <= fair * _LEEWAY:
                return result
        return allocate(costs, errors, max(fair, least_of(row)))

    # ---- planning later tokens -----------------------------------------------------------------------------------

    def _plan_seal(self, cells: list[Cell]) -> dict[Cell, Any]:
        """Later tokens under the same ratio: on the basis that is there, on a new one if it has drifted, or on none."""
        planned: dict[Cell, Any] = {}
        for row in by_row([self._offer_sealed(cell) for cell in cells]):
            tokens = row[0].cell.span.tokens
            allowed = int(self.shape.dense_bytes(tokens) / self._sealed_ratio())
            budget = allowed - stretch_header_bytes(2 * len(self._groups()))
            if budget < (least := least_of(row)):
                raise BudgetError(
                    f"{tokens} later tokens have {allowed} bytes; {allowed - budget + least} are the least. "
                    "Seal more tokens together, or lower the ratio."
                )
            result = allocate([o.choices.costs for o in row], [o.choices.errors for o in row], budget)
            planned |= {offer.cell: offer.planned(c) for offer, c in zip(row, result.choices, strict=True)}
        return planned

    def _offer_sealed(self, cell: Cell) -> Offer:
        x = self._input(cell)
        shape = dataclasses.replace(self._shape_of(x.shape[0], x.shape[1]), core_slabs=x.shape[0])
        bits, levels = self.config.bits, self.config.levels
        basis = self._basis_for(cell)
        spectra: Hosvd | None = None
        inherited: CellChoices | None = None
        if basis is not None and basis.factors is not None:
            tail = projected_tail(x, basis.factors)
            inherited = inherited_choices(tail, basis.factors.core.shape[2], shape, bits, levels)
            drifted = float(tail[-1]) > self.config.drift * basis.missed
        if self.config.backbone and (inherited is None or drifted):
            cap = self._cap(x.shape[0], x.shape[1])
            start = None if basis is None or basis.factors is None else directions(basis.factors)
            (spectra,) = spectra_of_many([x], self.config.spectra, cap=cap, starts=[start], seed=self.config.seed)
        (choices,) = own_choices([spectra], shape, bits, levels)
        choices = (choices if inherited is None else choices + inherited).weighted(self._weight(cell))
        return Offer(cell, choices, spectra, None, basis)

    def _basis_for(self, cell: Cell) -> TuckerResidual | None:
        """The newest block of the row that owns a basis for this cell."""
        assert self.prefix is not None  # only then are there later tokens
        for stretch in reversed(self.prefix.rows[cell.span.row].stretches):
            if isinstance(stretch, CodedStretch):
                block = (stretch.keys, stretch.values)[cell.kind][cell.layers[0]].block
                if isinstance(block, TuckerResidual) and block.factors is not None and not block.inherited:
                    return block
        return None

    # ---- carrying plans out --------------------------------------------------------------------------------------

    def _encode_cell(self, cell: Cell, raw: Tensor, plan: Planned) -> Coded:
        words = str(plan.plan)
        if plan.plan.bits == COPY_BITS:
            energy = torch.linalg.vector_norm(raw, dtype=torch.float64) ** 2
            return Coded(cell, ExactBlock(raw.clone(), self.shape.kv_heads), words, energy, 0.0)
        x = self._taken_off(raw, cell)
        how: dict[str, Any] = {
            "kv_heads": self.shape.kv_heads, "levels": self.config.levels, "seed": self.config.seed,
        }  # fmt: skip
        if plan.basis is not None and plan.basis.factors is not None:
            made = encode_on(x, plan.basis.factors, plan.plan, plan.missed, **how)
        else:
            made = encode_cell(x, plan.plan, spectra=plan.spectra, slab=plan.slab, missed=plan.missed, **how)
        energy = torch.linalg.vector_norm(x, dtype=torch.float64) ** 2 if plan.spectra is None else plan.spectra.energy
        return Coded(cell, made.block, words, energy, made.lost)
