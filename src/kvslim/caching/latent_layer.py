"""What a latent cache keeps of one layer: what does not depend on how latents are stored, and the exact form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvslim.errors import CacheStateError


class LatentLayer(CacheLayerMixin):  # type: ignore[misc,unused-ignore]  # transformers is not analysed in every set-up
    """Latents of one layer, keys before rotation: ``(batch, tokens, summed ranks)`` each.

    A layer with a sliding window keeps the last ``window - 1`` tokens, all that the next query can see.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.record_past = False
        self.seen = 0

    @property
    @abstractmethod
    def held(self) -> int:
        """Tokens kept now, at most those seen."""

    @abstractmethod
    def dense(self) -> tuple[Tensor, Tensor]:
        """Key and value latents of the held tokens as attention sees them, ``(batch, held, summed ranks)``."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Everything stored, for counting bytes."""

    @abstractmethod
    def round_exact(self, dtype: torch.dtype) -> None:
        """Round what is stored uncoded to a narrower ``dtype``; wider latents appended later widen it again."""

    @abstractmethod
    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Store more tokens; :attr:`seen` does not count them yet."""

    @abstractmethod
    def _keep(self, start: int, stop: int) -> None:
        """Keep the held tokens ``start`` to ``stop``, in storage of their own."""

    @abstractmethod
    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to every stored tensor, whose first axis is the batch."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop everything stored."""

    def activate_past_recording(self) -> None:
        """Keep tokens that left the window until the next :meth:`crop`, so that it can bring them back."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note dtype and device; storage grows with the tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append latents of ``n`` tokens and return those that these tokens may attend to, themselves last.

        Raises:
            CacheStateError: the latents have another rank than the cached ones.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._append(key_states, value_states)
        count = int(key_states.shape[1])
        self.seen += count
        keys, values = self.dense()
        visible = keys.shape[1]
        if self.sliding_window is not None:
            visible = min(visible, self.sliding_window - 1 + count)
        if not self.record_past:
            self._shrink_to_window()
        return keys[:, keys.shape[1] - visible :], values[:, values.shape[1] - visible :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what ``query_length`` new tokens will see."""
        if self.sliding_window is None:
            return self.seen + query_length, 0
        past = min(self.seen, self.sliding_window - 1)
        return past + query_length, self.seen - past

    def get_seq_length(self) -> int:
        """Tokens seen, those that left the window included."""
        return self.seen

    def get_max_length(self) -> int:
        """The window, or -1 for no limit."""
        return -1 if self.sliding_window is None else self.sliding_window

    def offload(self) -> None:
        """Move the latents to the CPU."""
        self._map(lambda stored: stored.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the latents back to where they came from."""
        self._map(lambda stored: stored.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget everything."""
        self._clear()
        self.is_initialized = False
        self.seen = 0

    def check_crop(self, removed: int) -> None:
        """Raise :class:`CacheStateError` if the last ``removed`` tokens cannot be taken back."""
        left_window = self.sliding_window is not None and self.seen >= self.sliding_window
        if removed and left_window and not self.record_past:
            raise CacheStateError(
                "A sliding-window layer has already dropped the tokens that cropping would bring back. Call "
                "cache.activate_past_recording() before the tokens that may be cropped."
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive number is the length to keep; 0 removes none."""
        removed = tokens_to_crop(tokens_to_remove, self.seen)
        self.check_crop(removed)
        self.seen -= removed
        if removed:
            self._keep(0, max(self.held - removed, 0))
        self._shrink_to_window()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows ``beam_idx``."""
        self._map(lambda stored: stored.index_select(0, beam_idx.to(stored.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row ``repeats`` times."""
        self._map(lambda stored: stored.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (numbers or a boolean mask)."""
        self._map(lambda stored: stored[indices.to(stored.device)])

    def _shrink_to_window(self) -> None:
        window, held = self.sliding_window, self.held
        if window is not None and held > window - 1:
            self._keep(held - (window - 1), held)


class ExactLatentLayer(LatentLayer):
    """Latents in the model's dtype: ``keys`` and ``values``, ``None`` while there are none."""

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__(sliding_window)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def held(self) -> int:
        return 0 if self.keys is None else int(self.keys.shape[1])

    def dense(self) -> tuple[Tensor, Tensor]:
        """The latents themselves."""
        if self.keys is None or self.values is None:
            raise CacheStateError("The cache is empty.")
        return self.keys, self.values

    def tensors(self) -> list[Tensor]:
        return [stored for stored in (self.keys, self.values) if stored is not None]

    def round_exact(self, dtype: torch.dtype) -> None:
        """Round all latents."""
        self._map(lambda latents: latents.to(dtype))

    def _append(self, keys: Tensor, values: Tensor) -> None:
        if self.keys is not None and self.values is not None:
            for held, new in ((self.keys, keys), (self.values, values)):
                check_rank(int(held.shape[-1]), new)
            keys = torch.cat([self.keys, keys], dim=1)
            values = torch.cat([self.values, values], dim=1)
        self.keys, self.values = owned(keys), owned(values)

    def _keep(self, start: int, stop: int) -> None:
        self._map(lambda latents: latents[:, start:stop])

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = owned(change(self.keys)), owned(change(self.values))

    def _clear(self) -> None:
        self.keys = self.values = None


def check_rank(rank: int, latents: Tensor) -> None:
    """Raise :class:`CacheStateError` if ``latents`` ``(batch, n, r)`` are not of the cache's summed ``rank``."""
    if rank != latents.shape[-1]:
        raise CacheStateError(
            f"The cache holds latents of rank {rank}, the model makes rank {latents.shape[-1]}. A cache belongs to "
            f"the model that filled it."
        )


def tokens_to_crop(request: int, length: int) -> int:
    """How many tokens ``crop(request)`` removes from ``length``: negative removes, positive keeps, both at most all."""
    return min(-request, length) if request <= 0 else max(length - request, 0)


def owned(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a copy if it is a view that would keep a larger storage alive."""
    exact = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if exact else tensor.clone(memory_format=torch.contiguous_format)
