"""The part of a run-time cache that writes itself to disk."""

from __future__ import annotations

from abc import abstractmethod
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvslim.caching.budgeted import BudgetedCache
from kvslim.checkpointing.session import Settings, serialized_bytes, write_session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StoredCache(BudgetedCache):
    """A budgeted cache that can be saved; the budget covers what it takes in the file."""

    @abstractmethod
    def session_settings(self) -> Settings:
        """What a session keeps beside the cache."""

    def save(
        self,
        path: str | PathLike[str],
        input_ids: Tensor | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Write the cache to one file, from which :func:`kvslim.load_cache` resumes bit for bit in another process.

        Arguments and errors: see :func:`~kvslim.checkpointing.session.write_session`.
        """
        write_session(Path(path), self, self.session_settings(), input_ids=input_ids, tokenizer=tokenizer)

    @property
    def serialized_nbytes(self) -> int:
        """Bytes that :meth:`save` writes for the compressed prefix, without a tokenizer: what the budget covers."""
        return serialized_bytes(self, self.session_settings())
