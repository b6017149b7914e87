"""The table of supported model families: where the parts of an attention layer are, one frozen row each.

Nothing is copied from the model code and nothing is patched; the rest of kvslim finds its way by these rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kvslim.errors import UnsupportedModelError
from kvslim.types import KVShape, Rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_MOVING_FREQUENCIES = frozenset({"dynamic", "longrope"})
"""Rope types whose frequencies depend on the sequence length, so that a key cannot be rotated again later."""


@dataclass(frozen=True)
class Family:
    """One model family. Paths are attribute names, relative to the module named.

    Attributes:
        model_type: ``config.model_type`` of transformers.
        layers: the list of decoder layers, in the base model.
        rotary: the module with the rotary frequencies, in the base model.
        attention: the attention module, in a decoder layer.
        query, key, value, output: the projections, in the attention module.
        key_norm: keys are normalised per head between the projection and the rotation.
        rope_layers: the layer type whose rotation counts, where the rotary module keeps one per type and names its
            frequencies ``TYPE_inv_freq``: the full-attention layers, the only ones that are compressed. ``None``: all
            layers share one.
        palu: the key and value projections can be factored. A row without it serves run-time methods only.
    """

    model_type: str
    layers: str = "layers"
    rotary: str = "rotary_emb"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    key_norm: bool = False
    rope_layers: str | None = None
    palu: bool = True


FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2", palu=False),
        Family("qwen3", key_norm=True, palu=False),
        Family("gemma3_text", key_norm=True, rope_layers="full_attention", palu=False),
    )
}
"""All rows by ``model_type``. ``llama`` covers SmolLM2, Vicuna and LongChat too."""


def text_config(config_or_model: Any) -> PreTrainedConfig:
    """The configuration of the decoder, from a model or a configuration."""
    config: PreTrainedConfig = getattr(config_or_model, "config", config_or_model).get_text_config(decoder=True)
    return config


def family_of(config_or_model: Any, *, palu: bool = False) -> Family:
    """Return the row of a model or configuration.

    Args:
        config_or_model: a transformers model or its configuration.
        palu: require that the projections can be factored, not only that the cache is understood.

    Raises:
        UnsupportedModelError: there is no such row; the message lists the supported families.
    """
    model_type = getattr(text_config(config_or_model), "model_type", None)
    family = FAMILIES.get(str(model_type))
    if family is None or (palu and not family.palu):
        supported = ", ".join(sorted(name for name, row in FAMILIES.items() if row.palu or not palu))
        what = "Palu does not support" if palu else "kvslim has no family for"
        raise UnsupportedModelError(f"{what} model type {model_type!r}. Supported: {supported}.")
    return family


def base_model_of(model: PreTrainedModel) -> nn.Module:
    """The decoder without its language-model head; a model that is already one is returned itself."""
    base: nn.Module = model.base_model
    return base


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of each decoder layer, in order.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is not built as its row says.
    """
    return [getattr(layer, family_of(model).attention) for layer in decoder_layers(model)]


def kv_projections(model: PreTrainedModel) -> list[tuple[nn.Linear, nn.Linear]]:
    """The key and value projection of each decoder layer, in order.

    Raises:
        UnsupportedModelError: the family is unknown, or the projections are no plain linear layers with float weights
            of their own (already compressed, quantized, adapted or shared).
    """
    family = family_of(model)
    pairs = [
        (getattr(attention, family.key, None), getattr(attention, family.value, None))
        for attention in attention_modules(model)
    ]
    for layer, pair in enumerate(pairs):
        for projection in pair:
            _check_projection(projection, layer)
    if len({id(projection.weight) for pair in pairs for projection in pair if projection}) < 2 * len(pairs):
        raise UnsupportedModelError("Key or value projections share one weight, so they cannot be factored apart.")
    return [(key, value) for key, value in pairs if key is not None and value is not None]


