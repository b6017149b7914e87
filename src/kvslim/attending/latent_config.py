"""The configuration of a compressed model: the original's, under a model type of its own, with a table ``kvslim``.

Each family of the table has a class, such as ``PaluLlamaConfig`` with the model type ``kvslim_palu_llama``. Where
kvslim was not imported, transformers does not know the type and refuses in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from kvslim.attending.families import kv_shape_of
from kvslim.attending.latent_forms import Forms
from kvslim.config import is_count
from kvslim.errors import CheckpointError, KvslimError
from kvslim.model_types import COMPRESSED
from kvslim.palu_config import PaluReport

FORMAT = "kvslim-palu"
FORMAT_VERSION = 2
"""Version 1 had a file of its own for what is in the table ``kvslim`` now; no release wrote it."""

_WANTED = ("ranks", "forms", "report", "files", "config_sha256", "content_sha256")
_NOT_THE_MODEL = ("_", "attn_implementation", "experts_implementation", "auto_map")
"""Starts of configuration keys that say how or from where a model is run, not what it is. transformers would fetch
code for some of their values, so they are neither written nor read."""
_OTHER_WEIGHTS = ("transformers_weights", "quantization_config", "fusion_config", "kernel_config", "distributed_config")
"""Keys under which transformers would read other files, or build other modules, than were checked."""


@dataclass(frozen=True)
class LatentLayerShape:
    """The ranks of the key's and the value's groups in one layer, and how the second factors are used."""

    key: tuple[int, ...]
    value: tuple[int, ...]
    forms: Forms


class LatentConfigMixin:
    """Put in front of a family's configuration class: refuses what no writer makes before anything is built."""

    kvslim: dict[str, Any]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            CheckpointError: it is damaged, was edited, or is of a newer format.
        """
        from kvslim.attending.latent_model import causal_class  # which imports this module

        made_by: Any = cls
        check_description(config_dict, made_by.attribute_map)
        causal_class(made_by.model_type.removeprefix(COMPRESSED))
        settings: Any = super()
        try:
            return settings.from_dict(of_the_model(config_dict), **kwargs)
        except KvslimError:
            raise
        except Exception as error:  # whatever transformers makes of an edited value
            raise CheckpointError(
                f"config.json does not describe a model: {error} Copy the checkpoint again."
            ) from error


@cache
def latent_config_class(model_type: str) -> type:
    """The configuration class of compressed models of a family, made once, from the original's ``model_type``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    original = CONFIG_MAPPING[model_type]
    body = {"__module__": __name__, "model_type": COMPRESSED + model_type}
    return type(f"Palu{original.__name__}", (LatentConfigMixin, original), body)


def of_the_model(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the keys that are not about the model itself."""
    return {
        name: value
        for name, value in config.items()
        if name == "_commit_hash" or not (name.startswith(_NOT_THE_MODEL) or name in _OTHER_WEIGHTS)
    }


def check_description(config: dict[str, Any], names: dict[str, str]) -> None:
    """Refuse a configuration that no writer makes.

    Args:
        config: as in config.json.
        names: what the family calls its fields (``attribute_map``).

    Raises:
        CheckpointError: it is damaged, was edited, or is of a newer format.
    """
    about = config.get("kvslim")
    version: Any = about.get("version") if isinstance(about, dict) else None
    if about is None or not is_count(version) or about.get("format") != FORMAT:
        raise CheckpointError(f"config.json is damaged: it has no {FORMAT} format version. Copy the checkpoint again.")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint has format version {version}; this kvslim reads up to {FORMAT_VERSION}. Update kvslim."
        )
    if version < FORMAT_VERSION:
        raise CheckpointError(f"The checkpoint has the old format version {version}. Compress the model again.")
    if wrong := _wrong_in(about, config, names):
        raise CheckpointError(f"config.json is damaged: {wrong}. Copy the checkpoint again.")


def _wrong_in(about: dict[str, Any], config: dict[str, Any], names: dict[str, str]) -> str | None:
    """What no writer makes, in words; ``None`` if all is well so far."""
    if lacking := [name for name in _WANTED if not about.get(name)]:
        return f"it lacks {', '.join(lacking)}"
    ranks, forms, files = about["ranks"], about["forms"], about["files"]
    if not isinstance(ranks, list) or not all(map(_is_rank_pair, ranks)):
        return "its ranks are no key ranks and value ranks of each layer"
    if not isinstance(forms, list) or len(forms) != len(ranks) or not all(map(_is_pair, forms)):
        return "its forms are none of each layer"
    if not isinstance(files, dict) or not all(map(_is_file, files.items())):
        return "its list of files is no sizes and hashes of plain files"
    layers = [config[name] for name in ("num_hidden_layers", names.get("num_hidden_layers", "")) if name in config]
    if not layers or any(count != len(ranks) for count in layers):
        return f"it has {layers[0] if layers else 'no'} layers, its ranks are for {len(ranks)}"
    return None


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2


def _is_rank_pair(pair: Any) -> bool:
    """Whether ``pair`` is ``[ranks of the key's groups, ranks of the value's]``."""
    return _is_pair(pair) and all(isinstance(groups, list) and groups and all(map(is_count, groups)) for groups in pair)


def _is_file(entry: tuple[str, Any]) -> bool:
    name, facts = entry
    plain = "/" not in name and "\\" not in name and name.endswith((".safetensors", ".safetensors.index.json"))
    return plain and isinstance(facts, dict) and is_count(facts.get("bytes")) and isinstance(facts.get("sha256"), str)


def structure_of(config: Any) -> list[LatentLayerShape]:
    """Ranks and forms of each layer from the configuration of a compressed model.

    Raises:
        CheckpointError: they do not fit the rest of it.
    """
    about, shape = config.kvslim, kv_shape_of(config)
    if len(about["ranks"]) != shape.layers:
        raise CheckpointError(f"The model has {shape.layers} layers, its ranks are for {len(about['ranks'])}.")
    for ranks in (ranks for pair in about["ranks"] for ranks in pair):
        features = shape.kv_heads * shape.head_dim
        if shape.kv_heads % len(ranks) or any(rank > features // len(ranks) for rank in ranks):
            raise CheckpointError(
                f"The ranks {ranks} do not fit {shape.kv_heads} heads of {shape.head_dim} features. Copy it again."
            )
    pairs = zip(about["ranks"], about["forms"], strict=True)
    return [LatentLayerShape(tuple(key), tuple(value), Forms(*forms)) for (key, value), forms in pairs]


def report_of(config: Any) -> PaluReport:
    """What was done to the model, from the configuration of a compressed one.

    Raises:
        CheckpointError: it does not say so.
    """
    try:
        return PaluReport.from_dict(config.kvslim["report"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"config.json does not say what was done: {error!r}. Copy the checkpoint again."
        ) from error
