"""The table of supported model families: where the parts of an attention layer are, one frozen row each.

Nothing is copied from the model code and nothing is patched; the rest of kvslim finds its way by these rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import nn

from kvslim.errors import UnsupportedModelError
from kvslim.model_types import COMPRESSED
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
        rotary: the module with the rotary frequencies, in the base model. ``None``: keys are not rotated, so that the
            key factor can be fused into the query (Palu, Eq. 6).
        attention: the attention module, in a decoder layer.
        query, key, value, output: the projections, in the attention module.
        fused: query, key and value come from the one projection ``query``: ``"blocks"`` (all queries, all keys, all
            values) or ``"heads"`` (query, key and value of the first head, then of the second). ``None``: three.
        query_norm, key_norm: modules that normalise per head between the projection and the rotation.
        clip: attribute with a bound that queries, keys and values are cut to after the projection, or ``None`` there.
        scaling, dropout: attributes with the factor on the scores and with the dropout of the weights.
        bias: argument with a bias on the scores, the same for all queries (ALiBi).
        residual: argument that the module adds to its output after the dropout named by ``output_dropout``.
        output_dropout: dropout of the output that happens inside the attention module.
        rope_layers: the layer type whose rotation counts for run-time methods, where the rotary module keeps one per
            type and names its frequencies ``TYPE_inv_freq``: the full-attention layers, the only ones that they
            compress. ``None``: all layers share one.
        run_time: run-time methods understand the cache. A row without it serves Palu only.
    """

    model_type: str
    layers: str = "layers"
    rotary: str | None = "rotary_emb"
    attention: str = "self_attn"
    query: str = "q_proj"
    key: str = "k_proj"
    value: str = "v_proj"
    output: str = "o_proj"
    fused: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    clip: str | None = None
    scaling: str = "scaling"
    dropout: str = "attention_dropout"
    bias: str | None = None
    residual: str | None = None
    output_dropout: str | None = None
    rope_layers: str | None = None
    run_time: bool = True


def _fused(model_type: str, projection: str, order: str, **rest: Any) -> Family:
    """A row whose query, key and value come from one projection."""
    return Family(model_type, query=projection, key=projection, value=projection, fused=order, **rest)


_NORMS: dict[str, Any] = {"query_norm": "q_norm", "key_norm": "k_norm"}

FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3", **_NORMS),
        Family("gemma3_text", **_NORMS, rope_layers="full_attention"),
        _fused("phi3", "qkv_proj", "blocks", run_time=False),
        _fused("gpt_neox", "query_key_value", "heads", attention="attention", output="dense", run_time=False),
        Family("opt", "decoder.layers", None, output="out_proj", dropout="dropout", run_time=False),
        _fused(
            "gpt2", "c_attn", "blocks", layers="h", rotary=None, attention="attn", output="c_proj",
            dropout="attn_dropout", output_dropout="resid_dropout", run_time=False,
        ),
        _fused(
            "bloom", "query_key_value", "heads", layers="h", rotary=None, attention="self_attention", output="dense",
            scaling="inv_norm_factor", bias="alibi", residual="residual", output_dropout="hidden_dropout",
            run_time=False,
        ),
        _fused(
            "mpt", "Wqkv", "blocks", layers="blocks", rotary=None, attention="attn", output="out_proj",
            clip="clip_qkv", scaling="softmax_scale", dropout="attn_dropout_p", bias="position_bias", run_time=False,
        ),
    )
}  # fmt: skip
"""All rows by ``model_type``. ``llama`` covers SmolLM2, Vicuna and LongChat too, ``gpt_neox`` Pythia."""


def text_config(config_or_model: Any) -> PreTrainedConfig:
    """The configuration of the decoder, from a model or a configuration."""
    config: PreTrainedConfig = getattr(config_or_model, "config", config_or_model).get_text_config(decoder=True)
    return config


