"""One safetensors file that is written in one pass without a second copy in memory, and trusted only after its hashes.

    8 bytes            length of the JSON
    JSON               __metadata__: format version, two SHA-256, and what the session is about
    plan, input_ids    small; together with the JSON they are the *head*, hashed on their own
    tail, sliding      exact tensors
    arena              the tensors of the compressed prefix, end to end

``head_sha256`` covers the JSON, its own digits as zeros, and the small tensors; ``data_sha256``, which it contains,
covers the rest. So every byte but the length is covered, and a head can be trusted without reading the data.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from kvslim.config import is_count
from kvslim.errors import CheckpointError
from kvslim.files import reason, replacing

FORMAT_VERSION = 2
"""The newest. Files of JoltCache are of version 1, which names no method; all others are of version 2."""
HEAD = ("plan", "input_ids", "attention_mask")
"""The tensors that are read and checked without the rest."""
DATA = ("tail", "sliding", "arena")
"""The others."""
_KEY, _HEAD, _DATA = "kvslim_session", "head_sha256", "data_sha256"
_UNKNOWN = "0" * 64
_LONGEST_JSON = 1 << 24
_CHUNK = 1 << 22

DTYPES = {
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
"""What a session stores, by the names of safetensors."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class UnreadableHereError(CheckpointError):
    """The file may well be whole, but it cannot be opened, or another version of kvslim wrote it."""


