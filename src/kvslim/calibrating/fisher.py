"""Fisher information of the key and value projections (Palu, Sec. 3.3), and of what they put out.

Two questions to one forward pass per window. How does the loss depend on the *weights* of a projection: the paper's
score. And how do the model's predictions depend on its *outputs*, the keys before rotation or the values of each token.
For the latter the next tokens are drawn from the predictions, as the Fisher information is defined: with ``g`` the
gradient of a window's summed loss by one token's output, ``F = E[g gᵀ]``, and a small error ``e`` in that output moves
the predictions by a KL divergence of ``½ eᵀ F e``. The mean diagonal of ``F`` is the cost of error in no special
direction. With the text's own next tokens instead, what the model cannot predict anyway counts too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvslim.attending.families import kv_shape_of, text_config
from kvslim.attending.projections import Part, projections_of
from kvslim.calibrating.drawing import draw_tokens
from kvslim.calibrating.grams import Progress
from kvslim.calibrating.stats_file import StoredStats
from kvslim.calibrating.windows import check_windows
from kvslim.errors import NonFiniteError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FISHER_LENGTH = 1024
"""Tokens of each calibration window that the Fisher pass uses (Palu, Sec. 4)."""

_SEED = 0
"""Of the drawn next tokens, so that equal calls give equal statistics."""


@dataclass(frozen=True)
class FisherStats(StoredStats):
    """Squared gradients of the loss, per KV head, so that they add up to any group of heads.

    Attributes:
        sum_squares: ``(layers, 2, kv_heads)`` float64; axis 1 is keys, values. The squared gradient summed over the
            weights of a head and over windows: the empirical Fisher information of the paper.
        mean_rms: ``(layers, 2, kv_heads)`` float64. The root mean square over windows of each weight's gradient,
            averaged over the weights of a head: the score of the public implementation, for comparison.
        windows: how many windows (one gradient each) were used.
        output_squares: ``(layers, 2, kv_heads)`` float64. The squared gradient by the outputs of a head, of the summed
            loss with drawn next tokens, summed over its features and over all tokens.
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
    token ``t + 1``. The gradients by the outputs come from a second backward pass, with next tokens drawn from the
    predictions by a fixed seed, of the sum over positions: an error in one token's output is felt by the sum, not the
    mean. The model is left as it was, also after an error.

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
    parts = [part for each in projections_of(model) for part in (each.key, each.value)]
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    was_training = model.training
    sums = _Sums(parts, kv_shape_of(model).kv_heads, output_grams)
    generator = torch.Generator().manual_seed(_SEED)
    outputs: dict[nn.Module, Tensor] = {}
    modules = list(dict.fromkeys(part.module for part in parts))  # a fused projection is there once
    handles = [module.register_forward_hook(_keep(outputs)) for module in modules]
    try:
        model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(False)
        for part in parts:
            part.parameter.requires_grad_(True)
        for index, window in enumerate(windows):
            sums.add(*_gradients(model, window, modules, outputs, generator))
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

    def __init__(self, parts: list[Part], kv_heads: int, grams: bool) -> None:
        self.parts, self.kv_heads = parts, kv_heads
        self.weights = [torch.zeros_like(part.weight, dtype=torch.float32) for part in parts]
        self.outputs = [torch.zeros(kv_heads, dtype=torch.float64, device=total.device) for total in self.weights]
        self.grams = [
            torch.zeros(total.shape[1], total.shape[1], dtype=torch.float64, device=total.device)
            for total in (self.weights if grams else [])
        ]

    def add(self, by_weights: dict[nn.Module, Tensor], by_outputs: dict[nn.Module, Tensor]) -> None:
        """Add one window's gradients by module; those by outputs are ``(tokens, features)`` float32."""
        for index, part in enumerate(self.parts):
            output = part.of_output(by_outputs[part.module])
            self.weights[index].add_(part.of(by_weights[part.module]).float().square())
            self.outputs[index] += output.square().sum(0).double().view(self.kv_heads, -1).sum(1)
            if self.grams:
                self.grams[index] += output.T @ output

    def stats(self, windows: Tensor) -> FisherStats:
        per_head = [total.double().T.reshape(self.kv_heads, -1) for total in self.weights]

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


def _keep(outputs: dict[nn.Module, Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    """A hook that puts a projection's output where the backward pass can ask for its gradient."""

    def hook(module: nn.Module, _: Any, output: Tensor) -> None:
        outputs[module] = output

    return hook


def _gradients(
    model: PreTrainedModel,
    window: Tensor,
    modules: list[nn.Module],
    outputs: dict[nn.Module, Tensor],
    generator: torch.Generator,
) -> tuple[dict[nn.Module, Tensor], dict[nn.Module, Tensor]]:
    """By the weights, of one window's mean loss; by the outputs the hooks have kept, of the sum with drawn tokens."""
    ids = window.to(model.device)
    weights: Any = [module.weight for module in modules]
    with torch.enable_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        loss = nn.functional.cross_entropy(logits, ids[1:].to(logits.device))
        by_weights = torch.autograd.grad(loss, weights, retain_graph=True)
        drawn = nn.functional.cross_entropy(logits, draw_tokens(logits.detach(), generator), reduction="sum")
        by_outputs = torch.autograd.grad(drawn, [outputs[module] for module in modules])
    outputs.clear()
    flat = [gradient.flatten(0, -2).float() for gradient in by_outputs]
    return dict(zip(modules, by_weights, strict=True)), dict(zip(modules, flat, strict=True))


def _require_finite(squares: list[Tensor], window: int) -> None:
    for index, total in enumerate(squares):
        if not torch.isfinite(total.sum()):
            kind = ("key", "value")[index % 2]
            raise NonFiniteError(
                f"The gradient of the {kind} projection of layer {index // 2} is NaN or Inf in calibration window "
                f"{window}. Check the model's weights, or load it in float32 or bfloat16 instead of float16."
            )
