"""Gram matrices of the inputs that each layer's key and value projections read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvslim.attending.families import base_model_of, text_config
from kvslim.attending.projections import projections_of
from kvslim.calibrating.stats_file import StoredStats
from kvslim.calibrating.windows import check_windows
from kvslim.errors import NonFiniteError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""

_CHUNK = 2048
"""Tokens per float32 product before the sum is carried on in float64."""


@dataclass(frozen=True)
class GramStats(StoredStats):
    """Second moments of the projection inputs.

    Attributes:
        grams: per layer ``(hidden, hidden)`` float64, the sum of ``x xᵀ`` over all calibration tokens. Keys and values
            read the same input, so one matrix serves both.
        tokens: how many tokens were summed.
    """

    grams: tuple[Tensor, ...]
    tokens: int


@torch.no_grad()
def calibrate_grams(
    model: PreTrainedModel, windows: Tensor, *, batch_size: int = 1, progress: Progress | None = None
) -> GramStats:
    """Run the model over the windows and sum ``x xᵀ`` of every attention input.

    The model is left as it was: hooks are removed and its mode restored, also after an error.

    Args:
        model: an uncompressed model of a supported family, on any device.
        windows: ``(windows, length)`` token ids without padding.
        batch_size: windows per forward pass.
        progress: called after each pass.

    Raises:
        UnsupportedModelError: the family is unknown.
        CalibrationError: the windows are unusable.
        NonFiniteError: a layer's input holds NaN or Inf; the message names the layer.
    """
    windows = check_windows(windows, text_config(model).vocab_size)
    projections = [parts.key.module for parts in projections_of(model)]
    sums: list[Tensor | None] = [None] * len(projections)

    def watch(layer: int) -> Callable[[nn.Module, Any], None]:
        def add(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            sums[layer] = add_gram(sums[layer], args[0].detach().flatten(0, -2))

        return add

    base, was_training = base_model_of(model), model.training
    handles = [projection.register_forward_pre_hook(watch(i)) for i, projection in enumerate(projections)]
    try:
        model.eval()
        for start in range(0, windows.shape[0], batch_size):
            batch = windows[start : start + batch_size].to(model.device)
            base(input_ids=batch, use_cache=False)
            for layer, total in enumerate(sums):
                require_finite(total, layer, start)
            if progress is not None:
                progress(min(start + batch_size, windows.shape[0]), windows.shape[0])
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)
    return GramStats(grams=tuple(total for total in sums if total is not None), tokens=windows.numel())


def add_gram(total: Tensor | None, inputs: Tensor) -> Tensor:
    """Add ``xᵀ x`` of ``(tokens, features)`` inputs in place, products in float32, the sum in float64."""
    if total is None:
        total = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64, device=inputs.device)
    for chunk in torch.split(inputs.float(), _CHUNK):
        total += chunk.T @ chunk
    return total


def require_finite(total: Tensor | None, layer: int, window: int) -> None:
    """Refuse a sum with NaN or Inf: in any input it shows on the diagonal, where nothing can cancel."""
    if total is not None and not torch.isfinite(total.diagonal()).all():
        raise NonFiniteError(
            f"The input of the attention of layer {layer} holds NaN or Inf in calibration window {window}. "
            f"Check the model's weights, or load it in float32 or bfloat16 instead of float16."
        )
