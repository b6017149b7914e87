"""The one place that knows how the supported transformers versions (5.17 to 5.24) differ."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

_CACHE_KEYWORDS = ("cache", "past_key_values")
"""What ``generate`` and the decoder layers call the cache: ``cache`` from 5.24 on, ``past_key_values`` before."""


def cache_keyword(model: Any) -> str:
    """The name under which ``model.generate`` keeps the cache in its ``model_kwargs``."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in _CACHE_KEYWORDS if name in parameters), "past_key_values")


def take_cache(kwargs: MutableMapping[str, Any]) -> Any:
    """Remove the cache from an attention module's keyword arguments, under any of its names, and return it."""
    found = [kwargs.pop(name, None) for name in _CACHE_KEYWORDS]
    return next((cache for cache in found if cache is not None), None)


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
