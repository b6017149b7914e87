"""A model whose attention keeps latents, as a directory.

config.json           model_type "kvslim-palu": transformers refuses it in words instead of loading random weights
kvslim.json           format version, the original configuration, ranks, what was done, hash of the weights
model.safetensors     all parameters, tied ones once
generation_config.json, tokenizer files
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvslim.attending.families import (
    attention_modules,
    base_model_of,
    family_of,
    kv_shape_of,
    sliding_window_of,
)
from kvslim.attending.latent_attention import LatentAttention, LowRankProjection
from kvslim.attending.latent_model import install
from kvslim.caching.latent import layout_of
from kvslim.errors import CheckpointError, ModelSourceError
from kvslim.files import new_directory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL_TYPE = "kvslim-palu"
FORMAT_VERSION = 1
_ABOUT, _WEIGHTS = "kvslim.json", "model.safetensors"


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
    """
    with new_directory(directory) as aside:
        tensors = {name: value.detach().contiguous().cpu() for name, value in _named_tensors(model).items()}
        try:
            save_file(tensors, aside / _WEIGHTS, metadata={"format": "pt", "kvslim_format": str(FORMAT_VERSION)})
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        description = {
            "format": MODEL_TYPE,
            "version": FORMAT_VERSION,
            "base_config": json.loads(model.config.to_json_string(use_diff=False)),
            "ranks": [[list(a.k_latent.ranks), list(a.v_latent.ranks)] for a in _latent_modules(model)],
            "weights_sha256": _sha256(aside / _WEIGHTS),
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
    if not weights.is_file() or _sha256(weights) != description["weights_sha256"]:
        raise CheckpointError(f"{weights} is missing, truncated or was edited: its hash differs. Copy it again.")
    try:
        model = _skeleton(description)
        tensors = load_file(weights)
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    except (SafetensorError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory} does not describe its own weights: {error}") from error
    model.tie_weights()
    tied = {name for name, value in model.named_parameters(remove_duplicate=False) if not value.is_meta}
    if unexpected or set(missing) - tied:
        raise CheckpointError(f"{weights} lacks {sorted(set(missing) - tied)} or has extra {sorted(unexpected)}.")
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval(), description["about"]


def _read_description(directory: Path) -> dict[str, Any]:
    if not is_latent_model(directory):
        raise ModelSourceError(
            f"{directory} is no kvslim checkpoint: it has no {_ABOUT}. Make one with `kvslim compress`."
        )
    try:
        description = json.loads((directory / _ABOUT).read_text())
        version = int(description["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / _ABOUT} is damaged: {error}. Copy the checkpoint again.") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format version {version}; this kvslim reads up to {FORMAT_VERSION}. Update kvslim."
        )
    wanted = {"base_config", "ranks", "weights_sha256", "about"}
    if wanted - set(description):
        raise CheckpointError(f"{directory / _ABOUT} lacks {', '.join(sorted(wanted - set(description)))}.")
    return dict(description)


def _skeleton(description: dict[str, Any]) -> PreTrainedModel:
    """The model without weights: everything on the meta device but the rotary frequencies."""
    fields = dict(description["base_config"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    family = family_of(config, palu=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    base: Any = base_model_of(model)
    rotary: Any = type(getattr(base, family.rotary))(config=config)
    setattr(base, family.rotary, rotary)
    shape = kv_shape_of(config)
    layout = layout_of(shape, sliding_window_of(config))
    pairs = zip(attention_modules(model), description["ranks"], strict=True)
    features = shape.kv_heads * shape.head_dim
    attentions = [
        LatentAttention(
            original,
            family,
            rotary,
            _empty_projection(getattr(original, family.key), key_ranks, features),
            _empty_projection(getattr(original, family.value), value_ranks, features),
            layout,
        )
        for original, (key_ranks, value_ranks) in pairs
    ]
    install(model, attentions, layout)
    return model


def _empty_projection(original: nn.Linear, ranks: list[int], features: int) -> LowRankProjection:
    """A projection of the stored ranks on the meta device; ranks that no writer makes are refused."""
    group = features // max(1, len(ranks))
    if not ranks or features % len(ranks) or any(not 1 <= int(rank) <= group for rank in ranks):
        raise ValueError(f"ranks {ranks} do not fit {features} features")
    return LowRankProjection(
        original.in_features,
        [int(rank) for rank in ranks],
        group,
        bias=original.bias is not None,
        dtype=original.weight.dtype,
        device=torch.device("meta"),
    )


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
