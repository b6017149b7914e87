"""All of a compressed model's directory but the weights: configuration with metadata, model card, shim.

Nothing here needs the model, only its configuration, so that whoever writes weights file by file can finish with it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvslim.attending.families import family_of
from kvslim.attending.latent_config import FORMAT, FORMAT_VERSION, of_the_model
from kvslim.caching.latent import LatentCache, LatentLayout
from kvslim.checkpointing.latent_card import CARD, Facts, model_card
from kvslim.errors import ConfigError
from kvslim.files import sha256
from kvslim.model_types import COMPRESSED
from kvslim.version import __version__

CONFIG, WEIGHTS, INDEX, SHIM = "config.json", "model.safetensors", "model.safetensors.index.json", "kvslim_palu.py"
_TOKENS = 256
"""Tokens over which the cache's bytes are measured."""

_SHIM = '''"""Makes this model known to transformers. All code is in the package kvslim; this file only imports it."""

try:
    import kvslim
except ImportError as error:
    raise ImportError("This model was compressed with kvslim, which is not installed: pip install kvslim") from error

Config, Model = kvslim.model_classes("{model_type}")
'''

Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Described:
    """What the metadata say of a compressed model.

    Attributes:
        ranks: per layer the ranks of the key's and of the value's groups.
        forms: per layer how their second factors are used.
        layout: of its cache.
        report: what was done, as JSON values.
        quality: what was measured, as JSON values.
    """

    ranks: tuple[Pair, ...]
    forms: tuple[tuple[str, str], ...]
    layout: LatentLayout
    report: dict[str, Any]
    quality: dict[str, Any] | None = None


def write_metadata(folder: Path, config: Any, model: tuple[str, str], described: Described) -> None:
    """Finish a directory whose weights are written: configuration, model card and shim.

    Args:
        folder: holds the safetensors files, and their index if they are several.
        config: of the original model, or of one that was loaded compressed.
        model: name of the model's class, and dtype of its weights, such as ``bfloat16``.
        described: what the metadata say.
    """
    before = getattr(config, "kvslim", None) or {}
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
        if path.suffix == ".safetensors" or path.name == INDEX
    }
    content = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    quality = described.quality
    if quality is None and before.get("content_sha256") == content:
        quality = before.get("quality")
    measured = _cache_bytes(described)
    about: dict[str, Any] = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "kvslim_version": __version__,
        "base_model": before.get("base_model") or _hub_name(config),
        "ranks": [[list(key), list(value)] for key, value in described.ranks],
        "forms": [list(pair) for pair in described.forms],
        "report": json.loads(json.dumps(described.report)),
        "bytes_per_token": measured,
        "quality": quality,
        "files": files,
        "content_sha256": content,
    }
    written = _config_json(config, model, about)
    about["config_sha256"] = hash_of_config(written)
    (folder / CONFIG).write_text(json.dumps(written, indent=1) + "\n")
    (folder / SHIM).write_text(_SHIM.format(model_type=written["model_type"]))
    (folder / CARD).write_text(model_card(Facts(family_of(config).model_type, about)))


def check_quality(quality: Any) -> None:
    """Refuse a measured quality that JSON cannot hold, before work is done.

    Raises:
        ConfigError: it is neither ``None`` nor a table of names and JSON values.
    """
    try:
        fits = quality is None or (isinstance(quality, dict) and json.loads(json.dumps(quality)) == quality)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            f"quality is a table of names and JSON values, such as {{'perplexity': 9.5}}, not {quality!r}."
        )


def hash_of_config(config: dict[str, Any]) -> str:
    """SHA-256 of everything that config.json says, its order and the hash itself apart."""
    about = {name: value for name, value in config["kvslim"].items() if name != "config_sha256"}
    return hashlib.sha256(json.dumps({**config, "kvslim": about}, sort_keys=True).encode()).hexdigest()


def _config_json(config: Any, model: tuple[str, str], about: dict[str, Any]) -> dict[str, Any]:
    model_type = COMPRESSED + family_of(config).model_type
    content = of_the_model(json.loads(config.to_json_string(use_diff=False)))
    content.pop("_commit_hash", None)
    return {
        **content,
        "model_type": model_type,
        "architectures": [model[0]],
        "dtype": model[1],
        "auto_map": {"AutoConfig": "kvslim_palu.Config", "AutoModelForCausalLM": "kvslim_palu.Model"},
        "kvslim": about,
    }


def _cache_bytes(described: Described) -> dict[str, float]:
    """Bytes per token of the compressed cache in bf16, measured on an empty cache that is filled, and without."""
    cache = LatentCache(described.layout)
    for layer, (key, value) in enumerate(described.ranks):
        keys, values = (torch.zeros(1, _TOKENS, sum(ranks), dtype=torch.bfloat16) for ranks in (key, value))
        cache.append(keys, values, layer, None)
    report = cache.report()
    return {
        "tokens": report.tokens,
        "compressed": report.nbytes / report.tokens,
        "uncompressed_bf16": report.dense_nbytes / report.tokens,
    }


def _hub_name(config: Any) -> str | None:
    """The hub id that the original was loaded from; paths of somebody's machine are left out."""
    name = str(getattr(config, "_name_or_path", "") or "")
    known = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not Path(name).exists()
    return name if known else None
