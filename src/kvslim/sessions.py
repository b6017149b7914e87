"""Resume a conversation from disk: the session files of JoltCache and GradedCache.

``cache.save(path, input_ids=ids)`` writes one, :func:`load_session` reads it in another process.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvslim.checkpointing.session import Session, read_session
from kvslim.checkpointing.session_about import About
from kvslim.checkpointing.session_info import SessionInfo
from kvslim.checkpointing.session_info import info as session_info
from kvslim.errors import CacheStateError, CheckpointError, ConfigError
from kvslim.graded import GradedCache, GradedConfig, GradedStats
from kvslim.jolt import JoltCache, JoltConfig, Price

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Session", "SessionInfo", "load_cache", "load_session", "session_info"]


def load_cache(
    path: str | PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    stats: GradedStats | None = None,
    device: torch.device | str | None = None,
) -> JoltCache | GradedCache:
    """The cache that ``cache.save`` wrote, of the class that it was, as it was. See :func:`load_session`."""
    cache: JoltCache | GradedCache = load_session(path, model, tokenizer, stats=stats, device=device).cache
    return cache


def load_session(
    path: str | PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    stats: GradedStats | None = None,
    device: torch.device | str | None = None,
) -> Session:
    """Read a session: the cache bit for bit, token ids and attention mask.

    To go on, give ``generate()`` the cache and all token ids, old and new; it computes only what is not cached.

    Args:
        path: a file that ``cache.save`` wrote.
        model: the model that filled the cache.
        tokenizer: compared with the one that was given on saving.
        stats: the calibration statistics that a graded cache was made with; other sessions need none.
        device: where the tensors go, by default where the model is.

    Raises:
        CheckpointError: the file is missing, truncated, was edited, is no session or of a newer format.
        CacheStateError: the session is of another model, dtype, rotation, tokenizer or calibration; the message says
            which.
        ConfigError: ``stats`` is none.
        UnsupportedModelError: the model has no row in the family table.
    """
    place = Path(path)
    if stats is not None and not isinstance(stats, GradedStats):
        raise ConfigError(f"stats is a GradedStats (kvslim.calibrate, GradedStats.load), not {stats!r:.80}.")

    def empty(about: About, fields: dict[str, Any]) -> JoltCache | GradedCache:
        if about.method == "jolt":
            return JoltCache(model, JoltConfig.from_dict(fields))
        return GradedCache(model, _the_stats(place, about, stats), GradedConfig.from_dict(fields))

    session = read_session(place, model, empty, device=device, tokenizer=tokenizer)
    if session.price:
        try:
            session.cache.price = Price(session.price[0], session.price[1:])
        except ConfigError as error:
            raise CheckpointError(f"The session {place} is damaged: its price is none ({error}).") from error
    return session


def _the_stats(path: Path, about: About, stats: GradedStats | None) -> GradedStats:
    """The statistics, if they are those that the session was made with: its codes mean nothing on other channels.

    Raises:
        CacheStateError: they are not, or there are none.
    """
    if stats is None:
        raise CacheStateError(
            f"The session {path} is of a GradedCache, whose codes need the calibration statistics that it was made "
            f"with (SHA-256 {about.stats}). Pass stats=GradedStats.load(...)."
        )
    if stats.digest != about.stats:
        raise CacheStateError(
            f"The session {path} was made with other calibration statistics (SHA-256 {about.stats}) than those given "
            f"({stats.digest}). Load the file that it was made with, or prefill again."
        )
    return stats
