"""A run-time cache under a byte budget: what the budget allows, and what is taken off it first."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from kvslim.caching.compressed import CompressedCache
from kvslim.caching.report import header_bytes
from kvslim.errors import BudgetError
from kvslim.types import KVShape

_SHORT = 256  # tokens below which a prompt that cannot meet its ratio stays exact rather than being refused


class BudgetedCache(CompressedCache):
    """A cache whose compressed prefix takes at most ``1 / ratio`` of its bf16 bytes, or at most ``budget_bytes``.

    Args:
        shape, layer_slots: see :class:`~kvslim.caching.compressing.CompressingCache`, as for the other arguments.
        ratio: bf16 bytes over measured bytes; or
        budget_bytes: bytes of the whole batch, shared by rows in proportion to their tokens.
    """

    def __init__(
        self,
        shape: KVShape,
        layer_slots: Sequence[tuple[int | None, int | None]],
        *,
        ratio: float | None,
        budget_bytes: int | None,
        **settings: Any,
    ) -> None:
        super().__init__(shape, layer_slots, **settings)
        self._ratio, self._budget_bytes = ratio, budget_bytes

    def _why_exact(self, tokens: int) -> str | None:
        """Also a short prompt whose exact tokens would take more than half of what its ratio allows.

        The few bytes left would not hold the rest. A longer prompt raises ``BudgetError`` instead, and a byte budget is
        always taken at its word.
        """
        if why := super()._why_exact(tokens):
            return why
        if self._ratio is None or tokens >= _SHORT or 2 * self._fixed_bytes(tokens) <= self._allowed(tokens):
            return None
        why = (
            f"{tokens} tokens are too few for a ratio of {self._ratio:g}: sinks, window and header would take "
            "more than half of its bytes"
        )
        warnings.warn(f"{type(self).__name__}: {why}; the prompt stays exact.", stacklevel=6)
        return why

    def _allowed(self, tokens: int) -> int:
        """Bytes that the ratio allows for ``tokens`` tokens."""
        return int(self.shape.dense_bytes(tokens) / (self._ratio or 1))

    @property
    def _item_bytes(self) -> int:
        first = self.compressible[0]
        return first.keys.element_size() if first.is_initialized else 2

    def _header_bytes(self) -> int:
        """Bytes that describe a row in a file."""
        return header_bytes(2 * len(self._groups()))

    def _fixed_bytes(self, tokens: int) -> int:
        """Bytes of a row's sinks, window and header."""
        exact = min(tokens, self.n_sinks + self.n_window)
        return self.shape.dense_bytes(exact) * self._item_bytes // 2 + self._header_bytes()

    def _budget(self, row: int, tokens: int, all_tokens: int, least: int) -> int:
        """Bytes for the cells of one row: the user's budget less exact sinks and window, and the header."""
        total = self._allowed(tokens) if self._budget_bytes is None else self._budget_bytes * tokens // all_tokens
        fixed = self._fixed_bytes(tokens)
        if fixed + least > total:
            raise BudgetError(
                f"Row {row} has {tokens} tokens and a budget of {total} bytes. The least possible is {fixed + least} "
                f"bytes: {fixed} for its exact tokens (sinks and window) and the header, {least} for the rest. Raise "
                "the budget to that, or lower the ratio, the sinks or the window."
            )
        return total - fixed

    def _sealed_ratio(self) -> float:
        """The ratio of later tokens: the one asked for, or what the budget has come to."""
        if self._ratio is not None:
            return self._ratio
        prefix = self.prefix
        rows = {id(row): row for row in prefix.rows}.values() if prefix is not None else ()
        tokens = sum(row.length for row in rows)
        return self.shape.dense_bytes(tokens) / (self._budget_bytes or 1)
