"""Tokens drawn from a model's own predictions, for Fisher information."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each of ``(positions, vocabulary)`` logits; the same on every device, up to rounding."""
    cumulative = logits.softmax(-1).cumsum(-1)
    chance = torch.rand(len(logits), 1, generator=generator).to(cumulative.device)
    return torch.searchsorted(cumulative, chance)[:, 0].clamp_max(logits.shape[-1] - 1)
