"""Gram matrices as compressed layers see them: every layer is replaced before the next one is calibrated.

The ordinary Gram matrices (:mod:`kvslim.calibrating.grams`) come from the uncompressed model, but a compressed layer
reads what the compressed layers before it put out. Here layer *n* is calibrated with layers 0 to *n* - 1 replaced
already, as in SVD-LLM's sequential mode. The windows pass through the model once: after each layer the hidden states of
all windows wait on the CPU (``windows * length * hidden`` numbers in the model's dtype) for the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvslim.attending.families import base_model_of, decoder_layers, family_of, text_config
from kvslim.attending.projections import projections_of
from kvslim.calibrating.grams import Progress, add_gram, require_finite
from kvslim.calibrating.windows import check_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Build = Callable[[int, Tensor], nn.Module]
"""``build(layer, gram)`` makes the attention module that replaces a layer's own, from its Gram matrix."""


class _EnoughError(Exception):
    """Ends a forward pass whose rest is not needed."""


@torch.no_grad()
def replace_in_turn(
    model: PreTrainedModel, windows: Tensor, build: Build, *, progress: Progress | None = None
) -> list[nn.Module]:
    """Build the replacement of every layer's attention from inputs that the replacements before it shaped.

    The model itself is left as it was, also after an error: the replacements are returned, not installed.

    Args:
        model: an uncompressed model of a supported family, on any device.
        windows: ``(windows, length)`` token ids without padding.
        build: called for layer 0, 1, … with the layer's Gram matrix, ``(hidden, hidden)`` float64. The layer still has
            its own attention then, those before it do not.
        progress: called after each layer.

    Returns:
        One module per layer, in the mode (training or not) that the model is in.

    Raises:
        UnsupportedModelError: the family is unknown.
        CalibrationError: the windows are unusable.
        NonFiniteError: a layer's input holds NaN or Inf; the message names the layer.
    """
    windows = check_windows(windows, text_config(model).vocab_size)
    keys = [parts.key.module for parts in projections_of(model)]
    layers, name, was_training = decoder_layers(model), family_of(model).attention, model.training
    originals = [getattr(layer, name) for layer in layers]
    built: list[nn.Module] = []
    try:
        model.eval()
        stream = _Stream(model, layers, windows)
        for index, (layer, key) in enumerate(zip(layers, keys, strict=True)):
            built.append(build(index, stream.gram(index, key)))
            setattr(layer, name, built[-1])
            if index + 1 < len(layers):
                stream.advance(index)
            if progress is not None:
                progress(index + 1, len(layers))
    finally:
        for layer, original in zip(layers, originals, strict=True):
            setattr(layer, name, original)
        model.train(was_training)
    for module in built:
        module.train(was_training)
    return built


class _Stream:
    """The hidden states of all windows on their way through the layers, and what else each layer is called with.

    Windows are of one length and without padding, so masks, positions and rotations are those of the first window for
    all of them; they differ between layers.
    """

    def __init__(self, model: PreTrainedModel, layers: list[nn.Module], windows: Tensor) -> None:
        self.layers = layers
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        base = base_model_of(model)

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls.append((args, kwargs))  # the hidden states among them say where the layer runs

        handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
        try:
            base(input_ids=windows[:1].to(model.device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        self.hidden: list[Tensor] = []

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.hidden.append((args[0] if args else kwargs["hidden_states"]).cpu())
            raise _EnoughError

        handle = layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            for window in windows:
                _until_enough(partial(base, input_ids=window[None].to(model.device), use_cache=False))
        finally:
            handle.remove()

    def gram(self, index: int, key: nn.Module) -> Tensor:
        """Sum ``x xᵀ`` over what the projection ``key`` of this layer reads."""
        total: Tensor | None = None

        def add(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            nonlocal total
            total = add_gram(total, args[0].detach().flatten(0, -2))
            raise _EnoughError

        handle = key.register_forward_pre_hook(add)
        try:
            for window, hidden in enumerate(self.hidden):
                _until_enough(partial(self._run, index, hidden))
                require_finite(total, index, window)
        finally:
            handle.remove()
        assert total is not None  # windows are at least one
        return total

    def advance(self, index: int) -> None:
        """Let the hidden states pass through this layer."""
        for window, hidden in enumerate(self.hidden):
            self.hidden[window] = self._run(index, hidden).cpu()

    def _run(self, index: int, hidden: Tensor) -> Tensor:
        args, kwargs = self.calls[index]
        first = args[0] if args else kwargs["hidden_states"]
        hidden = hidden.to(first.device)
        output: Any = (
            self.layers[index](hidden, *args[1:], **kwargs)
            if args
            else self.layers[index](**{**kwargs, "hidden_states": hidden})
        )
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def _until_enough(run: Callable[[], Any]) -> None:
    try:
        run()
    except _EnoughError:
        return
