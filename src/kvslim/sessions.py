"""Resume a conversation from disk: the session files of :class:`~kvslim.jolt.JoltCache`.

``cache.save(path, input_ids=ids)`` writes one, :func:`load_session` reads it in another process.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvslim.checkpointing.session import Session, read_session
from kvslim.checkpointing.session_info import SessionInfo
from kvslim.checkpointing.session_info import info as session_info
from kvslim.errors import CheckpointError, ConfigError
from kvslim.jolt import JoltCache, JoltConfig, Price

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Session", "SessionInfo", "load_cache", "load_session", "session_info"]


def load_cache(
    path: str | PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    device: torch.device | str | None = None,
) -> JoltCache:
    """The cache that :meth:`JoltCache.save <kvslim.jolt.JoltCache.save>` wrote, as it was. See :func:`load_session`."""
    cache: JoltCache = load_session(path, model, tokenizer, device=device).cache
    return cache


def load_session(
    path: str | PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    device: torch.device | str | None = None,
) -> Session:
    """Read a session: the cache bit for bit, token ids and attention mask.

    To go on, give ``generate()`` the cache and all token ids, old and new; it computes only what is not cached.

    Args:
        path: a file that ``cache.save`` wrote.
        model: the model that filled the cache.
        tokenizer: compared with the one that was given on saving.
        device: where the tensors go, by default where the model is.

    Raises:
        CheckpointError: the file is missing, truncated, was edited, is no session or of a newer format.
        CacheStateError: the session is of another model, dtype, rotation or tokenizer; the message says which.
        UnsupportedModelError: the model has no row in the family table.
    """
    place = Path(path)
    session = read_session(
        place, model, lambda fields: JoltCache(model, JoltConfig.from_dict(fields)), device=device, tokenizer=tokenizer
    )
    if session.price:
        try:
            session.cache.price = Price(session.price[0], session.price[1:])
        except ConfigError as error:
            raise CheckpointError(f"The session {place} is damaged: its price is none ({error}).") from error
    return session
