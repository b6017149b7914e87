"""Palu's work on the weights: the factors of every layer, and the attention modules that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from kvslim.attending.families import attention_modules, family_of
from kvslim.attending.latent_attention import LatentAttention, LayerPlace
from kvslim.attending.latent_forms import Forms, choose_forms
from kvslim.attending.latent_model import layer_places, layer_size_of
from kvslim.attending.projections import Part, Projections, projections_of
from kvslim.decomposing.whitened import Decomposition, loss_aware_svd, plain_svd, whitened_svd
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
    projections, places = projections_of(model), layer_places(model, codes_of(config, chosen))
    step, built = stage(progress, "decomposition"), []
    for layer, (original, parts) in enumerate(zip(attention_modules(model), projections, strict=True)):
        ranks, forms = (chosen.key_ranks[layer], chosen.value_ranks[layer]), forms_of(model, config, chosen, layer)
        built.append(build_attention(original, places[layer], parts, ranks, forms, metrics[layer], config))
        if step is not None:
            step(layer + 1, len(projections))
    return built


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
    exponent = 0.25 if config.hadamard else 0.5  # of 0, ¼ and ½ none measured better, at 2 and 3 bits
    factors = [part.balanced(rank, exponent) for part, rank in parts]
    return [rotated_factors(one) for one in factors] if config.hadamard else factors


def _decompose(weight: Tensor, gram: Tensor | None, output_gram: Tensor | None) -> Decomposition:
    """By as much of the metric as there is: none is plain SVD."""
    if gram is None:
        return plain_svd(weight)
    return whitened_svd(weight, gram) if output_gram is None else loss_aware_svd(weight, gram, output_gram)


def stage(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """``progress`` for one stage."""
    return None if progress is None else lambda done, total: progress(name, done, total)
