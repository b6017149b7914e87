"""A directory that is either complete or absent: built aside, listed in a manifest, moved into place in one step."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from kvslim.errors import ModelSourceError
from kvslim.files import sha256
from kvslim.models.progress import Steps

logger = logging.getLogger("kvslim")

MANIFEST = "kvslim-manifest.json"
FORMAT = 1
QUICK_HASH_BYTES = 8 * 2**20
"""Files up to this size are hashed at every start; of larger ones only the size is compared."""
LOCK_SECONDS = 1800.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}

Build = Callable[[Path, Path], None]
"""``build(scratch, payload)`` fills ``payload``; both are fresh directories, ``scratch`` is thrown away."""


def user_cache_dir() -> Path:
    """The directory under which kvslim keeps its own: ``KVSLIM_CACHE``, else ``XDG_CACHE_HOME``, else ``~/.cache``."""
    for variable in ("KVSLIM_CACHE", "XDG_CACHE_HOME"):
        if value := os.environ.get(variable):
            return Path(value).expanduser().absolute()
    return Path.home() / ".cache"


def find_problem(directory: Path, recipe: str, *, verify: bool = False) -> str | None:
    """Say in words why ``directory`` is not a complete copy of ``recipe``, or return ``None`` if it is.

    Args:
        directory: where :func:`obtain` put, or would put, its result.
        recipe: what the manifest must name.
        verify: hash every file, not only the small ones.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["format"], manifest["recipe"]) != (FORMAT, recipe):
            return "it was made by another version of kvslim"
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, listed in files.items():
            size = (directory / name).stat().st_size
            if size != listed["size"]:
                return f"{name} has {size} bytes instead of {listed['size']}"
            if (verify or size <= QUICK_HASH_BYTES) and sha256(directory / name) != listed["sha256"]:
                return f"{name} has the right size but not the right content"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def obtain(
    target: Path, build: Build, *, recipe: str, about: Mapping[str, Any], needs_bytes: int, steps: Steps, verify: bool
) -> Path:
    """Return ``target``, built first if it is not there or not complete.

    Two processes may call this at once: one builds, the other waits and takes the result. If the build fails,
    nothing of it is left.

    Args:
        target: the directory to return.
        build: fills the new directory.
        recipe: names what ``build`` makes; a directory made by another recipe is made again.
        about: more entries for the manifest, JSON values.
        needs_bytes: free disk space in bytes that building takes at its peak.
        steps: where progress is shown.
        verify: hash every file of a directory that is already there.

    Raises:
        ModelSourceError: the disk is full, the directory cannot be written, or another process holds it too long.
    """
    if find_problem(target, recipe, verify=verify) is None:
        return target
    with _errors_in_words(target, needs_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target, steps):
            problem = find_problem(target, recipe, verify=verify)
            if problem is not None:
                if target.exists():
                    logger.warning("The cached model in %s is not usable (%s); it is made again.", target, problem)
                _build_aside(target, build, {"format": FORMAT, "recipe": recipe, **about}, needs_bytes)
    return target


def _build_aside(target: Path, build: Build, manifest: dict[str, Any], needs_bytes: int) -> None:
    """Build beside ``target`` and move the result into place; the caller holds the lock."""
    suffix = ".partial"
    for leftover in target.parent.glob(f".{target.name}-*{suffix}"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(target.parent).free < needs_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=suffix, dir=target.parent))
    try:
        scratch, payload = staging / "scratch", staging / "payload"
        scratch.mkdir()
        payload.mkdir()
        build(scratch, payload)
        _write_manifest(payload, manifest)
        if target.exists():
            target.rename(staging / "replaced")
        payload.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """List every file with size and hash; the files are on the disk before the manifest is."""
    files = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
        files[path.name] = {"size": path.stat().st_size, "sha256": sha256(path)}
    with (directory / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({**manifest, "files": files}, out, indent=2)
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def _exclusive(target: Path, steps: Steps) -> Iterator[None]:
    """Hold the lock of ``target`` against other processes and threads."""
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        with steps.step("wait for another process"):
            try:
                lock.acquire(timeout=LOCK_SECONDS)
            except Timeout as error:
                raise ModelSourceError(
                    f"Another process has been preparing {target} for {LOCK_SECONDS / 60:.0f} minutes. "
                    "End it and try again, or set KVSLIM_CACHE to another directory."
                ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _errors_in_words(target: Path, needs_bytes: int) -> Iterator[None]:
    """Turn errors of the file system into :class:`ModelSourceError` with the fix."""
    try:
        yield
    except ModelSourceError:
        raise
    except (OSError, SafetensorError) as error:
        code = getattr(error, "errno", None)
        if code in _FULL or "No space left" in str(error):
            fix = f"needs {needs_bytes / 1e6:.0f} MB free. Make room there, or set KVSLIM_CACHE to another disk"
        elif code in _FORBIDDEN:
            fix = "is not writable. Set KVSLIM_CACHE to a directory that is"
        else:
            raise ModelSourceError(f"Could not prepare the model in {target.parent}: {error}") from error
        raise ModelSourceError(f"The directory for models, {target.parent}, {fix}.") from error
