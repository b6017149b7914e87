"""Fisher information of the key and value projections (Palu, Sec. 3.3), and of what they put out.

Two questions to one backward pass per window. How does the loss depend on the *weights* of a projection: the paper's
score. And how does it depend on its *outputs*, the keys before rotation or the values of each token: with ``g`` the
gradient of a window's summed loss by one token's output, an error ``e`` in it changes the loss by ``gᵀ e`` to first
order, so ``E[(gᵀ e)²] = eᵀ E[g gᵀ] e`` is what the error costs. Its trace per feature is the cost of error that lies in
no special direction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvslim.attending.families import kv_projections, kv_shape_of, text_config
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
        output_squares: ``(layers, 2, kv_heads)`` float64. The squared gradient of a window's summed loss by the outputs
            of a head, summed over its features and over all tokens.
        output_grams: per layer ``(2, features, features)`` float64, the sum over all tokens of ``g gᵀ`` with ``g`` that
            gradient for all heads; ``None`` unless asked for.
        tokens: how many tokens the two were summed over.
    """

    sum_squares: Tensor
    mean_rms: Tensor
    windows: int
    output_squares: Tensor
    output_grams: tuple[Tensor, ...] | None
    tokens: int


def calibrate_fisher(
    model: PreTrainedModel, windows: Tensor, *, output_grams: bool = False, progress: Progress | None = None
) -> FisherStats:
    """Square and sum the gradients of the next-token loss for every key and value weight, one window at a time.

    Only those weights take gradients; each window's loss is the mean over its positions, position ``t`` predicting
    token ``t + 1``. The gradients by the outputs come from the same pass, multiplied by the number of positions: an
    error in one token's output is felt by the sum, not the mean. The model is left as it was, also after an error.

    Args:
        model: an uncompressed model with a language-model head.
        windows: ``(windows, length)`` token ids without padding.
        output_grams: whether to sum ``g gᵀ`` too: ``2 * features²`` numbers per layer, as many as in the Gram matrices
            of the inputs where keys are as wide as the model.
        progress: called after each window.

    Raises:
        UnsupportedModelError: the family is unknown.
        CalibrationError: the windows are unusable.
        NonFiniteError: a gradient is NaN or Inf; the message names the layer.
    """
    windows = check_windows(windows, text_config(model).vocab_size)
    projections = [projection for pair in kv_projections(model) for projection in pair]
    weights = [projection.weight for projection in projections]
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    was_training = model.training
    sums = _Sums(weights, kv_shape_of(model).kv_heads, output_grams)
    outputs: dict[int, Tensor] = {}
    handles = [projection.register_forward_hook(_keep(outputs, i)) for i, projection in enumerate(projections)]
    try:
        model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(False)
        for weight in weights:
            weight.requires_grad_(True)
        for index, window in enumerate(windows):
            sums.add(*_gradients(model, window, weights, outputs))
            _require_finite(sums.weights, index)
            if progress is not None:
                progress(index + 1, windows.shape[0])
    finally:
        for handle in handles:
            handle.remove()
        for parameter, flag in required:
            parameter.requires_grad_(flag)
        model.train(was_training)
    return sums.stats(windows)


class _Sums:
    """What is summed over windows; lists hold the keys and values of each layer in turn."""

    def __init__(self, weights: list[Tensor], kv_heads: int, grams: bool) -> None:
        self.kv_heads = kv_heads
        self.weights = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        self.outputs = [torch.zeros(kv_heads, dtype=torch.float64, device=weight.device) for weight in weights]
        self.grams = [
            torch.zeros(len(weight), len(weight), dtype=torch.float64, device=weight.device)
            for weight in (weights if grams else [])
        ]

    def add(self, by_weights: tuple[Tensor, ...], by_outputs: list[Tensor]) -> None:
        """Add one window's gradients; those by outputs are ``(tokens, features)`` float32."""
        for index, (weight, output) in enumerate(zip(by_weights, by_outputs, strict=True)):
            self.weights[index].add_(weight.float().square())
            self.outputs[index] += output.square().sum(0).double().view(self.kv_heads, -1).sum(1)
            if self.grams:
                self.grams[index] += output.T @ output

    def stats(self, windows: Tensor) -> FisherStats:
        per_head = [total.double().reshape(self.kv_heads, -1) for total in self.weights]

        def table(rows: list[Tensor]) -> Tensor:
            return torch.stack([row.cpu() for row in rows]).view(-1, 2, self.kv_heads)

        return FisherStats(
            sum_squares=table([total.sum(1) for total in per_head]),
            mean_rms=table([(total / windows.shape[0]).sqrt().mean(1) for total in per_head]),
            windows=windows.shape[0],
            output_squares=table(self.outputs),
            output_grams=tuple(map(torch.stack, zip(self.grams[0::2], self.grams[1::2], strict=True))) or None,
            tokens=windows.numel(),
        )


def _keep(outputs: dict[int, Tensor], index: int) -> Callable[[nn.Module, Any, Tensor], None]:
    """A hook that puts a projection's output where the backward pass can ask for its gradient."""

    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        outputs[index] = output

    return hook


def _gradients(
    model: PreTrainedModel, window: Tensor, weights: list[Tensor], outputs: dict[int, Tensor]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Of one window's mean loss by the weights, and of its summed loss by the outputs the hooks have kept."""
    ids = window.to(model.device)
    with torch.enable_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[0, :-1].float(), ids[1:].to(logits.device))
        found = torch.autograd.grad(loss, [*weights, *(outputs[i] for i in range(len(weights)))])
    outputs.clear()
    positions = len(ids) - 1
    return found[: len(weights)], [gradient[0].float() * positions for gradient in found[len(weights) :]]


def _require_finite(squares: list[Tensor], window: int) -> None:
    for index, total in enumerate(squares):
        if not torch.isfinite(total.sum()):
            kind = ("key", "value")[index % 2]
            raise NonFiniteError(
                f"The gradient of the {kind} projection of layer {index // 2} is NaN or Inf in calibration window "
                f"{window}. Check the model's weights, or load it in float32 or bfloat16 instead of float16."
            )
