"""Calibration statistics as one safetensors file each, readable without trust in where it comes from.

Tensors are named after the fields of the dataclass, those of a tuple ``FIELD.0``, ``FIELD.1``, …; the numbers, the
format and its version are in the metadata, with whatever the writer says the statistics belong to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvslim.errors import CheckpointError, ModelSourceError
from kvslim.files import read_safetensors_header, reason, replacing, safetensors_header

FORMAT_VERSION = 1
_FORMAT = "kvslim-statistics"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16"}
"""Sums are float64; tables made from them may be narrower."""

Stats = TypeVar("Stats")


def stats_digest(stats: Any) -> str:
    """SHA-256 of everything in a dataclass of statistics, the same in every process and on every device."""
    return _hash(*_taken_apart(stats))


def write_stats(stats: Any, path: Path, about: dict[str, Any] | None = None) -> None:
    """Write a dataclass of tensors, tuples of tensors and counts; the file appears whole or not at all.

    Args:
        stats: an instance of the class that :func:`read_stats` is later given; float64, float32 or float16.
        path: the file.
        about: what the statistics belong to, as JSON values; :func:`read_about` gives it back.

    Raises:
        ConfigError: it cannot be written.
    """
    tensors, plain = _taken_apart(stats)
    described = {"kind": type(stats).__name__, "fields": plain, "about": about or {}, "sha256": _hash(tensors, plain)}
    metadata = {"format": _FORMAT, "version": str(FORMAT_VERSION), "description": json.dumps(described)}
    entries = {
        name: (_DTYPES[tensor.dtype], tensor.shape, tensor.numel() * tensor.element_size())
        for name, tensor in tensors.items()
    }
    with replacing(path) as file:  # tensor by tensor, as all together are gigabytes for a large model
        file.write(safetensors_header(entries, metadata))
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def read_stats(kind: type[Stats], path: Path) -> Stats:
    """Read what :func:`write_stats` wrote; the tensors are on the CPU.

    Raises:
        ModelSourceError: there is no such file, or it cannot be read.
        CheckpointError: it is damaged, truncated, of a newer format, or holds something else than ``kind``.
    """
    description = _describe(path)
    if description["kind"] != kind.__name__:
        raise CheckpointError(f"{path} holds {description['kind']}, not {kind.__name__}.")
    try:
        # Opening checks the header against the size of the file before any memory is taken for tensors.
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in description["order"]}
        if _hash(tensors, description["fields"]) != description["sha256"]:
            raise ValueError("its numbers are not those that were written")
        return _assembled(kind, description["fields"], tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, repr(error)) from error


def read_about(path: Path) -> dict[str, Any]:
    """What the statistics in a file belong to, as their writer put it. Errors as in :func:`read_stats`."""
    about: dict[str, Any] = _describe(path)["about"]
    return about


def _taken_apart(stats: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, and the other fields."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(stats):
        value = getattr(stats, field.name)
        if isinstance(value, Tensor):
            tensors[field.name] = value
        elif isinstance(value, tuple):
            tensors |= {f"{field.name}.{index}": one for index, one in enumerate(value)}
            plain[field.name] = {"tensors": len(value)}
        else:
            plain[field.name] = value
    return tensors, plain


def _assembled(kind: type[Stats], plain: dict[str, Any], tensors: dict[str, Tensor]) -> Stats:
    values: dict[str, Any] = {}
    left = dict(tensors)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # only dataclasses are stored
        stored = plain.get(field.name)
        if field.name in left:
            values[field.name] = left.pop(field.name)
        elif isinstance(stored, dict):
            count = stored["tensors"]
            if not isinstance(count, int) or not 0 <= count <= len(tensors):
                raise ValueError(f"{field.name} cannot be {count!r} tensors")
            values[field.name] = tuple(left.pop(f"{field.name}.{index}") for index in range(count))
        else:
            values[field.name] = _number(field.name, plain)
    if left:
        raise ValueError(f"nobody asked for {', '.join(sorted(left))}")
    for name, value in values.items():
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, Tensor) and (tensor.dtype not in _DTYPES or not torch.isfinite(tensor).all()):
                raise ValueError(f"{name} is not of finite numbers in a known precision")
    return kind(**values)


def _number(name: str, plain: dict[str, Any]) -> int | None:
    value = plain[name]
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"{name} is {value!r}, not a count")
    return value


def _describe(path: Path) -> dict[str, Any]:
    """The description in a file's metadata, its outer form checked."""
    try:
        header, _ = read_safetensors_header(path)
        metadata = header.get("__metadata__")
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{path} holds no calibration statistics of kvslim.")
        version = int(metadata["version"])
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format version {version}; this kvslim reads up to {FORMAT_VERSION}. Update kvslim."
            )
        description: dict[str, Any] = json.loads(metadata["description"])
        if not all(isinstance(description[name], dict) for name in ("fields", "about")):
            raise _damaged(path, "its description is none")
        description["order"] = [name for name in header if name != "__metadata__"]
        str(description["kind"])
    except CheckpointError:
        raise
    except OSError as error:
        raise ModelSourceError(f"The statistics {path} cannot be read: {reason(error)}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    return description


def _bytes(tensor: Tensor) -> Any:
    """The numbers of a tensor, little-endian, for writing and hashing."""
    numbers = tensor.detach().cpu().contiguous().numpy()
    return numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)


def _hash(tensors: dict[str, Tensor], plain: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name, tensor in tensors.items():
        width = "" if tensor.dtype == torch.float64 else f" {_DTYPES[tensor.dtype]}"
        digest.update(f"{name} {tuple(tensor.shape)}{width}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. Calibrate again.")


class StoredStats:
    """Mixin for the dataclasses of statistics: to a file and back."""

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Write to one safetensors file, whole or not at all; ``about`` are JSON values that say what it belongs to.

        Raises:
            ConfigError: it cannot be written.
        """
        write_stats(self, Path(path), about)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote; the tensors are on the CPU.

        Raises:
            ModelSourceError: there is no such file.
            CheckpointError: it is damaged, truncated, of a newer format, or holds other statistics.
        """
        return read_stats(cls, Path(path))
