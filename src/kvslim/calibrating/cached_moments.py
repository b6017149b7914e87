"""Second moments of what a model caches, and of how its predictions depend on it.

One pass per window. The first part of the window fills an ordinary cache without gradients: these are the keys and
values that a run-time method will code. The rest then reads them while they are leaves of the autograd graph, so that
one backward pass gives the gradient of the log-likelihood by every cached key and value. The next tokens are drawn
from the model's own predictions, so with ``g`` such a gradient, ``½ eᵀ E[g gᵀ] e`` is to second order the divergence
that an error ``e`` of a cached token causes in the predictions of all later ones (the Fisher information).

This is the sensitivity of *decoding from a compressed prefix*: errors reach later tokens through attention, and not
the hidden states of the prefix, which were computed before anything was compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from kvslim.attending.compat import cache_keyword
from kvslim.attending.families import rope_of, text_config
from kvslim.attending.layout import compressible_layers
from kvslim.calibrating.drawing import draw_tokens
from kvslim.calibrating.windows import check_windows
from kvslim.errors import CalibrationError, NonFiniteError, UnsupportedModelError
from kvslim.types import Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""

READ_SHARE = 4
"""One in so many tokens of a window reads the others, and is scored."""

KINDS = ("keys", "rotated keys", "values")


@dataclass(frozen=True)
class Moments:
    """Sums over calibration tokens of one kind of cached vector, per compressed layer.

    A vector is a token's keys or values of all KV heads side by side, ``features = kv_heads · head_dim``.

    Attributes:
        squares: per layer ``(features, features)`` float64, the sum of ``x xᵀ``.
        sums: per layer ``(features,)`` float64, the sum of ``x``.
        gradients: per layer ``(features, features)`` float64, the sum of ``g gᵀ``.
        tokens: how many tokens were summed.
    """

    squares: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    tokens: int


@dataclass(frozen=True)
class CachedMoments:
    """Moments of un-rotated keys (``None`` if they cannot be un-rotated), rotated keys and values."""

    keys: Moments | None
    rotated_keys: Moments
    values: Moments


@dataclass(frozen=True)
class CachedWindow:
    """What one window leaves in the cache: per compressed layer ``(kv_heads, tokens, head_dim)``, keys rotated."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_gradients: tuple[Tensor, ...] = ()
    value_gradients: tuple[Tensor, ...] = ()


def calibrate_moments(
    model: PreTrainedModel, windows: Tensor, *, sinks: int, seed: int = 0, progress: Progress | None = None
) -> CachedMoments:
    """Run the model over ``(windows, length)`` token ids and sum the moments of what it caches.

    The model is left as it was.

    Args:
        model: an uncompressed model of a family whose cache run-time methods understand, on any device.
        windows: token ids without padding; three quarters of each window are the cached tokens, the rest reads them.
        sinks: first tokens of each window that are left out, since the cache keeps them exact.
        seed: of the tokens drawn.
        progress: called after each window.

    Raises:
        UnsupportedModelError: the family is unknown.
        CalibrationError: the windows are unusable, or too short to leave tokens behind the sinks.
        NonFiniteError: keys, values or gradients of a layer hold NaN or Inf.
    """
    windows = check_windows(windows, text_config(model).vocab_size)
    slots = [index for index, (slot, _) in enumerate(compressible_layers(model)[1]) if slot is not None]
    rope = rope_or_none(model)
    sums = {kind: [_Sum() for _ in slots] for kind in KINDS if rope is not None or kind != "keys"}
    for done, window in enumerate(cached_windows(model, windows, gradients=True, seed=seed)):
        for layer, index in enumerate(slots):
            _add_layer({kind: part[layer] for kind, part in sums.items()}, window, layer, rope, sinks)
            _require_finite(sums, layer, index, done)
        if progress is not None:
            progress(done + 1, windows.shape[0])
    found = {kind: _moments(part) for kind, part in sums.items()}
    return CachedMoments(found.get("keys"), found["rotated keys"], found["values"])


def cached_tokens(length: int) -> int:
    """Tokens of a window of ``length`` that are cached; the others read them.

    Raises:
        CalibrationError: the window is too short.
    """
    tokens = length - length // READ_SHARE
    if length < 2 * READ_SHARE:
        raise CalibrationError(f"A calibration window needs at least {2 * READ_SHARE} tokens, not {length}.")
    return tokens


