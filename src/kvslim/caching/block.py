"""The storage form of one stretch of tokens, and generic walks over the tensors it keeps.

Every stored thing is a frozen dataclass of tensors and other such dataclasses. So byte counts, device moves and clones
need no code per form: they walk the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Block(Protocol):
    """Keys or values of one layer group for ``tokens`` consecutive tokens, compressed."""

    @property
    def tokens(self) -> int: ...

    @property
    def exact(self) -> bool:
        """Whether this is a copy of what the model made, rotated keys included."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that belong to this block and to no earlier one."""
        ...

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rebuild tokens ``start`` to ``stop`` of layer ``layer`` of the group: ``(kv_heads, tokens, head_dim)``.

        float32, or the model's dtype if the block is exact.
        """
        ...

    def crop(self, tokens: int) -> Self:
        """Keep the first ``tokens`` tokens, in storage of their own."""
        ...

    def scores(self, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``query · X̂ᵀ`` over tokens ``start`` to ``stop``, as if they were decoded.

        ``query`` is ``(kv_heads, n, head_dim)`` float32, the result ``(kv_heads, n, stop - start)`` float32.
        """
        ...

    def mix(self, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights · X̂`` over tokens ``start`` to ``stop``, as if they were decoded.

        ``weights`` is ``(kv_heads, n, stop - start)`` float32, the result ``(kv_heads, n, head_dim)`` float32.
        """
        ...


class DecodedProducts:
    """Products with a block by decoding it: what a block has that knows no shorter way."""

    def scores(self: Block, layer: int, query: Tensor, start: int, stop: int) -> Tensor:
        """``query · X̂ᵀ``; see :meth:`Block.scores`."""
        return query @ self.decode(layer, start, stop).to(query).mT

    def mix(self: Block, layer: int, weights: Tensor, start: int, stop: int) -> Tensor:
        """``weights · X̂``; see :meth:`Block.mix`."""
        return weights @ self.decode(layer, start, stop).to(weights)


class CodedBlock(DecodedProducts):
    """What blocks of codes have in common: all their tensors are their own, and count."""

    exact = False

    @property
    def nbytes(self) -> int:
        """See :meth:`Block.nbytes`."""
        return storage_bytes(iter_tensors(self))


@dataclass(frozen=True)
class ExactBlock(DecodedProducts):
    """A plain copy: the lossless codec (16 bits in a 16-bit model).

    Attributes:
        kept: ``(layers · kv_heads, tokens, head_dim)`` in the model's dtype, keys rotated.
        kv_heads: heads per layer.
    """

    kept: Tensor
    kv_heads: int

    exact = True

    @property
    def tokens(self) -> int:
        return int(self.kept.shape[1])

    @property
    def nbytes(self) -> int:
        return storage_bytes([self.kept])

    def decode(self, layer: int, start: int = 0, stop: int | None = None) -> Tensor:
        """A view of the copy."""
        return self.kept[layer * self.kv_heads : (layer + 1) * self.kv_heads, start:stop]

    def crop(self, tokens: int) -> Self:
        return dataclasses.replace(self, kept=self.kept[:, :tokens].clone())


def iter_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside dataclasses, tuples, lists and dictionaries, in field order."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from iter_tensors(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from iter_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_tensors(item)


def map_tensors(value: T, change: Callable[[Tensor], Tensor], seen: dict[int, Any] | None = None) -> T:
    """Rebuild ``value`` with ``change`` applied to every tensor; what was shared stays shared."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return seen[id(value)]  # type: ignore[no-any-return]  # what was stored under this id has the type of value
    result: Any = value
    if isinstance(value, Tensor):
        result = change(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(getattr(value, f.name), change, seen) for f in dataclasses.fields(value)}
        result = dataclasses.replace(value, **fields)
    elif isinstance(value, dict):
        result = {key: map_tensors(item, change, seen) for key, item in value.items()}
    elif isinstance(value, (tuple, list)):
        result = type(value)(map_tensors(item, change, seen) for item in value)
    seen[id(value)] = result
    return result  # type: ignore[no-any-return]  # same type as value by construction


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``: a view counts as all that it keeps alive, a share once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def mover(device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """A function that moves tensors to ``device`` such that those which share a storage share one there too."""
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not tensor.numel() or storage.nbytes() == tensor.numel() * tensor.element_size():
            return tensor.to(device)
        key = storage.data_ptr()
        if key not in moved:
            moved[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage).to(device)
        whole = moved[key].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return move
