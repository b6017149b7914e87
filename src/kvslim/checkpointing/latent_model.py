"""A model whose attention keeps latents, as a directory.

config.json           model_type "kvslim-palu": transformers refuses it in words instead of loading random weights
kvslim.json           format version, the original configuration, ranks, how the cache codes latents, what was done,
                      hash of the weights
model.safetensors     all parameters, tied ones once
generation_config.json, tokenizer files
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvslim.attending.families import FAMILIES, attention_modules, base_model_of, family_of, kv_shape_of
from kvslim.attending.latent_attention import LatentAttention
from kvslim.attending.latent_forms import Forms
from kvslim.attending.latent_model import install, layer_places
from kvslim.attending.projections import layer_projections
from kvslim.caching.latent_codes import LatentCodes
from kvslim.config import is_count
from kvslim.errors import CheckpointError, ModelSourceError, UnsupportedModelError
from kvslim.files import new_directory, sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_TYPE = "kvslim-palu"
FORMAT_VERSION = 1
_ABOUT, _WEIGHTS, _GENERATION = "kvslim.json", "model.safetensors", "generation_config.json"
_NOT_THE_MODEL = ("_", "attn_implementation", "experts_implementation", "auto_map")
"""Starts of configuration keys that say how or from where a model is run, not what it is. transformers would fetch
code for some of their values, so they are neither written nor read."""


def write_latent_model(
    model: PreTrainedModel, directory: Path, about: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write a compressed model to a new directory, all or nothing.

    Args:
        model: a model that :func:`kvslim.palu.compress` has compressed.
        directory: must not exist, or be empty.
        about: what was done, as JSON values; :func:`read_latent_model` gives it back.
        tokenizer: written beside the model if given.

    Raises:
        ConfigError: the place is taken, cannot be written, or the disk is full; nothing is left behind.
        UnsupportedModelError: the weights are of several dtypes.
    """
    named = _named_tensors(model)
    if len(dtypes := _dtypes(named)) != 1:
        raise UnsupportedModelError(
            f"The weights are of several dtypes ({', '.join(dtypes)}), and a checkpoint keeps one. Use model.to()."
        )
    with new_directory(directory) as aside:
        tensors = {name: value.detach().contiguous().cpu() for name, value in named.items()}
        try:
            save_file(tensors, aside / _WEIGHTS, metadata={"format": "pt", "kvslim_format": str(FORMAT_VERSION)})
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        description = {
            "format": MODEL_TYPE,
            "version": FORMAT_VERSION,
            "base_config": _of_the_model(json.loads(model.config.to_json_string(use_diff=False))),
            "ranks": [[list(a.k_latent.ranks), list(a.v_latent.ranks)] for a in _latent_modules(model)],
            "forms": [[a.forms.key, a.forms.value] for a in _latent_modules(model)],
            "codes": _code_settings(model.palu_layout.codes),
            "weights_sha256": sha256(aside / _WEIGHTS),
            "about": about,
        }
        (aside / _ABOUT).write_text(json.dumps(description, indent=1) + "\n")
        config = {"model_type": MODEL_TYPE, "base_model_type": model.config.model_type}
        (aside / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if model.generation_config is not None:
            model.generation_config.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)


def is_latent_model(directory: Path) -> bool:
    """Whether ``directory`` holds a model that :func:`write_latent_model` wrote."""
    return (directory / _ABOUT).is_file()