def family_of(config_or_model: Any, *, run_time: bool = False) -> Family:
    """Return the row of a model or configuration.

    Args:
        config_or_model: a transformers model or its configuration.
        run_time: require that run-time methods understand its cache.

    Raises:
        UnsupportedModelError: there is no such row; the message lists the supported families.
    """
    model_type = getattr(text_config(config_or_model), "model_type", None)
    family = FAMILIES.get(str(model_type).removeprefix(COMPRESSED))
    if family is None or (run_time and not family.run_time):
        supported = ", ".join(sorted(name for name, row in FAMILIES.items() if row.run_time or not run_time))
        what = "Run-time methods do not support" if run_time else "kvslim has no family for"
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


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, in order.

    Raises:
        UnsupportedModelError: the family is unknown, or the model is not built as its row says.
    """
    family = family_of(model)
    try:
        layers: Any = attrgetter(family.layers)(base_model_of(model))
    except AttributeError:
        layers = None
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


def rotary_of(model: PreTrainedModel, *, all_layers: bool = False) -> nn.Module | None:
    """The model's own rotary embedding module, checked to rotate every position the same way for ever.

    Args:
        model: a model of a supported family.
        all_layers: check the rotations of all layers; otherwise, where they differ by type, only those of the
            full-attention layers.

    Returns:
        The module, or ``None`` for a family that does not rotate keys.

    Raises:
        UnsupportedModelError: the family is unknown, the model is not built as its row says, or frequencies change
            with the sequence length.
    """
    family = family_of(model)
    if family.rotary is None:
        return None
    rotary: nn.Module | None = getattr(base_model_of(model), family.rotary, None)
    if rotary is None:
        raise _unlike_its_row(model, family, "rotary embedding is")
    kinds: Any = getattr(rotary, "rope_type", "default")
    if not isinstance(kinds, dict):
        kinds = {family.rope_layers: kinds}
    for layers, rope_type in kinds.items():
        if rope_type in _MOVING_FREQUENCIES and (all_layers or layers == family.rope_layers):
            raise UnsupportedModelError(
                f"The rope type {rope_type!r} changes its frequencies with the sequence length, so a cached key cannot "
                f"be rotated again later. Load the model with a fixed rope type (default, linear, yarn or llama3)."
            )
    return rotary


def rope_from(rotary: nn.Module, layers: str | None = None) -> Rope:
    """The rotation that a rotary embedding module applies now, read from its live frequencies.

    Args:
        rotary: the module.
        layers: the layer type, where the module keeps a rotation per type; see :class:`Family`.

    The module's ``attention_scaling`` (yarn) is a factor on rotated queries and keys, no part of the rotation: see
    :func:`scaling_from`.
    """
    live: Any = getattr(rotary, _of_type("inv_freq", layers))
    inv_freq = live.detach().float()
    return Rope(inv_freq=inv_freq, rotary_dim=2 * int(inv_freq.shape[0]))


def scaling_from(rotary: nn.Module, layers: str | None = None) -> float:
    """The factor on rotated queries and keys (1 except for yarn). Arguments as for :func:`rope_from`."""
    return float(getattr(rotary, _of_type("attention_scaling", layers), 1.0))


def _of_type(name: str, layers: str | None) -> str:
    return name if layers is None else f"{layers}_{name}"


def rope_of(model: PreTrainedModel) -> Rope:
    """The rotation of the keys of full-attention layers: ``(rotary_dim / 2,)`` float32, radians per position.

    Rotating a cached key back and forth with it is right for every fixed rope type: a constant ``attention_scaling``
    passes through unchanged.

    Raises:
        UnsupportedModelError: as :func:`rotary_of`, or keys are not rotated.
    """
    return rope_from(_rotary_that_is_there(model), family_of(model).rope_layers)


def attention_scaling_of(model: PreTrainedModel) -> float:
    """The factor on rotated queries and keys of full-attention layers (1 except for yarn)."""
    return scaling_from(_rotary_that_is_there(model), family_of(model).rope_layers)


def _rotary_that_is_there(model: PreTrainedModel) -> nn.Module:
    rotary = rotary_of(model)
    if rotary is None:
        raise UnsupportedModelError(f"Model type {family_of(model).model_type!r} does not rotate its keys.")
    return rotary


def rope_layers_of(config_or_model: Any) -> list[str | None]:
    """Per layer the type under which the rotary module keeps its rotation, ``None`` where all share one."""
    config = text_config(config_or_model)
    if family_of(config).rope_layers is None:
        return [None] * int(config.num_hidden_layers)
    return list(config.layer_types)


def sliding_window_of(config_or_model: Any) -> list[int | None]:
    """The attention window of each layer in tokens, ``None`` where a layer sees everything."""
    config = text_config(config_or_model)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * int(config.num_hidden_layers)
    return [window if kind == "sliding_attention" else None for kind in types]