def cached_windows(
    model: PreTrainedModel, windows: Tensor, *, gradients: bool, seed: int = 0
) -> Iterator[CachedWindow]:
    """What each window leaves in the cache of the compressed layers, with gradients if asked for.

    Without gradients the whole window is cached.
    """
    layers = [index for index, (slot, _) in enumerate(compressible_layers(model)[1]) if slot is not None]
    tokens = cached_tokens(windows.shape[1]) if gradients else windows.shape[1]
    generator = torch.Generator().manual_seed(seed)
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = model.training
    try:
        model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(False)
        for row in windows:
            ids = row[None].to(model.device)
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(input_ids=ids[:, :tokens], logits_to_keep=1, **{cache_keyword(model): cache})
            kept = [(cache.layers[index].keys.detach(), cache.layers[index].values.detach()) for index in layers]
            found = _gradients(model, cache, layers, ids[:, tokens:], generator) if gradients else []
            yield CachedWindow(
                tuple(keys[0] for keys, _ in kept),
                tuple(values[0] for _, values in kept),
                tuple(gradient[0] for gradient in found[0::2]),
                tuple(gradient[0] for gradient in found[1::2]),
            )
    finally:
        for parameter, flag in required:
            parameter.requires_grad_(flag)
        model.train(training)


def _gradients(
    model: PreTrainedModel, cache: DynamicCache, layers: list[int], ids: Tensor, generator: torch.Generator
) -> list[Tensor]:
    """By the cached keys and values of each layer in turn, of the summed log-likelihood of drawn next tokens."""
    leaves: list[Tensor] = []
    for index in layers:
        layer = cache.layers[index]
        layer.keys = layer.keys.detach().requires_grad_()
        layer.values = layer.values.detach().requires_grad_()
        leaves += [layer.keys, layer.values]
    with torch.enable_grad():
        logits = model(input_ids=ids, **{cache_keyword(model): cache}).logits[0].float()
        drawn = draw_tokens(logits.detach(), generator)
        loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
        return list(torch.autograd.grad(loss, leaves))


class _Sum:
    """Running sums of one layer and kind."""

    def __init__(self) -> None:
        self.tokens = 0
        self.squares: Tensor | None = None
        self.sums: Tensor | None = None
        self.gradients: Tensor | None = None

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Add ``(kv_heads, tokens, head_dim)`` vectors and their gradients."""
        flat, slopes = flatten_heads(x), flatten_heads(gradient)
        self.tokens += flat.shape[0]
        parts = ((flat.T @ flat).double(), flat.double().sum(0), (slopes.T @ slopes).double())
        olds = (self.squares, self.sums, self.gradients)
        self.squares, self.sums, self.gradients = (
            part if old is None else old + part for old, part in zip(olds, parts, strict=True)
        )


def flatten_heads(x: Tensor) -> Tensor:
    """``(kv_heads, tokens, head_dim)`` as float32 ``(tokens, kv_heads · head_dim)``."""
    return x.transpose(0, 1).flatten(1).to(torch.float32)


def _add_layer(sums: dict[str, _Sum], window: CachedWindow, layer: int, rope: Rope | None, sinks: int) -> None:
    keys, values = window.keys[layer][:, sinks:], window.values[layer][:, sinks:]
    if not keys.shape[1]:
        raise CalibrationError(f"The cached part of a calibration window is not longer than {sinks} sinks.")
    slopes = window.key_gradients[layer][:, sinks:]
    sums["rotated keys"].add(keys, slopes)
    sums["values"].add(values, window.value_gradients[layer][:, sinks:])
    if rope is not None:
        places = torch.arange(sinks, sinks + keys.shape[1], device=keys.device)
        turned = (rope.rotate(part.float(), places, inverse=True) for part in (keys, slopes))
        sums["keys"].add(*turned)


def _moments(parts: list[_Sum]) -> Moments:
    squares, sums, gradients = ([getattr(part, name) for part in parts] for name in ("squares", "sums", "gradients"))
    return Moments(tuple(squares), tuple(sums), tuple(gradients), parts[0].tokens)


def _require_finite(sums: dict[str, list[_Sum]], layer: int, index: int, window: int) -> None:
    for kind, parts in sums.items():
        for what, total in (("", parts[layer].squares), ("gradients of the ", parts[layer].gradients)):
            if total is not None and not torch.isfinite(total.diagonal()).all():
                raise NonFiniteError(
                    f"The {what}{kind} of layer {index} hold NaN or Inf in calibration window {window}. "
                    "Check the model's weights, or load it in float32 or bfloat16 instead of float16."
                )


def rope_or_none(model: PreTrainedModel) -> Rope | None:
    """The rotation of the cached keys, or None if its frequencies change with length, so that keys stay rotated."""
    try:
        return rope_of(model)
    except UnsupportedModelError:
        return None
