"""Writing to disk so that a reader never sees half of it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvslim.errors import ConfigError


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
        ConfigError: as :func:`check_new_directory`.
    """
    check_new_directory(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield aside
        aside.chmod(0o755)
        aside.replace(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
