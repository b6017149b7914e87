"""What a compressed layer hands to attention: stand-ins for its keys and values that are decoded only when touched.

A :class:`Handle` is a tensor by shape, dtype and device. Attention that knows it
(:mod:`kvslim.attending.handle_attention`) works on the :class:`LayerView` behind it and never rebuilds the whole.
Handles are given to models whose attention implementation is ``kvslim`` (:class:`Reader`); should one reach anything
else, whatever touches its numbers gets the dense tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kvslim.caching.prefix import Prefix

KEYS, VALUES = 0, 1
HANDLE_ATTENTION = "kvslim"
"""Name of the attention implementation that reads handles."""


class Reader:
    """The model that attends to a cache. It is asked at each step: its attention implementation may change between.

    Args:
        config: the live configuration of the model's decoder.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def reads_handles(self) -> bool:
        """Whether the attention implementation is ``kvslim``."""
        return bool(self._config._attn_implementation == HANDLE_ATTENTION)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The copy of a cache serves the same model, and follows it."""
        return self


class LayerView:
    """One layer as it was when attention asked: a compressed prefix and the exact tail behind it.

    Attributes:
        prefix: shared by all layers.
        slot: which of its layers this is.
        tail: exact keys and values behind it, each ``(batch, kv_heads, tokens, head_dim)``.
    """

    def __init__(self, prefix: Prefix, slot: int, tail: tuple[Tensor, Tensor]) -> None:
        self.prefix = prefix
        self.slot = slot
        self.tail = tail
        self._dense: tuple[Tensor, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(batch, kv_heads, columns, head_dim)`` of keys and of values."""
        batch, heads, tokens, features = self.tail[KEYS].shape
        return batch, heads, self.prefix.columns + tokens, features

    @property
    def decoded(self) -> bool:
        """Whether somebody asked for the dense tensors, which may have been changed in place since."""
        return self._dense is not None

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values rebuilt, each of :attr:`shape`; once, and kept as long as this view."""
        if self._dense is None:
            self._dense = self.rebuild()
        return self._dense

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # tracing it would take minutes and gain nothing
    def rebuild(self) -> tuple[Tensor, Tensor]:
        """Keys and values rebuilt, each of :attr:`shape`; nothing is kept."""
        pair = self.prefix.dense(self.slot, extra=self.tail[KEYS].shape[-2])
        for dense, tail in zip(pair, self.tail, strict=True):
            dense[:, :, self.prefix.columns :] = tail
        return pair

    def handles(self) -> tuple[Handle, Handle]:
        """Stand-ins for keys and values; what is decoded for one serves the other."""
        return Handle(self, KEYS), Handle(self, VALUES)


_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "itemsize", "nbytes")
_PLACES = ("is_cpu", "is_cuda", "is_meta", "is_nested")
_METADATA: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES + _PLACES),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_contiguous, Tensor.element_size, Tensor.get_device),
        *(Tensor.is_floating_point, Tensor.is_complex, torch.numel, torch.is_floating_point, torch.is_complex),
    )
)
"""What can be said of a handle without decoding it."""


class Handle(torch.Tensor):
    """The keys or values of a :class:`LayerView`: metadata at once, numbers on demand.

    Any operation on it runs on the dense tensor and returns plain tensors. The dense tensor lives as long as the view,
    that is as long as one of the two handles.
    """

    source: LayerView
    side: int

    @staticmethod
    def __new__(cls, source: LayerView, side: int) -> Handle:
        """A tensor without storage; ``side`` is ``KEYS`` or ``VALUES``."""
        like = source.prefix.like
        made: Handle = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=like.dtype, device=like.device)
        made.source, made.side = source, side
        return made

    def __init__(self, source: LayerView, side: int) -> None:
        super().__init__()

    def decode(self) -> Tensor:
        """The plain tensor that this stands for."""
        return self.source.dense()[self.side]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Every call from Python: metadata of the handle itself, else the same call on dense tensors."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = _dense_arguments(args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stubs have the disabled default, a plain function
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls that did not come through Python."""
        args, kwargs = _dense_arguments(args, kwargs)
        return func(*args, **kwargs)


def _dense_arguments(args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    made: tuple[Any, dict[str, Any]] = tree_map_only(Handle, Handle.decode, (args, kwargs or {}))
    return made