def read_latent_model(directory: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a compressed model, on the CPU and in the dtype it was saved in, and what was said about it.

    Raises:
        ModelSourceError: there is no such checkpoint.
        CheckpointError: it is truncated, was edited, or is of a newer format. Nothing is built then.
    """
    description = _read_description(directory)
    weights = directory / _WEIGHTS
    if not weights.is_file() or sha256(weights) != description["weights_sha256"]:
        raise CheckpointError(f"{weights} is missing, truncated or was edited: its hash differs. Copy it again.")
    try:
        model = _skeleton(description)
        tensors = load_file(weights)
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
    except Exception as error:  # whatever the libraries make of an edited configuration
        raise CheckpointError(f"{directory} does not describe its own weights: {error}") from error
    if len(dtypes := _dtypes(tensors)) != 1:
        raise CheckpointError(f"{weights} has weights of several dtypes: {', '.join(dtypes)}. Copy it again.")
    tied = {name for name, value in model.named_parameters(remove_duplicate=False) if not value.is_meta}
    if unexpected or set(missing) - tied:
        raise CheckpointError(f"{weights} lacks {sorted(set(missing) - tied)} or has extra {sorted(unexpected)}.")
    if (directory / _GENERATION).is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory)
        except Exception as error:
            raise CheckpointError(f"{directory / _GENERATION} is damaged: {error} Copy it again.") from error
    return model.eval(), description["about"]


def _read_description(directory: Path) -> dict[str, Any]:
    path = directory / _ABOUT
    if not is_latent_model(directory):
        raise ModelSourceError(
            f"{directory} is no kvslim checkpoint: it has no {_ABOUT}. Make one with `kvslim compress`."
        )
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Copy the checkpoint again.") from error
    version: Any = description.get("version") if isinstance(description, dict) else None
    if not is_count(version):
        raise CheckpointError(f"{path} is damaged: it has no format version. Copy the checkpoint again.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format version {version}; this kvslim reads up to {FORMAT_VERSION}. Update kvslim."
        )
    wanted = {"format", "base_config", "ranks", "forms", "weights_sha256", "about"}
    if wanted - set(description):
        raise CheckpointError(f"{path} lacks {', '.join(sorted(wanted - set(description)))}.")
    if description["format"] != MODEL_TYPE:
        raise CheckpointError(f"{path} is of format {description['format']!r}, not {MODEL_TYPE!r}.")
    if wrong := _wrong_in(description):
        raise CheckpointError(f"{path} is damaged: {wrong}. Copy the checkpoint again.")
    return {**description, "base_config": _of_the_model(description["base_config"])}


def _wrong_in(description: dict[str, Any]) -> str | None:
    """What no writer makes, in words; ``None`` if all is well so far."""
    config, ranks, about = (description[name] for name in ("base_config", "ranks", "about"))
    if not isinstance(about, dict) or not about:
        return "it does not say what was done"
    if not isinstance(config, dict) or not all(is_count(config.get(name)) for name in _COUNTS):
        return f"its configuration lacks the counts {', '.join(_COUNTS)}"
    if not isinstance(config.get("model_type"), str) or config["model_type"] not in FAMILIES:
        return f"its model type is {config.get('model_type')!r}"
    if not isinstance(ranks, list) or not all(map(_is_rank_pair, ranks)):
        return "its ranks are no key ranks and value ranks of each layer"
    if len(ranks) != config["num_hidden_layers"]:
        return f"its configuration has {config['num_hidden_layers']} layers, its ranks are for {len(ranks)}"
    return _wrong_codes(description.get("codes"))


def _wrong_codes(codes: Any) -> str | None:
    if codes is None:
        return None
    if not isinstance(codes, dict) or set(codes) != _CODES or not all(is_count(n, 0) for n in codes.values()):
        return f"its codes are not described by the counts {', '.join(sorted(_CODES))}"
    return None


_CODES = {"bits", "sinks", "window"}


def _code_settings(codes: LatentCodes | None) -> dict[str, int] | None:
    """How the cache codes latents; the ranks are written apart."""
    return None if codes is None else {"bits": codes.bits, "sinks": codes.sinks, "window": codes.window}


def _codes(description: dict[str, Any]) -> LatentCodes | None:
    """Undo :func:`_code_settings`. A checkpoint without the entry keeps latents in the model's dtype."""
    if (settings := description.get("codes")) is None:
        return None
    key_ranks, value_ranks = (tuple(tuple(pair[kind]) for pair in description["ranks"]) for kind in (0, 1))
    return LatentCodes(**settings, key_ranks=key_ranks, value_ranks=value_ranks)


_COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def _is_rank_pair(pair: Any) -> bool:
    """Whether ``pair`` is ``[ranks of the key's groups, ranks of the value's]``."""
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(isinstance(groups, list) and groups and all(map(is_count, groups)) for groups in pair)


def _of_the_model(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the keys that are not about the model itself."""
    return {name: value for name, value in config.items() if not name.startswith(_NOT_THE_MODEL)}


def _dtypes(tensors: dict[str, torch.Tensor]) -> list[str]:
    return sorted({str(value.dtype) for value in tensors.values()})


def _skeleton(description: dict[str, Any]) -> PreTrainedModel:
    """The model without weights: everything on the meta device but the rotary frequencies."""
    fields = dict(description["base_config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    family = family_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    base: Any = base_model_of(model)
    if family.rotary is not None:
        setattr(base, family.rotary, type(getattr(base, family.rotary))(config=config))
    shape = kv_shape_of(config)
    attentions = []
    layers = zip(
        attention_modules(model),
        layer_places(model, _codes(description)),
        description["ranks"],
        description["forms"],
        strict=True,
    )
    for original, place, (key_ranks, value_ranks), forms in layers:
        for ranks in (key_ranks, value_ranks):
            _check_ranks(ranks, shape.kv_heads, shape.head_dim)
        parts = layer_projections(model, original)
        attentions.append(LatentAttention(original, place, parts, key_ranks, value_ranks, Forms(*forms)))
    install(model, attentions)
    return model


def _check_ranks(ranks: list[int], kv_heads: int, head_dim: int) -> None:
    """Refuse ranks that no writer makes."""
    features = kv_heads * head_dim
    if kv_heads % len(ranks) or any(rank > features // len(ranks) for rank in ranks):
        raise ValueError(f"ranks {ranks} do not fit {kv_heads} heads of {head_dim} features")


def _named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state dictionary with each shared tensor once, under its first name."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen:
            tensors[name] = value
            seen.add(value.data_ptr())
    return tensors


def _latent_modules(model: PreTrainedModel) -> list[LatentAttention]:
    return [module for module in attention_modules(model) if isinstance(module, LatentAttention)]
