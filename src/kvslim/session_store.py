"""A directory of sessions that finds the longest cached prefix of a prompt, within a size limit.

The files are all there is: no index that could disagree with them. The head of a file (description, plan, token ids)
is read once per process; a look-up after that costs a directory listing and comparisons of token ids in memory. The
time of last use is the time stamp of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from kvslim.caching.snapshot import crop_to, take
from kvslim.checkpointing.fingerprint import ModelIdentity, identity_of
from kvslim.checkpointing.session import read_ids, real_columns, session_bytes
from kvslim.checkpointing.session_about import About
from kvslim.checkpointing.session_file import SessionFile, UnreadableHereError
from kvslim.config import is_count
from kvslim.errors import CacheStateError, CheckpointError, ConfigError
from kvslim.files import check_writable, discard_unfinished, reason
from kvslim.sessions import load_session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvslim.graded import GradedCache, GradedConfig, GradedStats
    from kvslim.jolt import JoltCache, JoltConfig

_SUFFIX = ".safetensors"
_INCOMING = ".incoming"
LEAST_MATCH = 64
"""Tokens that a stored session must have in common with a prompt. Below, prefilling them again takes no time, and
a long session cropped to them would still carry factors made for all of its tokens."""


class Found(NamedTuple):
    """A cache for the beginning of a prompt.

    Attributes:
        cache: holds the first ``tokens`` tokens; pass it to ``generate()`` with the whole prompt.
        tokens: how many, at least one fewer than the prompt has.
    """

    cache: JoltCache | GradedCache
    tokens: int


@dataclass(frozen=True)
class Entry:
    """One stored session.

    Attributes:
        name: how :meth:`SessionStore.remove` calls it.
        tokens: tokens cached.
        nbytes: size of the file.
        last_used: seconds since the epoch.
        model: the model that it belongs to.
        config: settings of its cache.
    """

    name: str
    tokens: int
    nbytes: int
    last_used: float
    model: ModelIdentity
    config: dict[str, Any]


@dataclass(frozen=True)
class _Head:
    """What a look-up needs to know of a file."""

    ids: np.ndarray[Any, np.dtype[np.int32]]
    model: ModelIdentity
    config: dict[str, Any]
    stats: str | None

    @property
    def croppable(self) -> bool:
        """A sliding-window layer that has dropped tokens cannot go back."""
        return self.model.window is None or len(self.ids) < self.model.window

    def usable(self, prompt: np.ndarray[Any, np.dtype[np.int64]]) -> int:
        """Tokens of ``prompt`` that the session can stand for; one is left to be computed."""
        shorter = min(len(self.ids), len(prompt))
        differ = np.flatnonzero(self.ids[:shorter] != prompt[:shorter])
        common = min(int(differ[0]) if len(differ) else shorter, len(prompt) - 1)
        return common if common == len(self.ids) or self.croppable else 0


class SessionStore:
    """Keep caches of finished prompts and conversations, one row each; find the one that a new prompt goes on from.

    Several processes may use one directory at once. Those that write take turns by a lock; those that read do not wait.
    What was used least recently makes room for what is new.

    Args:
        directory: made if it is missing; nothing else should be kept there.
        limit_bytes: size of all sessions together, at most.

    Raises:
        ConfigError: the limit is no positive integer, or the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str], limit_bytes: int) -> None:
        if not is_count(limit_bytes):
            raise ConfigError(f"limit_bytes is a positive integer, not {limit_bytes!r}.")
        self.directory, self.limit_bytes = Path(directory), limit_bytes
        check_writable(self.directory, directory=True)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.directory} cannot be made: {reason(error)}. Choose another place.") from error
        self._heads: dict[str, _Head] = {}

    # ---- writing -------------------------------------------------------------------------------------------------

    def put(
        self, cache: JoltCache | GradedCache, input_ids: Tensor, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> str:
        """Store ``cache`` and return its name.

        The same tokens under the same model, settings and calibration statistics replace each other.

        Args:
            cache: a filled cache of one row without padding.
            input_ids: integers ``(1, tokens)``, all that is cached and perhaps more.
            tokenizer: its vocabulary is recorded as a hash.

        Raises:
            CacheStateError: the cache is empty, has several rows or padding, or its model is gone.
            ConfigError: ``input_ids`` do not fit, the session alone is larger than the limit, or the disk is full.
                Nothing is lost then.
        """
        state = take(cache)
        if state.batch != 1 or not bool(real_columns(state).all()):
            raise CacheStateError(
                "The store keeps single rows without padding. Select one with cache.batch_select_indices()."
            )
        settings, ids = cache.session_settings(), torch.as_tensor(input_ids)
        ids = ids[:, : state.columns] if ids.dim() == 2 else ids
        size = session_bytes(cache, settings, input_ids=ids, tokenizer=tokenizer)
        if size > self.limit_bytes:
            raise ConfigError(
                f"The session takes {size} bytes; the store is limited to {self.limit_bytes}. Nothing was removed."
            )
        assert settings.model is not None  # session_bytes has refused that
        name = _name(identity_of(settings.model), settings.config, settings.stats, ids)
        with self._writing():
            incoming = self.directory / _INCOMING
            discard_unfinished(self.directory)  # of processes that were killed: who writes has the lock
            try:
                cache.save(incoming, ids, tokenizer)
                self._make_room(incoming.stat().st_size, keep=name)
                incoming.replace(self._path(name))
            finally:
                incoming.unlink(missing_ok=True)
        return name

    def _make_room(self, size: int, keep: str) -> None:
        """Remove what was used least recently until ``size`` more bytes fit; ``keep`` will be replaced."""
        files = sorted(self._files(), key=lambda file: file[1].st_mtime_ns)
        total = sum(stat.st_size for name, stat in files if name != keep)
        for name, stat in files:
            if total + size <= self.limit_bytes:
                break
            if name != keep:
                self._path(name).unlink(missing_ok=True)
                total -= stat.st_size

    def remove(self, name: str) -> bool:
        """Remove a session; False if there is none of this name."""
        if name not in {known for known, _ in self._files()}:
            return False
        with self._writing():
            self._path(name).unlink(missing_ok=True)
        return True

    # ---- reading -------------------------------------------------------------------------------------------------

    def find(
        self,
        input_ids: Tensor,
        model: PreTrainedModel,
        config: JoltConfig | GradedConfig | None = None,
        *,
        stats: GradedStats | None = None,
        device: torch.device | str | None = None,
    ) -> Found | None:
        """The cache of the longest beginning of a prompt that is stored, or None.

        A session that goes on differently is cropped to what it has in common with the prompt. What is cropped out of
        a compressed prefix decodes as it did in the whole. Sessions of models with sliding windows serve only whole
        once the window is full.

        Args:
            input_ids: integers ``(1, tokens)``.
            model: sessions of other models do not count.
            config: nor do sessions with other settings, unless this is None.
            stats: sessions of graded caches count only if they were made with these calibration statistics.
            device: where the tensors go, by default where the model is.

        Raises:
            ConfigError: ``input_ids`` are no single row.
            UnsupportedModelError: the model has no row in the family table.
        """
        prompt = torch.as_tensor(input_ids).to("cpu")
        if prompt.dim() != 2 or prompt.shape[0] != 1 or prompt.is_floating_point():
            raise ConfigError(f"input_ids are integers (1, tokens), not {tuple(prompt.shape)} {prompt.dtype}.")
        wanted, identity, damaged = prompt[0].numpy(), identity_of(model), list[str]()
        usable = (None, stats.digest if stats is not None else None)
        try:
            candidates = []
            for name, stat, head in self._known(damaged):
                fits = head.model == identity and head.stats in usable
                fits = fits and (config is None or _same(head.config, config.to_dict()))
                tokens = head.usable(wanted) if fits else 0
                if tokens >= LEAST_MATCH:
                    candidates.append((tokens, -len(head.ids), stat.st_mtime_ns, name))
            for tokens, *_, name in sorted(candidates, reverse=True):
                if (cache := self._load(name, model, stats, device, damaged, wanted[:tokens])) is not None:
                    crop_to(cache, tokens)
                    with suppress(OSError):  # removed meanwhile, or a directory that may only be read
                        os.utime(self._path(name), ns=(time.time_ns(),) * 2)
                    return Found(cache, tokens)
            return None
        finally:
            _warn_of(damaged)

    def entries(self) -> list[Entry]:
        """All sessions that can be read here, those used last first."""
        damaged: list[str] = []
        entries = [
            Entry(name, len(head.ids), stat.st_size, stat.st_mtime_ns / 1e9, head.model, head.config)
            for name, stat, head in self._known(damaged)
        ]
        _warn_of(damaged)
        return sorted(entries, key=lambda entry: -entry.last_used)

    @property
    def nbytes(self) -> int:
        """Size of all sessions together."""
        return sum(stat.st_size for _, stat in self._files())

    def _known(self, damaged: list[str]) -> Iterator[tuple[str, os.stat_result, _Head]]:
        """Every readable session; what is damaged is removed and named in ``damaged``."""
        files = list(self._files())
        self._heads = {name: self._heads[name] for name, _ in files if name in self._heads}
        for name, stat in files:
            if name not in self._heads:
                try:
                    self._heads[name] = _read_head(self._path(name))
                except UnreadableHereError:
                    continue
                except CheckpointError as error:
                    self._remove_damaged(name, error, damaged)
                    continue
            yield name, stat, self._heads[name]

    def _load(
        self,
        name: str,
        model: PreTrainedModel,
        stats: GradedStats | None,
        device: torch.device | str | None,
        damaged: list[str],
        beginning: np.ndarray[Any, np.dtype[np.int64]],
    ) -> JoltCache | GradedCache | None:
        try:
            session = load_session(self._path(name), model, stats=stats, device=device)
            ids = session.input_ids
            if (
                ids is None or ids[0, : len(beginning)].tolist() != beginning.tolist()
            ):  # not the file that was looked at
                self._heads.pop(name, None)
                return None
            cache: JoltCache | GradedCache = session.cache
            return cache
        except UnreadableHereError:  # removed meanwhile
            return None
        except CheckpointError as error:
            self._remove_damaged(name, error, damaged)
            return None

    def _remove_damaged(self, name: str, error: CheckpointError, damaged: list[str]) -> None:
        """Look again when nobody writes: another process may have replaced the file."""
        self._heads.pop(name, None)
        with self._writing():
            try:
                _read_head(self._path(name), whole=True)
            except UnreadableHereError:
                return
            except CheckpointError:
                self._path(name).unlink(missing_ok=True)
                damaged.append(str(error))

    # ---- files ---------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{_SUFFIX}"

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        try:
            for place in list(os.scandir(self.directory)):
                if place.name.endswith(_SUFFIX) and not place.name.startswith("."):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        yield place.name.removesuffix(_SUFFIX), place.stat()
        except OSError as error:
            raise ConfigError(f"The store {self.directory} cannot be read: {reason(error)}.") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One process at a time changes the directory."""
        try:
            with FileLock(self.directory / ".lock"):
                yield
        except OSError as error:
            raise ConfigError(f"The store {self.directory} cannot be written: {reason(error)}.") from error


def _read_head(path: Path, *, whole: bool = False) -> _Head:
    with SessionFile(path) as file:
        about = About.of_file(file)
        ids = read_ids(file, about)
        if ids is None or ids.shape[0] != 1:
            raise file.damaged("it has not the token ids of one row")
        if whole:
            file.check_data()
        return _Head(ids[0].numpy().astype(np.int32), about.model, about.config_of(file), about.stats)


def _name(identity: ModelIdentity, config: dict[str, Any], stats: str | None, ids: Tensor) -> str:
    """The same for the same tokens, model, settings and calibration statistics."""
    parts = [identity.to_dict(), config, *([stats] if stats is not None else [])]
    what = json.dumps(parts, sort_keys=True).encode()
    return hashlib.sha256(what + ids.to("cpu", torch.int32).numpy().tobytes()).hexdigest()[:40]


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def _warn_of(damaged: Sequence[str]) -> None:
    for what in damaged:
        warnings.warn(f"{what} The store has removed it.", stacklevel=3)
