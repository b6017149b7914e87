"""What a whole model gains when its attention keeps latents: ``generate`` starts from a latent cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kvslim.attending import compat
from kvslim.attending.families import (
    attention_modules,
    decoder_layers,
    family_of,
    kv_shape_of,
    rope_layers_of,
    rotary_of,
    sliding_window_of,
)
from kvslim.attending.latent_attention import LatentAttention, LayerPlace
from kvslim.attending.latent_forms import LayerSize
from kvslim.attending.projections import projections_of
from kvslim.caching.latent import LatentCache, LatentLayout, layout_of
from kvslim.caching.latent_codes import LatentCodes
from kvslim.errors import CacheStateError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DYNAMIC = (None, "dynamic", "offloaded")
"""The ``cache_implementation`` settings that mean a growing cache, which a latent cache is."""


class LatentModelMixin:
    """Put in front of the original class of one model instance; no other model is touched."""

    palu_layout: LatentLayout
    palu: Any  # what was done, as the method reports it

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        name = compat.cache_keyword(self)
        if model_kwargs.get(name) is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, *args, **kwargs
            )
        implementation = generation_config.cache_implementation
        if implementation not in _DYNAMIC:
            raise CacheStateError(
                f"cache_implementation={implementation!r} stores uncompressed keys and values; a Palu-compressed model "
                f"keeps latents. Leave cache_implementation unset."
            )
        cache = LatentCache(self.palu_layout, offloading=implementation == "offloaded")
        if getattr(generation_config, "is_assistant", False):
            cache.activate_past_recording()
        model_kwargs[name] = cache
        return None

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: the files would load as an uncompressed model with random key and value projections."""
        raise UnsupportedModelError(
            "A Palu-compressed model cannot be saved as its original architecture. Use kvslim.palu.save(model, "
            "directory) and kvslim.palu.load(directory)."
        )


_CLASSES: dict[type, type] = {}


@dataclass(frozen=True)
class Snapshot:
    """The parts of a model that compression replaces; see :func:`snapshot`."""

    model_class: type
    attentions: tuple[nn.Module, ...]


def latent_layout(model: PreTrainedModel, codes: LatentCodes | None = None) -> LatentLayout:
    """What a latent cache must know of ``model``."""
    rotary = family_of(model).rotary is not None
    return layout_of(kv_shape_of(model), sliding_window_of(model), codes, rotary=rotary)


def layer_places(model: PreTrainedModel, codes: LatentCodes | None = None) -> list[LayerPlace]:
    """What each layer's latent attention takes from ``model``, whose latents are coded as told.

    Raises:
        UnsupportedModelError: the family is unknown, or frequencies change with the sequence length.
    """
    family, rotary, layout = family_of(model), rotary_of(model, all_layers=True), latent_layout(model, codes)
    return [LayerPlace(family, model.config, rotary, layers, layout) for layers in rope_layers_of(model)]


def layer_size_of(model: PreTrainedModel) -> LayerSize:
    """What the parameters of one attention layer of ``model`` depend on."""
    shape, config = kv_shape_of(model), model.config
    return LayerSize(int(config.hidden_size), int(config.num_attention_heads), shape.kv_heads, shape.head_dim)


def install(model: PreTrainedModel, attentions: Sequence[LatentAttention]) -> None:
    """Put one latent attention into each decoder layer and make ``generate`` use latent caches, **in place**."""
    layout = attentions[0].layout
    _replace(model, attentions)
    model.__class__ = _latent_class(type(model))
    model.palu_layout = layout


def snapshot(model: PreTrainedModel) -> Snapshot:
    """Remember the uncompressed parts of ``model`` by reference, for :func:`restore`. Their memory stays in use.

    Raises:
        UnsupportedModelError: the model is compressed already or of no supported family.
    """
    projections_of(model)
    return Snapshot(model_class=type(model), attentions=tuple(attention_modules(model)))


def restore(model: PreTrainedModel, saved: Snapshot) -> PreTrainedModel:
    """Undo a compression **in place** and return the model. Caches filled meanwhile belong to the compressed one."""
    _replace(model, saved.attentions)
    model.__class__ = saved.model_class
    for name in ("palu", "palu_layout"):
        vars(model).pop(name, None)
    return model


def _replace(model: PreTrainedModel, attentions: Sequence[nn.Module]) -> None:
    name = family_of(model).attention
    for layer, attention in zip(decoder_layers(model), attentions, strict=True):
        setattr(layer, name, attention)


def _latent_class(original: type) -> type:
    """The subclass of ``original`` for compressed instances, named after it and made once."""
    if original not in _CLASSES:
        body = {"__module__": original.__module__}
        _CLASSES[original] = type(f"Palu{original.__name__}", (LatentModelMixin, original), body)
    return _CLASSES[original]
