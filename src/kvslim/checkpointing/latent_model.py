"""A model whose attention keeps latents, as a directory that ``from_pretrained`` reads once kvslim is imported.

config.json           model_type "kvslim_palu_FAMILY", the original configuration, and the table "kvslim"
model.safetensors     all parameters, tied ones once; several files with an index beyond a size
kvslim_palu.py        what transformers runs if it is told to trust the directory and kvslim is not imported: imports it
README.md             the model card
generation_config.json, tokenizer files
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import cached_file

from kvslim.attending.families import attention_modules, family_of
from kvslim.attending.latent_attention import LatentAttention
from kvslim.attending.latent_config import LatentConfigMixin, check_description
from kvslim.attending.latent_model import causal_class
from kvslim.checkpointing.latent_metadata import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Described,
    check_quality,
    hash_of_config,
    write_metadata,
)
from kvslim.errors import CheckpointError, KvslimError, ModelSourceError, UnsupportedModelError
from kvslim.files import new_directory, sha256
from kvslim.model_types import COMPRESSED

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OLD, _GENERATION = "kvslim.json", "generation_config.json"
_WHERE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "proxies")
"""Options of ``from_pretrained`` that say where files come from."""


def save_latent_model(
    model: Any,
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    quality: dict[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    tensors: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a compressed model to a new directory, all or nothing.

    Args:
        model: a model that :func:`kvslim.palu.compress` has compressed.
        directory: must not exist, or be empty.
        tokenizer: written beside the model if given.
        quality: what was measured of it, as JSON values. Without it, that of the checkpoint that the model was loaded
            from is kept if the weights are the same.
        max_shard_size: of each weight file.
        tensors: written in place of the model's own state dictionary.

    Raises:
        ConfigError: the place is taken, cannot be written, or the disk is full; nothing is left behind. Or ``quality``
            is no table of JSON values.
        UnsupportedModelError: the model is not the causal language model of its family, weights are of several dtypes
            or not in memory.
    """
    check_quality(quality)
    named = _each_once(model.state_dict() if tensors is None else tensors)
    _check_savable(model, named)
    attentions = [module for module in attention_modules(model) if isinstance(module, LatentAttention)]
    described = Described(
        ranks=tuple((module.k_latent.ranks, module.v_latent.ranks) for module in attentions),
        forms=tuple((module.forms.key, module.forms.value) for module in attentions),
        layout=model.palu_layout,
        report=model.palu.to_dict(),
        quality=quality,
    )
    with new_directory(Path(directory)) as aside:
        write_weights(named, aside, max_shard_size)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        dtype = str(next(iter(named.values())).dtype).removeprefix("torch.")
        write_metadata(aside, model.config, (type(model).__name__, dtype), described)


def write_weights(tensors: dict[str, torch.Tensor], folder: Path, max_shard_size: int | str = "5GB") -> None:
    """Write tensors as safetensors: one file, or several and an index.

    Raises:
        OSError: the disk is full.
    """
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=WEIGHTS.replace(".safetensors", "{suffix}.safetensors"), max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: tensors[name].detach().contiguous().cpu() for name in names}
        try:
            save_file(shard, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(0o644)  # safetensors lets nobody else read it
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_savable(model: Any, named: dict[str, torch.Tensor]) -> None:
    wanted = causal_class(family_of(model).model_type)
    if type(model) is not wanted:
        raise UnsupportedModelError(f"A {type(model).__name__} cannot be saved, only a {wanted.__name__}.")
    if any(isinstance(value, DTensor) for value in named.values()):
        raise UnsupportedModelError(
            "A tensor-parallel model holds a part of the weights. Load it in one process to save it."
        )
    if absent := [name for name, value in named.items() if value.is_meta]:
        raise UnsupportedModelError(f"The weights of {absent[0]} are not in memory (offloaded). Load all to save them.")
    if len(dtypes := _dtypes(str(value.dtype) for value in named.values())) != 1:
        raise UnsupportedModelError(
            f"The weights are of several dtypes ({', '.join(dtypes)}), and a checkpoint keeps one. Use model.to()."
        )


def is_latent_model(directory: Path) -> bool:
    """Whether ``directory`` says that it holds a compressed model, of this format or an old one."""
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return (directory / _OLD).is_file()
    kind = config.get("model_type") if isinstance(config, dict) else None
    return (directory / _OLD).is_file() or (isinstance(kind, str) and kind.startswith(COMPRESSED))


def load_latent_model(directory: Path, **options: Any) -> PreTrainedModel:
    """Load a compressed model from a directory: as ``from_pretrained``, with its errors in words.

    Raises:
        ModelSourceError: there is no such checkpoint.
        CheckpointError: it is truncated, was edited, or is of another format. Nothing is built then.
    """
    path = directory / CONFIG
    if (directory / _OLD).is_file():
        raise CheckpointError(f"{directory} is of the old format version 1. Compress the model again.")
    if not path.is_file():
        raise ModelSourceError(f"{directory} is no kvslim checkpoint. Make one with `kvslim compress`.")
    kind = _read_json(path).get("model_type")
    if not isinstance(kind, str) or not kind.startswith(COMPRESSED):
        raise ModelSourceError(
            f"{directory} is no kvslim checkpoint: its model type is {kind!r}. Make one with `kvslim compress`."
        )
    try:
        config = AutoConfig.from_pretrained(directory)
    except ValueError as error:
        if isinstance(error, KvslimError):
            raise
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]} Copy the checkpoint again.") from error
    return AutoModelForCausalLM.from_pretrained(directory, config=config, **options)


