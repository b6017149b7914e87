"""Palu's work on the weights: the factors of every layer, and the attention modules that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvslim.attending.families import attention_modules, family_of
from kvslim.attending.latent_attention import LatentAttention, LayerPlace
from kvslim.attending.latent_forms import Forms, choose_forms
from kvslim.attending.latent_model import layer_places, layer_size_of
from kvslim.attending.projections import Part, Projections, projections_of
from kvslim.calibrating.sequential import replace_in_turn
from kvslim.decomposing.whitened import Decomposition, loss_aware_svd, plain_svd, whitened_svd
from kvslim.palu_checks import check_gram
from kvslim.palu_config import PaluConfig, PaluPlan, codes_of
from kvslim.palu_plan import Metric, groups_of
from kvslim.quantizing.folding import rotated_factors
from kvslim.types import LowRankFactors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


def build_attentions(
    model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan, metrics: list[Metric], progress: Progress | None
) -> list[LatentAttention]:
    """The attention modules that will replace the model's own."""
    builder = Builder(model, config, chosen)
    step, built = stage(progress, "decomposition"), []
    for layer, metric in enumerate(metrics):
        built.append(builder.attention(layer, metric))
        if step is not None:
            step(layer + 1, len(metrics))
    return built


def build_in_turn(
    model: PreTrainedModel,
    config: PaluConfig,
    chosen: PaluPlan,
    metrics: list[Metric],
    windows: Tensor,
    progress: Progress | None,
) -> list[LatentAttention]:
    """The same with the Gram matrix of each layer's inputs taken behind the layers that are compressed already."""
    builder = Builder(model, config, chosen)
    built: list[LatentAttention] = []

    def build(layer: int, gram: Tensor) -> LatentAttention:
        check_gram(gram, f"The Gram matrix of layer {layer}'s inputs")
        built.append(builder.attention(layer, (gram, metrics[layer][1])))
        return built[-1]

    replace_in_turn(model, windows, build, progress=stage(progress, "decomposition in turn"))
    return built


class Builder:
    """Makes the latent attention of one layer after the other; needs the model uncompressed only when it is made."""

    def __init__(self, model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan) -> None:
        self.model, self.config, self.chosen = model, config, chosen
        self.projections, self.places = projections_of(model), layer_places(model, codes_of(config, chosen))
        self.forms = [forms_of(model, config, chosen, layer) for layer in range(len(self.projections))]
        self.originals = attention_modules(model)

    def attention(self, layer: int, metric: Metric) -> LatentAttention:
        """The attention that replaces a layer's own, its errors weighed by ``metric``."""
        ranks = (self.chosen.key_ranks[layer], self.chosen.value_ranks[layer])
        places = (self.originals[layer], self.places[layer], self.projections[layer])
        return build_attention(*places, ranks, self.forms[layer], metric, self.config)


def build_attention(
    original: nn.Module,
    place: LayerPlace,
    parts: Projections,
    ranks: tuple[tuple[int, ...], tuple[int, ...]],
    forms: Forms,
    metric: Metric,
    config: PaluConfig,
) -> LatentAttention:
    """The attention module that will replace ``original``; no other layer need be in memory."""
    gram, outputs = metric
    key, value = (
        _factor(part, wanted, gram, output_gram, config)
        for part, wanted, output_gram in zip((parts.key, parts.value), ranks, outputs, strict=True)
    )
    return LatentAttention(original, place, parts, *ranks, forms).fill(parts, key, value)


def forms_of(model: PreTrainedModel, config: PaluConfig, chosen: PaluPlan, layer: int) -> Forms:
    """How the second factors of a layer are used (Palu, Eq. 5 and 6)."""
    family, attention = family_of(model), attention_modules(model)[layer]
    return choose_forms(
        config.fusion,
        layer_size_of(model),
        chosen.key_ranks[layer],
        chosen.value_ranks[layer],
        rotated=family.rotary is not None or family.key_norm is not None,
        clipped=family.clip is not None and bool(getattr(attention, family.clip)),
    )


def _factor(
    part: Part, ranks: tuple[int, ...], gram: Tensor | None, output_gram: Tensor | None, config: PaluConfig
) -> list[LowRankFactors]:
    """Factor each group of a projection's heads to its rank; for coded latents, so that they code well (Sec. 3.4)."""
    groups = zip(groups_of(part, len(ranks), output_gram), ranks, strict=True)
    parts = [(_decompose(weight, gram, metric), rank) for (weight, metric), rank in groups]
    if not config.coded:
        return [part.truncate(rank) for part, rank in parts]
    if config.graded is not None:
        return [part.unit(rank) for part, rank in parts]
    if config.decomposition == "loss-aware":
        factors = [_balanced_by_cost(part, rank, 0.5 if config.hadamard else 0.75) for part, rank in parts]
    else:
        factors = [part.balanced(rank, 0.25 if config.hadamard else 0.5) for part, rank in parts]
    return [rotated_factors(one) for one in factors] if config.hadamard else factors


def _balanced_by_cost(part: Decomposition, rank: int, exponent: float) -> LowRankFactors:
    """:meth:`Decomposition.balanced` of a loss-aware decomposition, whose ``σ`` are in units of cost.

    So are its channels: a unit of error costs the same in each of them, and rows of ``b`` are of norm ``σ^exponent`` in
    the metric of the cost. Set to that in the metric of the outputs, channels that cost much would get coarse steps.
    """
    factors, sigma = part.truncate(rank), part.singular_values[:rank]
    sigma = sigma.clamp_min(1e-6 * float(sigma[0])) if float(sigma[0]) > 0 else torch.ones_like(sigma)
    scale = sigma.pow(-exponent)
    scale = scale * sigma.norm() / (sigma * scale).norm()  # the energy of the latents as a whole stays
    return LowRankFactors(a=factors.a * scale, b=factors.b / scale[:, None])


def _decompose(weight: Tensor, gram: Tensor | None, output_gram: Tensor | None) -> Decomposition:
    """By as much of the metric as there is: none is plain SVD."""
    if gram is None:
        return plain_svd(weight)
    return whitened_svd(weight, gram) if output_gram is None else loss_aware_svd(weight, gram, output_gram)


def stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """``progress`` for one stage."""
    return None if progress is None else lambda done, total: progress(name, done, total)
