"""Two caches compared to the last bit; shared by the tests of what is kept on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kvslim.quantizing.channels import ChannelLayout
from kvslim.types import Rope


def differences(one: Any, two: Any, path: str = "", seen: dict[int, int] | None = None) -> Iterator[str]:
    """Where two values differ: types, numbers, tensors with dtype and strides, and which objects are shared."""
    seen = {} if seen is None else seen
    if type(one) is not type(two):
        yield f"{path}: {type(one)} and {type(two)}"
    elif isinstance(one, torch.Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape and (steps(one) == steps(two) or not one.numel())
        if not alike or not torch.equal(one, two):
            yield path
    elif dataclasses.is_dataclass(one):
        if seen.setdefault(id(one), id(two)) != id(two) and not isinstance(one, Rope | ChannelLayout):
            yield f"{path}: shared otherwise"
        for field in dataclasses.fields(one):
            yield from differences(getattr(one, field.name), getattr(two, field.name), f"{path}.{field.name}", seen)
    elif isinstance(one, tuple | list) and len(one) == len(two):
        for index, pair in enumerate(zip(one, two, strict=True)):
            yield from differences(*pair, f"{path}[{index}]", seen)
    elif one != two:
        yield f"{path}: {one!r} and {two!r}"


def steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the axes along which there is somewhere to go."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
