"""Fisher information of the key and value projections (Palu, Sec. 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kvslim.attending.families import kv_shape_of, text_config
from kvslim.attending.projections import projections_of
from kvslim.calibrating.grams import Progress
from kvslim.calibrating.windows import check_windows
from kvslim.errors import NonFiniteError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FISHER_LENGTH = 1024
"""Tokens of each calibration window that the Fisher pass uses (Palu, Sec. 4)."""


@dataclass(frozen=True)
class FisherStats:
    """Squared gradients of the loss, per KV head, so that they add up to any group of heads.

    Attributes:
        sum_squares: ``(layers, 2, kv_heads)`` float64; axis 1 is keys, values. The squared gradient summed over the
            weights of a head and over windows: the empirical Fisher information of the paper.
        mean_rms: ``(layers, 2, kv_heads)`` float64. The root mean square over windows of each weight's gradient,
            averaged over the weights of a head: the score of the public implementation, for comparison.
        windows: how many windows (one gradient each) were used.
    """

    sum_squares: Tensor
    mean_rms: Tensor
    windows: int


def calibrate_fisher(model: PreTrainedModel, windows: Tensor, *, progress: Progress | None = None) -> FisherStats:
    """Square and sum the gradients of the next-token loss for every key and value weight, one window at a time.

    Only those weights take gradients; each window's loss is the mean over its positions, position ``t`` predicting
    token ``t + 1``. The model is left as it was, also after an error.

    Args:
        model: an uncompressed model with a language-model head.
        windows: ``(windows, length)`` token ids without padding.
        progress: called after each window.

    Raises:
        UnsupportedModelError: the family is unknown.
        CalibrationError: the windows are unusable.
        NonFiniteError: a gradient is NaN or Inf; the message names the layer.
    """
    windows = check_windows(windows, text_config(model).vocab_size)
    parts = [part for each in projections_of(model) for part in (each.key, each.value)]
    weights: list[Tensor] = [part.parameter for part in parts]
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    was_training = model.training
    squares = [torch.zeros_like(part.weight, dtype=torch.float32) for part in parts]
    try:
        model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        for index, window in enumerate(windows):
            for part, total, gradient in zip(parts, squares, _gradients(model, window, weights), strict=True):
                total.add_(part.of(gradient).float().square())
            _require_finite(squares, index)
            if progress is not None:
                progress(index + 1, windows.shape[0])
    finally:
        for parameter, flag in required:
            parameter.requires_grad_(flag)
        model.train(was_training)
    return _summarise(squares, kv_shape_of(model).kv_heads, windows.shape[0])


def _gradients(model: PreTrainedModel, window: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
    ids = window.to(model.device)
    with torch.enable_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0, :-1].float(), ids[1:].to(logits.device))
        return torch.autograd.grad(loss, weights)


def _require_finite(squares: list[Tensor], window: int) -> None:
    for index, total in enumerate(squares):
        if not torch.isfinite(total.sum()):
            kind = ("key", "value")[index % 2]
            raise NonFiniteError(
                f"The gradient of the {kind} projection of layer {index // 2} is NaN or Inf in calibration window "
                f"{window}. Check the model's weights, or load it in float32 or bfloat16 instead of float16."
            )


def _summarise(squares: list[Tensor], kv_heads: int, windows: int) -> FisherStats:
    per_head = [total.double().T.reshape(kv_heads, -1) for total in squares]
    sums = torch.stack([total.sum(1).cpu() for total in per_head])
    rms = torch.stack([(total / windows).sqrt().mean(1).cpu() for total in per_head])
    return FisherStats(sum_squares=sums.view(-1, 2, kv_heads), mean_rms=rms.view(-1, 2, kv_heads), windows=windows)
