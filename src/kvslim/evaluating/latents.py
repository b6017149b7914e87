"""The latents of one layer of a Palu model, channel by channel: what the Hadamard rotation does (Palu, Fig. 4)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvslim.attending.families import attention_modules
from kvslim.attending.latent_model import LatentModelMixin
from kvslim.errors import ConfigError, UnsupportedModelError
from kvslim.evaluating.plots import COLOURS, new_figure, save_png

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def capture_latents(model: PreTrainedModel, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Run ``ids`` ``(tokens,)`` through a Palu model and return one layer's latents before any coding.

    Returns:
        Key latents (before rotation by position) and value latents, ``(tokens, summed ranks)`` float32 on the CPU.

    Raises:
        UnsupportedModelError: the model is not compressed by Palu.
        ConfigError: there is no such layer, or no tokens.
    """
    if not isinstance(model, LatentModelMixin):
        raise UnsupportedModelError("Only a Palu-compressed model has latents. Call kvslim.compress first.")
    attentions = attention_modules(model)
    if not 0 <= layer < len(attentions) or ids.ndim != 1 or not ids.numel():
        raise ConfigError(f"Give token ids (tokens,) and a layer from 0 to {len(attentions) - 1}, not {layer}.")
    attention: Any = attentions[layer]
    kept: list[Tensor] = []
    handles = [
        projection.register_forward_hook(lambda module, args, latents: kept.append(latents[0].float().cpu()))
        for projection in (attention.k_latent, attention.v_latent)
    ]
    whole: Any = model  # the mixin alone is no model
    try:
        whole(input_ids=ids[None].to(whole.device), use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    keys, values = kept
    return keys, values


def outlier_ratio(latents: Tensor) -> float:
    """Root-mean-square magnitude of the largest channel of ``(tokens, channels)`` over that of all; 1 is flat."""
    energies = latents.double().square().mean(0)
    return float((energies.max() / energies.mean()).sqrt()) if float(energies.sum()) else 1.0


def plot_latents(latents: Mapping[str, Tensor], path: Path, title: str) -> None:
    """Draw latents of the same tokens side by side, on common scales, to a PNG file.

    Args:
        latents: ``(tokens, channels)`` by label, for example before and after the rotation.
        path: where to write.
        title: of the whole figure.

    Per label: the mean and largest magnitude of each channel, and below it the magnitudes as tokens × channels.

    Raises:
        ConfigError: there is nothing to draw, or the file cannot be written.
    """
    if not latents or not all(x.ndim == 2 and x.numel() for x in latents.values()):
        raise ConfigError("Latents to draw have the shape (tokens, channels), neither of them 0.")
    magnitudes = {label: x.float().abs().numpy() for label, x in latents.items()}
    top = max(float(x.max()) for x in magnitudes.values())
    figure, axes = new_figure(5.5 * len(magnitudes), 7, columns=len(magnitudes), rows=2)
    figure.suptitle(title, fontsize=10)
    for column, (label, x) in enumerate(magnitudes.items()):
        above, below = axes[column], axes[len(magnitudes) + column]
        channels = range(x.shape[1])
        above.fill_between(channels, x.max(0), color=COLOURS[5], label="largest over the tokens", step="mid")
        above.plot(channels, x.mean(0), color=COLOURS[1], linewidth=1, label="mean over the tokens")
        above.set_ylim(0, top)
        above.set_xlim(-0.5, x.shape[1] - 0.5)
        above.set_title(f"{label}: largest channel {outlier_ratio(latents[label]):.1f}x the mean (RMS)", fontsize=9)
        above.set_xlabel("latent channel")
        above.set_ylabel("magnitude")
        above.legend(fontsize=8)
        image = below.imshow(x, aspect="auto", cmap="magma", vmin=0, vmax=top, interpolation="nearest")
        below.set_xlabel("latent channel")
        below.set_ylabel("token")
    figure.colorbar(image, ax=axes[len(magnitudes) :], label="magnitude")
    save_png(figure, path)