def check_checkpoint(model_class: Any, name: Any, options: dict[str, Any], *, check_hash: bool) -> None:
    """Check all files of a checkpoint before anything of its size is allocated.

    Args:
        model_class: the class that will be loaded.
        name: directory or hub id, as for ``from_pretrained``.
        options: of ``from_pretrained``.
        check_hash: compare hashes of the weights, not only sizes and shapes.

    Raises:
        CheckpointError: a file is missing, truncated, was edited, or does not fit the others.
    """
    where = {option: options[option] for option in _WHERE if option in options}

    def find(file: str) -> Path | None:
        found = cached_file(
            name, file, **where, _commit_hash=options.get("_commit_hash"), _raise_exceptions_for_missing_entries=False
        )
        return None if found is None else Path(found)

    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        config = model_class.config_class.from_pretrained(name if config is None else config, **where)
    if not isinstance(config, LatentConfigMixin) or type(config) is not model_class.config_class:
        raise CheckpointError(f"{name} is of model type {config.model_type!r}, not one for {model_class.__name__}.")
    _check_config(find, model_class)
    shards = _check_files(config.kvslim["files"], find, check_hash)
    _check_shapes(model_class, config, _headers(shards))
    generation = find(_GENERATION)
    if generation is not None:
        try:
            GenerationConfig.from_pretrained(generation.parent)
        except Exception as error:
            raise CheckpointError(f"{generation} is damaged: {error} Copy it again.") from error


def _check_config(find: Callable[[str], Path | None], model_class: Any) -> None:
    path = find(CONFIG)
    if path is None:
        raise CheckpointError(f"{CONFIG} is missing. Copy the checkpoint again.")
    content = _read_json(path)
    check_description(content, model_class.config_class.attribute_map)
    if hash_of_config(content) != content["kvslim"]["config_sha256"]:
        raise CheckpointError(f"{path} was edited: its hash differs. Copy it again.")


def _check_files(
    files: dict[str, dict[str, Any]], find: Callable[[str], Path | None], check_hash: bool
) -> dict[str, Path]:
    """The weight files by name, none missing and none beside them."""
    found = {}
    for name, facts in files.items():
        path = find(name)
        if path is None or path.stat().st_size != facts["bytes"]:
            raise CheckpointError(f"{name} is missing or truncated. Copy it again.")
        if (check_hash or name == INDEX) and sha256(path) != facts["sha256"]:
            raise CheckpointError(f"{path} was edited or is damaged: its hash differs. Copy it again.")
        found[name] = path
    index = found.pop(INDEX, None)
    if index is None and set(found) != {WEIGHTS}:
        raise CheckpointError(f"The weights are {', '.join(found)} without {INDEX}. Copy the checkpoint again.")
    if index is not None:
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or set(shards.values()) != set(found) or find(WEIGHTS) is not None:
            raise CheckpointError(f"{index} does not list the weight files. Copy the checkpoint again.")
    return found


def _headers(shards: dict[str, Path]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every stored tensor by name; the data is not read."""
    held: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in shards.values():
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    part = file.get_slice(name)
                    held[name] = (tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}. Copy it again.") from error
    return held


def _check_shapes(model_class: Any, config: Any, held: dict[str, tuple[tuple[int, ...], str]]) -> None:
    """Compare the stored tensors with those of a model on the meta device, which takes no memory."""
    try:
        with torch.device("meta"):
            model = model_class(config)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an edited configuration leads to
        raise CheckpointError(f"config.json does not describe a model: {error} Copy the checkpoint again.") from error
    if len(dtypes := _dtypes(dtype for _, dtype in held.values())) != 1:
        raise CheckpointError(f"The weights are of several dtypes: {', '.join(dtypes)}. Copy the checkpoint again.")
    wanted = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in wanted.items():
        names[id(value)].append(name)
        if name in held and held[name][0] != tuple(value.shape):
            raise CheckpointError(
                f"config.json and the weights do not fit: {name} is {held[name][0]}, not {tuple(value.shape)}."
            )
    missing = [tied[0] for tied in names.values() if not any(name in held for name in tied)]
    if missing or set(held) - set(wanted):
        raise CheckpointError(f"The weights lack {missing} or have extra {sorted(set(held) - set(wanted))}.")
    most = max(value.numel() for value in wanted.values())
    if large := [name for name, value in model.named_buffers() if value.numel() > most]:
        raise CheckpointError(f"config.json asks for a table {large[0]} larger than any weight. Copy it again.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Copy the checkpoint again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object. Copy the checkpoint again.")
    return content


def _dtypes(names: Any) -> list[str]:
    return sorted(set(names))


def _each_once(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dictionary with each shared tensor once, under its first name."""
    seen: set[tuple[Any, ...]] = set()
    tensors = {}
    for name, value in state.items():
        place = (value.device, value.data_ptr(), tuple(value.shape))
        if value.is_meta or place not in seen:
            tensors[name] = value
            seen.add(place)
    return tensors
