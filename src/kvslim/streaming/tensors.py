"""Safetensors files read and written in pieces: no file is mapped, and no tensor has to be in memory to be copied.

The format is eight bytes with the length of a header, the header (JSON: dtype, shape and place of every tensor), then
the values. Whether a file is whole and its header sound is decided by the safetensors library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvslim.checkpointing.latent_metadata import INDEX, WEIGHTS
from kvslim.errors import ModelSourceError, UnsupportedModelError
from kvslim.files import read_safetensors_header, reason, replacing, safetensors_header

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _FLOATS.items()}
_OLD_NAMES = {"lm_head.": "embed_out."}
"""Starts of names in transformers, and what they are in the files of one family (gpt_neox)."""
_BLOCK = 16 << 20
"""Bytes of a tensor that are in memory at a time while it is copied."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        path: the file.
        start: of its values, in bytes from the start of the file.
        kind: its dtype as safetensors calls it.
        shape: of the tensor.
    """

    path: Path
    start: int
    kind: str
    shape: tuple[int, ...]

    def read(self, dtype: torch.dtype) -> Tensor:
        """The whole tensor on the CPU, as ``dtype``.

        Raises:
            ModelSourceError: the file cannot be read.
            UnsupportedModelError: it is no plain float tensor.
        """
        return self._values(0, prod(self.shape)).to(dtype).view(self.shape)

    def rows(self, wanted: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of a matrix with these sorted numbers; the others are not kept. Errors as in :meth:`read`."""
        width = prod(self.shape[1:])
        found = torch.empty(len(wanted), *self.shape[1:], dtype=dtype)
        for place, row in enumerate(wanted.tolist()):
            found[place] = self._values(row * width, width).view(self.shape[1:])
        return found

    def blocks(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """All values in order, flat, as ``dtype``, a few megabytes at a time. Errors as in :meth:`read`."""
        count, step = prod(self.shape), _BLOCK // self._dtype.itemsize
        for start in range(0, count, step):
            yield self._values(start, min(step, count - start)).to(dtype)

    @property
    def _dtype(self) -> torch.dtype:
        if self.kind not in _FLOATS:
            raise UnsupportedModelError(
                f"{self.path} holds weights of type {self.kind}, not plain float weights. Give the model before "
                f"quantization."
            )
        return _FLOATS[self.kind]

    def _values(self, first: int, count: int) -> Tensor:
        values = torch.empty(count, dtype=self._dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start + first * values.itemsize)
                fill(file, values)
        except OSError as error:
            raise ModelSourceError(f"{self.path} cannot be read: {reason(error)}. Copy the model again.") from error
        return values


def fill(file: BinaryIO, values: Tensor) -> None:
    """Read ``values`` from a file, in place.

    Raises:
        OSError: the file ends before.
    """
    place: memoryview = values.flatten().view(torch.uint8).numpy().data
    while place:
        if not (count := file.readinto(place)):  # type: ignore[attr-defined]  # a raw or buffered file
            raise OSError("it is shorter than before")
        place = place[count:]


class SourceWeights:
    """The safetensors files of a model directory.

    Args:
        folder: with ``model.safetensors``, or several files and their index.

    Raises:
        ModelSourceError: there are none, one is missing, truncated or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.headers: dict[str, str] = {}
        self._stored: dict[str, Stored] = {}
        for name in _weight_files(folder):
            self._stored |= self._read_header(folder / name)

    def _read_header(self, path: Path) -> dict[str, Stored]:
        try:
            with safe_open(path, framework="numpy"):  # checks header and size of the file
                pass
            header, start = read_safetensors_header(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelSourceError(
                f"{path} is missing, truncated or damaged ({error}). Copy the model again."
            ) from error
        self.headers[path.name] = hashlib.sha256(json.dumps(header).encode()).hexdigest()
        header.pop("__metadata__", None)
        return {
            name: Stored(path, start + about["data_offsets"][0], about["dtype"], tuple(about["shape"]))
            for name, about in header.items()
        }

    def find(self, name: str, prefix: str) -> Stored | None:
        """The tensor called ``name``, also under an old name or where files leave out the base model's ``prefix``."""
        old = next(
            (before + name.removeprefix(now) for now, before in _OLD_NAMES.items() if name.startswith(now)), name
        )
        places = (name, name.removeprefix(prefix), old)
        return next((self._stored[place] for place in places if place in self._stored), None)

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all float tensors.

        Raises:
            UnsupportedModelError: there are several, or none.
        """
        kinds = sorted({stored.kind for stored in self._stored.values() if stored.kind in _FLOATS})
        if len(kinds) != 1:
            raise UnsupportedModelError(
                f"The weights in {self.folder} are of {' and '.join(kinds) or 'no'} float types. Choose one dtype."
            )
        return _FLOATS[kinds[0]]

    def files(self) -> dict[str, list[Any]]:
        """Size, time of change and header hash of each file, to tell whether they are the same at another time."""
        facts = {name: (self.folder / name).stat() for name in self.headers}
        return {name: [fact.st_size, fact.st_mtime_ns, self.headers[name]] for name, fact in facts.items()}


def _weight_files(folder: Path) -> list[str]:
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = any(folder.glob("pytorch_model*.bin"))
        why = ", only pickled ones, which kvslim does not load. Convert them first." if pickled else "."
        raise ModelSourceError(f"{folder} has no safetensors weights{why}")
    try:
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted(set(listed))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelSourceError(f"{folder / INDEX} is damaged: {error!r}. Copy the model again.") from error
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ModelSourceError(
            f"{folder / INDEX} lists {wrong[0]!r}, which is no file beside it. Copy the model again."
        )
    return names


def write_tensors(path: Path, tensors: Mapping[str, Tensor | Stored], dtype: torch.dtype) -> None:
    """Write a safetensors file; it appears whole and on the disk, or not at all.

    Args:
        path: where to.
        tensors: by name, in memory or in other files.
        dtype: of all of them in the new file.

    Raises:
        ConfigError: it cannot be written, as on a full disk.
        ModelSourceError: a stored tensor cannot be read.
    """
    entries = {
        name: (_NAMES[dtype], tensor.shape, prod(tensor.shape) * dtype.itemsize) for name, tensor in tensors.items()
    }
    with replacing(path, durable=True) as file:
        file.write(safetensors_header(entries, {"format": "pt"}))
        for tensor in tensors.values():
            for block in tensor.blocks(dtype) if isinstance(tensor, Stored) else [tensor.detach().to(dtype)]:
                file.write(bytes_of(block))


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a tensor as they are stored; no copy of a contiguous one on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def names_in(path: Path) -> dict[str, int]:
    """The tensors of a file that :func:`write_tensors` made, with their sizes in bytes."""
    content, _ = read_safetensors_header(path)
    content.pop("__metadata__")
    return {name: about["data_offsets"][1] - about["data_offsets"][0] for name, about in content.items()}
