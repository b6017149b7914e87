"""Which model and which tokenizer a session belongs to: what has to agree for keys and values to mean the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.attending.families import base_model_of, family_of, kv_shape_of, sliding_window_of, text_config
from kvslim.config import JsonConfig, is_count
from kvslim.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SAMPLES = 64
"""Elements of every parameter that go into the hash of the weights."""


@dataclass(frozen=True)
class ModelIdentity(JsonConfig):
    """What makes keys and values of two models interchangeable.

    Attributes:
        type: ``config.model_type`` of the decoder.
        layers: decoder layers.
        kv_heads: KV heads per layer.
        head_dim: features per head.
        vocab: entries of the embedding.
        dtype: of the weights, such as ``bfloat16``.
        sliding: layers with a sliding window.
        window: tokens that these see, or None.
        rope: ``config.rope_parameters``; lists in it (longrope) as a hash.
        weights: SHA-256, see :func:`weights_hash`.
    """

    type: str
    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str
    sliding: int
    window: int | None
    rope: dict[str, Any]
    weights: str

    def __post_init__(self) -> None:
        counts = (self.layers, self.kv_heads, self.head_dim, self.vocab)
        if not all(is_count(count) and count < 1 << 31 for count in counts):
            raise ConfigError(f"layers, kv_heads, head_dim and vocab are counts, not {counts!r}.")
        if not is_count(self.sliding, least=0) or self.sliding > self.layers:
            raise ConfigError(f"sliding is at most {self.layers} layers, not {self.sliding!r}.")
        if (self.window is None) != (self.sliding == 0) or not (self.window is None or is_count(self.window)):
            raise ConfigError(f"window is a token count if layers slide, not {self.window!r}.")
        if not all(isinstance(name, str) for name in (self.type, self.dtype, self.weights)):
            raise ConfigError("type, dtype and weights are strings.")
        if not isinstance(self.rope, dict):
            raise ConfigError(f"rope is a table of parameters, not {self.rope!r}.")

    def summary(self) -> str:
        """In a few words, for messages."""
        return (
            f"{self.type} with {self.layers} layers, {self.kv_heads} KV heads × {self.head_dim}, {self.dtype}, "
            f"weights {self.weights[:12]}…"
        )

    def difference(self, other: ModelIdentity) -> str | None:
        """What ``other`` has that this one has not, in words; None if both are the same."""
        for field, words in _WORDS.items():
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return (
                    f"other weights than it has (hash {theirs[:12]}…)" if field == "weights" else f"{words} {theirs!r}"
                )
        return None


_WORDS = {
    "type": "model type",
    "layers": "layers:",
    "kv_heads": "KV heads:",
    "head_dim": "head dim",
    "vocab": "vocabulary size",
    "sliding": "sliding-window layers:",
    "window": "sliding window",
    "rope": "rope parameters",
    "dtype": "dtype",
    "weights": "",
}


def identity_of(model: PreTrainedModel) -> ModelIdentity:
    """The identity of a model. It is the same on every device, and after saving and loading the model.

    Raises:
        UnsupportedModelError: the family is unknown, or weights are not in memory.
    """
    config, shape = text_config(model), kv_shape_of(model)
    windows = [window for window in sliding_window_of(model) if window is not None]
    return ModelIdentity(
        type=family_of(model).model_type,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=int(config.vocab_size),
        dtype=str(model.dtype).removeprefix("torch."),
        sliding=len(windows),
        window=max(windows, default=None),
        rope=_plain(getattr(config, "rope_parameters", None) or {}),
        weights=weights_hash(model),
    )


@torch.no_grad()
def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 over name, dtype, shape and 64 evenly spaced elements of every parameter of the decoder.

    A few milliseconds for any size, since a key of layer *n* depends on all weights before it and hashing all of them
    takes seconds. Another training, merge or quantization shows in the sample; single edited weights need not.
    """
    digest = hashlib.sha256()
    samples: list[Tensor] = []
    for name, weight in base_model_of(model).named_parameters():
        if weight.is_meta:
            raise UnsupportedModelError(
                f"The weights of {name} are not in memory (offloaded), so the model cannot be recognized. Load all."
            )
        digest.update(f"{name.replace('_orig_mod.', '')} {weight.dtype} {tuple(weight.shape)}\n".encode())
        flat = weight.detach().reshape(-1)
        samples.append(flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES])
    for _, alike in groupby(samples, key=lambda sample: (sample.device, sample.dtype)):
        digest.update(torch.cat(list(alike)).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's vocabulary: every token with its id, added ones included.

    Raises:
        ConfigError: this is no tokenizer.
    """
    try:
        vocabulary = sorted(tokenizer.get_vocab().items())
    except AttributeError as error:
        raise ConfigError(f"{type(tokenizer).__name__} is no tokenizer: it has no vocabulary.") from error
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """JSON values only, and short: a list becomes its hash."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, list | tuple):
        return hashlib.sha256(json.dumps(list(value)).encode()).hexdigest()[:16]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
