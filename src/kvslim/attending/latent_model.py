"""What a whole model gains when its attention keeps latents: ``generate`` starts from a latent cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kvslim.attending import compat
from kvslim.attending.families import (
    FAMILIES,
    attention_modules,
    decoder_layers,
    family_of,
    kv_shape_of,
    rope_layers_of,
    rotary_of,
    sliding_window_of,
)
from kvslim.attending.latent_attention import LatentAttention, LayerPlace
from kvslim.attending.latent_config import latent_config_class, report_of, structure_of
from kvslim.attending.latent_forms import LayerSize
from kvslim.attending.projections import layer_projections, projections_of
from kvslim.attending.tensor_parallel import latent_plan
from kvslim.caching.latent import LatentCache, LatentLayout, layout_of
from kvslim.caching.latent_codes import LatentCodes
from kvslim.caching.latent_graded import GradedLatentCodes
from kvslim.errors import CacheStateError, CheckpointError, ConfigError, UnsupportedModelError
from kvslim.palu_config import PaluReport, codes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Codes = LatentCodes | GradedLatentCodes | None

_DYNAMIC = (None, "dynamic", "offloaded")
"""The ``cache_implementation`` settings that mean a growing cache, which a latent cache is."""


class LatentModelMixin:
    """Put in front of the original class of one model instance; no other model is touched.

    Compressing changes the class of a model that is there. Only loading makes one from a configuration: the original
    architecture, on the meta device, with attention modules of the stored ranks.
    """

    palu: PaluReport

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]  # of the original class
        model: Any = self
        if not next(model.parameters()).is_meta:
            raise UnsupportedModelError(
                "A compressed model is not made from its configuration alone: its weights would be random. Use "
                "from_pretrained, or kvslim.compress."
            )
        self.palu = report_of(config)
        attentions = _empty_attentions(model)
        _replace(model, attentions)
        self._tp_plan = latent_plan(model, attentions)

    @property
    def palu_layout(self) -> LatentLayout:
        """What a cache for this model must know of it; under tensor parallelism, of this process's part."""
        model: Any = self
        layout: LatentLayout = attention_modules(model)[0].layout  # type: ignore[assignment]
        return layout

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

    def save_pretrained(
        self,
        save_directory: Any,
        *,
        quality: dict[str, Any] | None = None,
        max_shard_size: int | str = "5GB",
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Write the compressed model to a new directory, all or nothing; see :func:`kvslim.palu.save`.

        Args:
            save_directory: must not exist, or be empty.
            quality: what was measured of the model, as JSON values; stored and shown in the model card.
            max_shard_size: of each weight file: bytes, or text such as ``"5GB"``.
            is_main_process: other processes of a distributed run write nothing.
            state_dict: written in place of the model's own.
            **options: those of transformers that make no difference here are accepted.

        Raises:
            ConfigError: the place is taken or cannot be written, or an option is not supported.
            UnsupportedModelError: the model is not the causal language model of its family, weights are of several
                dtypes or not in memory.
        """
        from kvslim.checkpointing.latent_model import save_latent_model

        if unknown := sorted(name for name, value in options.items() if value and name not in _NO_DIFFERENCE):
            raise ConfigError(
                f"save_pretrained of a compressed model has no option {', '.join(unknown)}. Leave it out; "
                f"model.push_to_hub() uploads."
            )
        if is_main_process:
            save_latent_model(self, save_directory, quality=quality, max_shard_size=max_shard_size, tensors=state_dict)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, check_hash: bool = True, **options: Any) -> Any:
        """Load a checkpoint that :meth:`save_pretrained` wrote, as transformers loads any model.

        The files are checked before anything is allocated, and no code from beside them is run.

        Args:
            name: directory or hub id.
            *args: as in transformers.
            check_hash: compare the SHA-256 of all weight files, about a second per 1 to 2 GB. Sizes, names, shapes and
                dtypes are compared in any case.
            **options: as in transformers: ``dtype``, ``device_map``, ``attn_implementation``, ...

        Raises:
            CheckpointError: the checkpoint is truncated, was edited, or is of a newer format.
            ConfigError: an option is not supported for compressed models.
        """
        from kvslim.checkpointing.latent_model import check_checkpoint

        if refused := [option for option in _REFUSED_OPTIONS if options.get(option)]:
            raise ConfigError(f"{', '.join(refused)} cannot be used for a Palu-compressed model. Load it without.")
        check_checkpoint(cls, name, options, check_hash=check_hash)
        options["trust_remote_code"] = False
        wants_info = options.pop("output_loading_info", False)
        loaded: Any = super()
        model, info = loaded.from_pretrained(name, *args, use_safetensors=True, output_loading_info=True, **options)
        if wrong := {kind: found for kind, found in info.items() if found}:
            raise CheckpointError(f"The weights of {name} are not those of the model: {wrong}. Copy it again.")
        return (model, info) if wants_info else model


_NO_DIFFERENCE = ("safe_serialization", "save_peft_format", "save_original_format", "token")
"""Options of transformers' ``save_pretrained`` for choices that a compressed model does not have."""

_REFUSED_OPTIONS = (
    "state_dict", "ignore_mismatched_sizes", "gguf_file", "quantization_config", "key_mapping", "variant",
    "use_kernels", "kernel_config", "fusion_config",
)  # fmt: skip
"""Options of transformers' ``from_pretrained`` that load other weights, or into other modules, than were checked."""

_CLASSES: dict[type, type] = {}


@dataclass(frozen=True)
class Snapshot:
    """The parts of a model that compression replaces; see :func:`snapshot`."""

    model_class: type
    attentions: tuple[nn.Module, ...]


def latent_layout(model: PreTrainedModel, codes: Codes = None) -> LatentLayout:
    """What a latent cache must know of ``model``."""
    rotary = family_of(model).rotary is not None
    return layout_of(kv_shape_of(model), sliding_window_of(model), codes, rotary=rotary)


def layer_places(model: PreTrainedModel, codes: Codes = None) -> list[LayerPlace]:
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
    _replace(model, attentions)
    model.__class__ = latent_class(type(model))


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
    vars(model).pop("palu", None)
    return model


def _replace(model: PreTrainedModel, attentions: Sequence[nn.Module]) -> None:
    name = family_of(model).attention
    for layer, attention in zip(decoder_layers(model), attentions, strict=True):
        setattr(layer, name, attention)


def _empty_attentions(model: PreTrainedModel) -> list[LatentAttention]:
    """The attention modules that the configuration of ``model`` describes, without values."""
    report, structure = report_of(model.config), structure_of(model.config)
    planned = zip(report.plan.key_ranks, report.plan.value_ranks, strict=True)
    if [(layer.key, layer.value) for layer in structure] != list(planned):
        raise CheckpointError(
            "config.json is damaged: its ranks are not those of its report. Copy the checkpoint again."
        )
    places = layer_places(model, codes_of(report.config, report.plan))
    parts = zip(attention_modules(model), places, structure, strict=True)
    return [
        LatentAttention(original, place, layer_projections(model, original), layer.key, layer.value, layer.forms)
        for original, place, layer in parts
    ]


def latent_class(original: type) -> type:
    """The subclass of ``original`` for compressed instances, named after it and made once."""
    if original not in _CLASSES:
        body: dict[str, Any] = {"__module__": __name__}
        model_type = getattr(getattr(original, "config_class", None), "model_type", None)
        if model_type in FAMILIES:
            body["config_class"] = latent_config_class(model_type)
        _CLASSES[original] = type(f"Palu{original.__name__}", (LatentModelMixin, original), body)
    return _CLASSES[original]


def causal_class(model_type: str) -> type:
    """The compressed causal language model of a family, known to ``AutoModelForCausalLM`` afterwards."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_class = latent_class(AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[model_type]])
    AutoModelForCausalLM.register(latent_config_class(model_type), model_class, exist_ok=True)
    return model_class
