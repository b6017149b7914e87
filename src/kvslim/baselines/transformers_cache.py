"""transformers' own quantized cache, with the backends optimum-quanto and hqq, as users run it.

Nothing here codes anything: the cache is :class:`transformers.cache_utils.QuantizedCache` with its documented settings
(groups of 64, axis 0 for quanto and 1 for hqq), made so that what it stores can be counted and what attention sees
of it can be compared. It codes the whole prefill at once and keeps up to ``residual_length`` later tokens exact; when
these are full it decodes everything and codes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from kvslim.attending.families import kv_shape_of, sliding_window_of
from kvslim.caching.block import iter_tensors, storage_bytes
from kvslim.errors import CacheStateError, ConfigError, MissingDependencyError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Backend = Literal["quanto", "hqq"]

_PACKAGES = {"quanto": ("optimum.quanto", "optimum-quanto"), "hqq": ("hqq", "hqq")}
_AXES = {"quanto": 0, "hqq": 1}  # what transformers' guide recommends for each
_BITS = {"quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}


class TransformersCache(QuantizedCache):  # type: ignore[misc,unused-ignore]  # transformers is not analysed everywhere
    """A ``QuantizedCache`` that counts its bytes.

    A model in float32 hands its keys and values over in bfloat16, as it would if it ran in bfloat16: scales, shifts and
    recent tokens are then stored as narrow as users have them.

    Args:
        model: a transformers model of a supported family, without sliding windows.
        backend: ``quanto`` or ``hqq``.
        bits: 2 or 4 for quanto, 1, 2, 3, 4 or 8 for hqq.
        group: numbers that share a scale and a shift; divides KV heads × head dim.
        residual_length: up to so many tokens after the prefill are kept exact.

    Raises:
        ConfigError: a setting is out of range.
        MissingDependencyError: the backend's package is not installed.
        UnsupportedModelError: the family is unknown, or a layer has a sliding window.
    """

    def __init__(
        self, model: PreTrainedModel, backend: Backend, bits: int, *, group: int = 64, residual_length: int = 128
    ) -> None:
        _check(model, backend, bits, group)
        axis = _AXES[backend]
        super().__init__(
            backend, model.config, nbits=bits, axis_key=axis, axis_value=axis, q_group_size=group,
            residual_length=residual_length,
        )  # fmt: skip
        self.backend, self.bits, self.group = backend, bits, group

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to layer ``layer_idx``; keys and values of everything cached, in the dtype they came in.

        Raises:
            ConfigError: hqq cannot pack this number of tokens.
        """
        dtype = key_states.dtype
        kept = torch.bfloat16 if dtype == torch.float32 else dtype
        try:
            pair = super().update(key_states.to(kept), value_states.to(kept), layer_idx, *args, **kwargs)
        except RuntimeError as error:
            groups = (self.get_seq_length(layer_idx) * key_states[:, :, 0].numel()) // self.group
            if self.backend != "hqq" or groups * self.bits % 8 == 0:
                raise
            raise ConfigError(
                f"hqq packs the codes of several groups into a byte, and {groups} groups at {self.bits} bits do not "
                "fill theirs. Use another number of tokens, or quanto."
            ) from error
        keys, values = (seen.to(dtype) for seen in pair)
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: the quantized form does not know tokens."""
        raise CacheStateError("transformers' QuantizedCache cannot take tokens back. Fill a new one.")

    @property
    def nbytes(self) -> int:
        """Bytes of every storage that the cache keeps alive: codes, scales, shifts, exact recent tokens."""
        return storage_bytes(tensor for layer in self.layers for tensor in stored_tensors(layer))

    def __str__(self) -> str:
        return f"transformers' cache on {self.backend}, {self.bits} bit"


def stored_tensors(layer: Any) -> Iterator[Tensor]:
    """Every plain tensor inside a layer of a ``QuantizedCache``."""
    if layer.is_initialized:
        parts = (layer._quantized_keys, layer._quantized_values, layer.keys, layer.values)
        for tensor in iter_tensors(parts):
            yield from _plain(tensor)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor itself; of a subclass that stands for others (quanto's), those that it is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _plain(getattr(tensor, name))
    else:
        yield tensor


def rebuilt(layer: QuantizedLayer) -> tuple[Tensor, Tensor]:
    """Keys and values of everything cached in a layer, ``(batch, kv_heads, tokens, head_dim)`` each."""
    keys, values = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
    if layer.keys.dim() == 4:  # transformers has an empty vector for no tokens
        keys, values = torch.cat((keys, layer.keys), dim=-2), torch.cat((values, layer.values), dim=-2)
    return keys, values


def _check(model: PreTrainedModel, backend: str, bits: int, group: int) -> None:
    if backend not in _PACKAGES:
        raise ConfigError(f"backend is one of {', '.join(_PACKAGES)}, not {backend!r}.")
    if bits not in _BITS[backend]:
        raise ConfigError(f"{backend} codes at {', '.join(map(str, _BITS[backend]))} bits, not {bits}.")
    shape = kv_shape_of(model)
    if group < 1 or shape.kv_heads * shape.head_dim % group:
        raise ConfigError(
            f"group must divide the {shape.kv_heads} KV heads x {shape.head_dim} features of a token, and {group} "
            "does not. Choose another group."
        )
    if any(window is not None for window in sliding_window_of(model)):
        raise UnsupportedModelError("transformers' QuantizedCache does not support layers with a sliding window.")
    module, package = _PACKAGES[backend]
    if not _installed(module):
        raise MissingDependencyError(
            f"The {backend} cache needs the package {package}, which is not installed: pip install {package}."
        )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not there
        return False