def _check_projection(projection: Any, layer: int) -> None:
    if projection is None:
        raise UnsupportedModelError(
            f"Layer {layer} has no key and value projections. The model is compressed already, or is fused; load the "
            f"original model."
        )
    weight: Any = getattr(projection, "weight", None)
    plain = type(projection) is nn.Linear and weight.is_floating_point() and weight.element_size() >= 2
    if not plain or weight.is_meta:
        raise UnsupportedModelError(
            f"The projections of layer {layer} are {type(projection).__name__} with weights of type "
            f"{getattr(weight, 'dtype', None)}, not plain linear layers in memory with float weights. Load the model "
            f"without quantization (dequantize it) and merge adapters first."
        )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, in order.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is not built as its row says.
    """
    family = family_of(model)
    layers = getattr(base_model_of(model), family.layers, None)
    if layers is None or not all(hasattr(layer, family.attention) for layer in layers):
        raise _unlike_its_row(model, family, "decoder layers are")
    return list(layers)


def _unlike_its_row(model: PreTrainedModel, family: Family, parts: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} says model type {family.model_type!r} but its {parts} not where that family keeps "
        f"them. Pass the plain transformers text model (unwrap adapters and compiled modules first)."
    )


def kv_shape_of(config_or_model: Any) -> KVShape:
    """Layers, KV heads and features per head, from the configuration.

    Raises:
        UnsupportedModelError: the model type has no row.
    """
    family_of(config_or_model)
    config = text_config(config_or_model)
    heads = config.num_attention_heads
    return KVShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def rotary_of(model: PreTrainedModel) -> nn.Module:
    """The model's own rotary embedding module, checked to rotate every position the same way for ever.

    Raises:
        UnsupportedModelError: the family is unknown, the model is not built as its row says, or the frequencies of its
            full-attention layers change with the sequence length.
    """
    family = family_of(model)
    rotary: nn.Module | None = getattr(base_model_of(model), family.rotary, None)
    if rotary is None:
        raise _unlike_its_row(model, family, "rotary embedding is")
    rope_type: Any = getattr(rotary, "rope_type", "default")
    if isinstance(rope_type, dict):
        rope_type = rope_type.get(family.rope_layers)
    if rope_type in _MOVING_FREQUENCIES:
        raise UnsupportedModelError(
            f"The rope type {rope_type!r} changes its frequencies with the sequence length, so a cached key cannot be "
            f"rotated again later. Load the model with a fixed rope type (default, linear, yarn or llama3)."
        )
    return rotary


def rope_from(rotary: nn.Module, layers: str | None = None) -> Rope:
    """The rotation that a rotary embedding module applies now, read from its live frequencies.

    Args:
        rotary: the module.
        layers: the layer type, where the module keeps a rotation per type; see :class:`Family`.

    The module's ``attention_scaling`` (yarn) is a factor on rotated queries and keys, no part of the rotation: see
    :func:`attention_scaling_of`.
    """
    live: Any = getattr(rotary, _of_type("inv_freq", layers))
    inv_freq = live.detach().float()
    return Rope(inv_freq=inv_freq, rotary_dim=2 * int(inv_freq.shape[0]))


def _of_type(name: str, layers: str | None) -> str:
    return name if layers is None else f"{layers}_{name}"


def rope_of(model: PreTrainedModel) -> Rope:
    """The rotation of the keys of full-attention layers: ``(rotary_dim / 2,)`` float32, radians per position.

    Rotating a cached key back and forth with it is right for every fixed rope type: a constant ``attention_scaling``
    passes through unchanged.

    Raises:
        UnsupportedModelError: as :func:`rotary_of`.
    """
    return rope_from(rotary_of(model), family_of(model).rope_layers)


def attention_scaling_of(model: PreTrainedModel) -> float:
    """The factor on rotated queries and keys of full-attention layers (1 except for yarn)."""
    name = _of_type("attention_scaling", family_of(model).rope_layers)
    return float(getattr(rotary_of(model), name, 1.0))


def sliding_window_of(config_or_model: Any) -> list[int | None]:
    """The attention window of each layer in tokens, ``None`` where a layer sees everything."""
    config = text_config(config_or_model)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in types]
