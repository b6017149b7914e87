"""A folder of calibration statistics, each under the hash of everything that it depends on.

Calibrating a large model takes minutes to hours, and trying another rate or rule needs the same statistics again. An
entry is found only if the model's weights and configuration, the token windows and the settings are the same to the
last bit; the price is a pass over all weights, about a second per gigabyte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvslim.calibrating.stats_file import FORMAT_VERSION, read_stats, write_stats
from kvslim.errors import CheckpointError, ConfigError, ModelSourceError, UnsupportedModelError
from kvslim.models.store import user_cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("kvslim")

BYTES_AT_MOST = 8 * 10**9
"""Bytes that a folder keeps, enough for the Gram matrices of a model with 7 billion weights; the entries unused for
longest go first. Removing the folder is always safe."""

_SUFFIX = ".safetensors"
_CHUNK = 2**24
"""Elements of a weight that are hashed at a time."""

_NOT_THE_MODEL = ("_name_or_path", "transformers_version")
"""Entries of a configuration that say where a model came from, not what it is."""

Stats = TypeVar("Stats")


def user_folder() -> Path:
    """Where the command line keeps statistics: ``kvslim/statistics`` in the user's cache directory."""
    return user_cache_dir() / "kvslim" / "statistics"


class StatsCache:
    """Statistics of one model in a folder.

    Args:
        folder: made when it is first written to.
        model: the model, uncompressed. It is hashed once, here.

    Raises:
        UnsupportedModelError: weights are not in memory.
    """

    def __init__(self, folder: str | Path, model: PreTrainedModel) -> None:
        self.folder, self.model = Path(folder), model_hash(model)

    def get(self, kind: type[Stats], windows: Tensor, settings: dict[str, Any], make: Callable[[], Stats]) -> Stats:
        """The entry for these token windows and settings, or what ``make`` returns, which is then kept.

        An entry that cannot be read is replaced, and a folder that cannot be written is no obstacle; both are logged.
        """
        about = {
            "kind": kind.__name__,
            "settings": settings,
            "format": FORMAT_VERSION,
            "model": self.model,
            "windows": hashlib.sha256(windows.long().cpu().contiguous().numpy().tobytes()).hexdigest(),
            "shape": list(windows.shape),
        }
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{key}{_SUFFIX}"
        if path.exists():
            try:
                found = read_stats(kind, path)
            except (CheckpointError, ModelSourceError) as error:
                logger.warning("Stored calibration statistics are not usable (%s); they are made again.", error)
            else:
                logger.info("Calibration statistics taken from %s.", path)
                with suppress(OSError):
                    os.utime(path)  # so that what is used stays
                return found
        made = make()
        try:
            write_stats(made, path, about)
        except ConfigError as error:
            logger.warning("Calibration statistics were not kept: %s", error)
        else:
            _make_room(self.folder)
        return made


def _make_room(folder: Path) -> None:
    """Remove the entries that were unused for longest until the folder is within its limit."""
    entries = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with suppress(OSError):  # of another process, which has just removed it
            about = path.stat()
            entries.append((about.st_mtime_ns, about.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= BYTES_AT_MOST:
            return
        with suppress(OSError):
            path.unlink()
        total -= size
        logger.info("Removed %s: the statistics in %s passed %.1f GB.", path.name, folder, BYTES_AT_MOST / 1e9)


@torch.no_grad()
def model_hash(model: PreTrainedModel) -> str:
    """SHA-256 over the configuration and every byte of every weight and buffer, head and names included.

    The same on every device. Any change to a single weight shows.

    Raises:
        UnsupportedModelError: weights are not in memory (offloaded).
    """
    digest = hashlib.sha256(type(model).__name__.encode())
    settings = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedModelError(
                f"The weights of {name} are not in memory (offloaded), so the model cannot be recognized. Load all, or "
                f"calibrate without a cache of statistics."
            )
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for part in tensor.detach().reshape(-1).split(_CHUNK):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
