"""Writing to disk so that a reader never sees half of it."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from kvslim.errors import ConfigError, KvslimError

_ASIDE = ".kvslim-"
"""Prefix of what is not finished yet; short, so that every name a file system takes can be written."""


_HEADER_AT_MOST = 100_000_000
"""Bytes of a safetensors header; the limit of the format."""


def sha256(path: Path) -> str:
    """The SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_utf8(path: Path, *, packed: bool = False) -> str:
    """The text of a UTF-8 file, with ``packed`` of one under xz.

    Raises:
        ConfigError: it is missing, unreadable, damaged or not UTF-8; the message says which.
    """
    try:
        data = path.read_bytes()
        return (lzma.decompress(data) if packed else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it.") from error
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"{path} is no complete xz file ({error}). Copy it again.") from error
    except OSError as error:
        raise ConfigError(f"The text {path} cannot be read: {reason(error)}. Give the path of a text file.") from error


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file that is written tensor by tensor, as the library takes all at once.

    Args:
        tensors: by name the dtype as the format calls it (``F64``), the shape, and the bytes; in the order of the file.
        metadata: texts by name.

    Returns:
        The length of the header and the header itself, padded so that values start at a multiple of 8.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, nbytes) in tensors.items():
        start, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file as it says, and where the values start. Soundness is the library's to check.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is truncated, or no such file.
    """
    with path.open("rb") as file:
        first = file.read(8)
        size = int.from_bytes(first, "little")
        if len(first) < 8 or not 2 <= size <= min(_HEADER_AT_MOST, path.stat().st_size - 8):
            raise ValueError("it is truncated, or no safetensors file")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    return header, 8 + size


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path`` and rename it: readers see the old file or the new one.

    A missing directory is made.

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[BinaryIO]:
    """A file to write to in pieces; it takes the place of ``path`` when the block ends, and is gone if that fails.

    A missing directory is made. With ``durable`` the data is on the disk before the old file is given up, so that a
    power cut cannot leave an empty file either.

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_ASIDE)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        if isinstance(error, KvslimError):
            raise
        raise ConfigError(f"{path} cannot be written: {reason(error)}. Nothing was changed.") from error


def discard_unfinished(folder: Path) -> None:
    """Remove what writers left in ``folder`` when they were killed. Nobody may be writing there."""
    for place in folder.glob(f"{_ASIDE}*"):
        place.unlink(missing_ok=True)


def check_writable(path: Path, *, directory: bool = False) -> None:
    """Find out, before work is done, whether ``path`` can be written. Nothing is made or left behind.

    Args:
        path: a file to be written, or with ``directory=True`` a directory for several.
        directory: which of the two.

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    folder = path if directory else path.parent
    try:
        if not directory and path.is_dir():
            raise ConfigError(f"{path} is a directory. Give the name of a file to write.")
        path.exists()  # an error for a name that the file system does not take
        with tempfile.TemporaryFile(dir=_nearest(folder), prefix=_ASIDE):
            pass
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {reason(error)}. Choose another place.") from error


def check_new_directory(path: Path) -> None:
    """Refuse a place where :func:`new_directory` could not put its directory, before any work is done.

    Raises:
        ConfigError: there is something already, or the parent cannot be written.
    """
    try:
        taken = path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))
        parent = _nearest(path.absolute().parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {reason(error)}. Choose another place.") from error
    if taken:
        raise ConfigError(f"{path} exists already. Choose another place, or remove it first.")
    try:
        with tempfile.TemporaryFile(dir=parent, prefix=_ASIDE):
            pass
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made: {parent} is not a directory that you can write to ({reason(error)})."
        ) from error


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory that appears at ``path``, whole, when the block ends; if the block fails nothing is left.

    Raises:
        ConfigError: as :func:`check_new_directory`, or the disk is full.
    """
    check_new_directory(path)
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    aside: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=_ASIDE))
        yield aside
        aside.chmod(0o755)
        aside.replace(path)
    except BaseException as error:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        with suppress(OSError):  # those that are not there, or that somebody else uses by now
            for parent in missing:
                parent.rmdir()
        if isinstance(error, OSError) and not isinstance(error, KvslimError):
            raise ConfigError(f"{path} cannot be written: {reason(error)}. Nothing was left behind.") from error
        raise


def _nearest(folder: Path) -> Path:
    """``folder``, or the nearest of its parents that is there."""
    folder = folder.absolute()
    return next((place for place in (folder, *folder.parents) if place.is_symlink() or place.exists()), folder)


def reason(error: OSError) -> str:
    """Why the system refused, in its words."""
    return error.strerror or str(error)
