"""The folder in which a streamed compression keeps what is done, so that it can go on after it was killed.

manifest.json     what the inputs were and how many layers are done; everything it speaks of is whole on the disk
hidden-N.bin      the hidden states of all calibration windows before layer N, raw
checkpoint/       the new checkpoint, file by file under their final names

A step first writes its files, then the manifest, and only then removes what the step before needed. So a kill between
any two system calls leaves a manifest whose files are all there, and files beside it that the next run replaces.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvslim.errors import CheckpointError, ConfigError, KvslimError
from kvslim.files import check_writable, discard_unfinished, reason, replacing
from kvslim.streaming.tensors import bytes_of, fill

try:
    import fcntl
except ImportError:  # on Windows: nobody is kept from starting two runs in one folder
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
_MANIFEST, _LOCK, _CHECKPOINT = "manifest.json", "lock", "checkpoint"


@dataclass
class Work:
    """The state of one streamed compression.

    Attributes:
        folder: where it is kept.
        inputs: all that the result depends on, as JSON values.
        done: layers whose files are written; -1 before the embeddings.
        files: the sizes of what the manifest vouches for, by path in the folder.
        assembled: the checkpoint is complete, but for its place.
    """

    folder: Path
    inputs: dict[str, Any]
    done: int = -1
    files: dict[str, int] = field(default_factory=dict)
    assembled: bool = False

    @property
    def checkpoint(self) -> Path:
        return self.folder / _CHECKPOINT

    def hidden(self, layer: int) -> Path:
        """The file with the inputs of a layer."""
        return self.folder / f"hidden-{layer}.bin"

    def commit(self, done: int, written: Iterable[Path], outdated: Path | None = None) -> None:
        """Vouch for files that are whole, then give up one that is not needed any more.

        Raises:
            ConfigError: the manifest cannot be written.
        """
        self.done = done
        self.files |= {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in written}
        if outdated is not None:
            self.files.pop(outdated.name, None)
        self._write()
        if outdated is not None:
            outdated.unlink(missing_ok=True)

    def finish(self) -> None:
        """Note that the checkpoint is complete."""
        self.assembled = True
        self._write()

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "inputs": self.inputs,
            "done": self.done,
            "files": self.files,
            "assembled": self.assembled,
        }
        with replacing(self.folder / _MANIFEST, durable=True) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")


def used(folder: Path) -> int:
    """Bytes that the files in a folder take now, 0 if it is not there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def open_work(folder: Path, inputs: dict[str, Any], *, restart: bool) -> Iterator[Work]:
    """The work folder, made or continued. It stays when the block fails.

    Args:
        folder: where it is or will be.
        inputs: all that the result depends on, as JSON values.
        restart: forget what an earlier run has left there.

    Raises:
        ConfigError: it belongs to a run with other inputs or to another program, a run is going on there, or it cannot
            be written.
        CheckpointError: what is in it is damaged.
    """
    check_writable(folder, directory=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            yield _continued(folder, json.loads(json.dumps(inputs)), restart=restart)
    except OSError as error:
        if isinstance(error, KvslimError):
            raise
        raise ConfigError(f"{folder} cannot be written: {reason(error)}. The same command continues later.") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; the system lets go of it when the process ends, however it does."""
    if (folder / _MANIFEST).exists() or not any(folder.iterdir()) or (folder / _LOCK).exists():
        with (folder / _LOCK).open("a") as lock:
            if fcntl is not None:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise ConfigError(
                        f"Another run is going on in {folder}. Wait for it, or choose another."
                    ) from error
            yield
    else:
        raise ConfigError(f"{folder} holds other things than a compression in progress. Choose another work folder.")


def _continued(folder: Path, inputs: dict[str, Any], *, restart: bool) -> Work:
    discard_unfinished(folder)
    if restart:
        _clear(folder)
    path = folder / _MANIFEST
    if not path.exists():
        work = Work(folder, inputs)
        work._write()
        return work
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        before, rest = content["inputs"], (content["done"], content["files"], content["assembled"])
        kind = content["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}. Begin again with restart (--restart).") from error
    if kind != FORMAT or before != inputs:
        differing = sorted(name for name in {*before, *inputs} if before.get(name) != inputs.get(name))
        raise ConfigError(
            f"{folder} belongs to a compression with another {' and '.join(differing) or 'format'}. Give the same "
            f"inputs to continue it, choose another place, or begin again with restart (--restart)."
        )
    work = Work(folder, inputs, *rest)
    _check(work)
    return work


def _check(work: Work) -> None:
    """Require the files that the manifest vouches for, and remove all others of an unfinished step."""
    if work.assembled:
        return
    for name, size in work.files.items():
        path = work.folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise CheckpointError(f"{path} is missing or was changed. Begin again with restart (--restart).")
    for path in work.folder.glob("hidden-*.bin"):
        if path.name not in work.files:
            path.unlink()
    if work.checkpoint.is_dir():
        for path in work.checkpoint.iterdir():
            if path.relative_to(work.folder).as_posix() not in work.files:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _clear(folder: Path) -> None:
    """Remove what a run keeps, and nothing else; the manifest last, so that a kill leaves something to go on from."""
    for path in folder.glob("hidden-*.bin"):
        path.unlink()
    shutil.rmtree(folder / _CHECKPOINT, ignore_errors=True)
    (folder / _MANIFEST).unlink(missing_ok=True)


def is_work(folder: Path) -> bool:
    """Whether there is a run to go on with."""
    return (folder / _MANIFEST).is_file()


def remove_work(folder: Path) -> None:
    """Remove the folder of a finished run."""
    (folder / _LOCK).unlink(missing_ok=True)
    _clear(folder)
    with suppress(OSError):  # somebody put other things there
        folder.rmdir()


def write_hidden(path: Path, states: Iterable[Tensor], check: Callable[[Tensor], None]) -> None:
    """Write the hidden states of all windows, one after the other; the file appears whole.

    Args:
        path: where to.
        states: ``(1, length, hidden)`` each.
        check: called with each before it is written.

    Raises:
        ConfigError: it cannot be written.
    """
    with replacing(path, durable=True) as file:
        for state in states:
            check(state)
            file.write(bytes_of(state))


def read_hidden(path: Path, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """The hidden states ``(windows, length, hidden)`` window by window, ``(1, length, hidden)`` each.

    Raises:
        CheckpointError: the file ends before.
    """
    windows, length, hidden = shape
    try:
        with path.open("rb") as file:
            for _ in range(windows):
                state = torch.empty(1, length, hidden, dtype=dtype)
                fill(file, state)
                yield state.to(device)
    except OSError as error:
        raise CheckpointError(f"{path} was changed: {reason(error)}. Begin again with restart (--restart).") from error
