"""Writing to disk so that a reader never sees half of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvslim.errors import ConfigError


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside ``path`` and rename it: readers see the old file or the new one.

    Raises:
        ConfigError: the directory is missing or cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def check_writable(path: Path, *, directory: bool = False) -> None:
    """Find out, before work is done, whether ``path`` can be written; a missing directory is made.

    Args:
        path: a file to be written, or with ``directory=True`` a directory for several.
        directory: which of the two.

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    folder = path if directory else path.parent
    if not directory and path.is_dir():
        raise ConfigError(f"{path} is a directory. Give the name of a file to write.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}. Choose another place.") from error


def check_new_directory(path: Path) -> None:
    """Refuse a place where :func:`new_directory` could not put its directory, before any work is done.

    Raises:
        ConfigError: there is something already, or the parent cannot be written.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists already. Choose another place, or remove it first.")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be made: {parent} is not a directory that you can write to.")


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory that appears at ``path``, whole, when the block ends; if the block fails nothing is left.

    Raises:
        ConfigError: as :func:`check_new_directory`, or the disk is full.
    """
    check_new_directory(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield aside
        aside.chmod(0o755)
        aside.replace(path)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{path} cannot be written: {error.strerror or error}. Nothing was left behind."
            ) from error
        raise
