"""The one place that knows how the supported transformers versions (5.17 to 5.24) differ."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import nn

_CACHE_KEYWORDS = ("cache", "past_key_values")
"""What ``generate`` and the decoder layers call the cache: ``cache`` from 5.24 on, ``past_key_values`` before."""


_CACHE_ARGUMENTS = (*_CACHE_KEYWORDS, "layer_past")
"""What attention modules call it."""

_NOT_FOR_ATTENTION = ("use_cache", "output_attentions", "encoder_hidden_states", "encoder_attention_mask")
"""Arguments of attention modules that attention functions have no use for."""


def cache_keyword(model: Any) -> str:
    """The name under which ``model.generate`` keeps the cache in its ``model_kwargs``."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in _CACHE_KEYWORDS if name in parameters), "past_key_values")


def take_cache(kwargs: MutableMapping[str, Any]) -> Any:
    """Remove the cache from an attention module's keyword arguments, under any of its names, and return it."""
    found = [kwargs.pop(name, None) for name in _CACHE_ARGUMENTS]
    return next((cache for cache in found if cache is not None), None)


def named_arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an attention module was called with, by name, less what attention functions have no use for."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in given.items() if name not in _NOT_FOR_ATTENTION}


def eager_attention_of(attention: nn.Module) -> Callable[..., Any]:
    """The ``eager`` attention function that belongs to a model's own attention module.

    transformers keeps the eager variant beside each model, not in the common table of attention functions.
    """
    function: Callable[..., Any] = vars(sys.modules[type(attention).__module__])["eager_attention_forward"]
    return function


def record_attentions(attention: nn.Module) -> None:
    """Make ``output_attentions=True`` see a replaced attention module, which transformers finds by its class."""
    from transformers.utils import output_capturing

    # The misspelling is the name in transformers.
    output_capturing.install_output_capuring_hook(attention, "attentions", 1)