@dataclass(frozen=True)
class Part:
    """One tensor of the file; ``pieces`` lie end to end in it, each contiguous once it is on the CPU."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # arrays have the buffer protocol


def file_bytes(about: dict[str, Any], parts: Sequence[Part]) -> int:
    """Size of the file that :func:`write` would make."""
    return 8 + len(_json(about, parts, _UNKNOWN, _UNKNOWN)) + sum(part.nbytes for part in parts)


def write(path: Path, about: dict[str, Any], head: Sequence[Part], data: Sequence[Part]) -> None:
    """Write a session file, atomically. ``head`` parts are small.

    Raises:
        ConfigError: it cannot be written; what was at ``path`` is still there.
    """
    parts = (*head, *data)
    small = b"".join(bytes(raw(piece)) for part in head for piece in part.pieces)
    digest = hashlib.sha256()
    with replacing(path, durable=True) as file:
        text = _json(about, parts, _UNKNOWN, _UNKNOWN)
        file.write(len(text).to_bytes(8, "little") + text + small)
        for part in data:
            for piece in part.pieces:
                view = raw(piece)
                digest.update(view)
                file.write(view)
        hashed = _json(about, parts, _UNKNOWN, digest.hexdigest())
        head_digest = hashlib.sha256(hashed + small).hexdigest()
        file.seek(8)
        file.write(_json(about, parts, head_digest, digest.hexdigest()))


def _json(about: dict[str, Any], parts: Sequence[Part], head: str, data: str) -> bytes:
    version = {_KEY: str(FORMAT_VERSION if "method" in about else 1), _HEAD: head, _DATA: data}
    entries: dict[str, Any] = {"__metadata__": {**version, "about": _compact(about)}}
    start = 0
    for part in parts:
        entries[part.name] = {
            "dtype": _NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [start, start + part.nbytes],
        }
        start += part.nbytes
    text = _compact(entries).encode()
    return text + b" " * (-len(text) % 8)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class SessionFile:
    """A session file opened for reading; its head has been checked.

    Attributes:
        path: where it is.
        about: what the session is about, as :func:`write` was given it.
        format_version: of the file.
        head_sha256: identifies the content.
        size: bytes of the file.

    Raises:
        CheckpointError: it is missing, truncated, was edited, is no session or of a newer format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise UnreadableHereError(f"The session {path} cannot be read: {reason(error)}.") from error
        try:
            self._read_head()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    @property
    def parts(self) -> dict[str, Part]:
        return self._parts

    @property
    def json_bytes(self) -> int:
        """Bytes in front of the first tensor."""
        return self._start

    def small(self, name: str) -> bytes:
        """The bytes of a tensor of the head; none if it is not there."""
        at, part = self._offsets.get(name, 0), self._parts.get(name)
        return self._small[at : at + part.nbytes] if part is not None else b""

    def check_data(self) -> None:
        """Read everything behind the head once and compare its hash.

        Raises:
            CheckpointError: it was edited.
        """
        digest = hashlib.sha256()
        self._file.seek(self._start + len(self._small))
        while chunk := self._read(_CHUNK):
            digest.update(chunk)
        if digest.hexdigest() != self._data_sha256:
            raise self.damaged("its data was edited")

    def peek(self, name: str, count: int) -> bytes:
        """The first ``count`` bytes of a tensor.

        Raises:
            CheckpointError: it has fewer.
        """
        part = self._parts.get(name)
        if part is None or part.nbytes < count:
            raise self.damaged(f"{name} is too short")
        self._file.seek(self._start + self._offsets[name])
        return self._read(count)

    def read(self, name: str, forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Iterator[Tensor]:
        """The tensors that lie end to end in ``name``, each in storage of its own on the CPU.

        Raises:
            CheckpointError: they are not exactly as large as it.
        """
        part = self._parts.get(name)
        stored = part.nbytes if part is not None else 0
        if sum(dtype.itemsize * math.prod(shape) for dtype, shape in forms) != stored:
            raise self.damaged(f"{name} is not as large as its plan says")
        self._file.seek(self._start + self._offsets.get(name, 0))
        for dtype, shape in forms:
            tensor = torch.empty(shape, dtype=dtype)
            view = raw(tensor)
            if view.nbytes and self._file.readinto(view) != view.nbytes:  # type: ignore[attr-defined]  # buffered
                raise self.damaged("it ends too early")
            yield tensor

    def damaged(self, what: str) -> CheckpointError:
        """The error to raise for this file."""
        return CheckpointError(
            f"The session {self.path} is damaged: {what}. Take another copy of it, or prefill again."
        )

    # ---- the head ------------------------------------------------------------------------------------------------

    def _read_head(self) -> None:
        self.size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._read(8), "little")
        if not 2 <= length <= min(self.size - 8, _LONGEST_JSON):
            raise self.damaged("it is too short, or no session file")
        text = self._read(length)
        try:
            entries = json.loads(text.decode())
            metadata = entries["__metadata__"]
            version = metadata[_KEY]
            if not isinstance(version, str) or not version.isascii() or not version.isdigit() or len(version) > 9:
                raise ValueError("it has no format version")
            self.format_version = int(version)
            if self.format_version > FORMAT_VERSION:
                raise UnreadableHereError(
                    f"The session {self.path} has format version {version}; this kvslim reads up to {FORMAT_VERSION}. "
                    "Update kvslim."
                )
            self._data_sha256, digest, about = metadata[_DATA], metadata[_HEAD], metadata["about"]
            self._start = 8 + length
            self._index(entries)
            self.about = json.loads(about)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.damaged(f"its description is not that of a session ({error})") from error
        if not all(isinstance(value, str) and len(value) == 64 for value in (digest, self._data_sha256)):
            raise self.damaged("it has no hashes")
        if not isinstance(self.about, dict):
            raise self.damaged("it does not say what it is about")
        self.head_sha256 = digest
        self._small = self._read(sum(self._parts[name].nbytes for name in HEAD if name in self._parts))
        zeroed = text.replace(digest.encode(), _UNKNOWN.encode(), 1)
        if hashlib.sha256(zeroed + self._small).hexdigest() != digest:
            raise self.damaged("its description was edited")

    def _index(self, entries: dict[str, Any]) -> None:
        """Where each tensor is: end to end in the order of the JSON, those of the head first, filling the file."""
        self._parts: dict[str, Part] = {}
        self._offsets: dict[str, int] = {}
        at, seen_data = 0, False
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not isinstance(shape, list) or not all(is_count(count, least=0) for count in shape):
                raise ValueError(f"{name} has no shape")
            part = Part(name, dtype, tuple(shape))
            if (start, stop) != (at, at + part.nbytes) or (seen_data and name in HEAD) or name not in HEAD + DATA:
                raise ValueError(f"{name} is not where it should be")
            self._parts[name], self._offsets[name], at = part, at, stop
            seen_data = seen_data or name in DATA
        if self._start + at != self.size:
            raise self.damaged(f"it has {self.size} bytes and should have {self._start + at}")

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except OSError as error:
            raise UnreadableHereError(f"The session {self.path} cannot be read: {reason(error)}.") from error
