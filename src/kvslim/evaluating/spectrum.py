"""Where a model's KV cache is redundant: energy per axis of keys and values, before and after the rotary embedding.

This is JoLT's first observation, made for any model and text: tokens and features hold most of the redundancy of a
layer, heads little, and the rotation spreads the keys' energy over more token components.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvslim.attending.families import rope_of, sliding_window_of
from kvslim.decomposing.spectrum import cumulative_share, mode_energies, rank_for_error
from kvslim.errors import ConfigError, NonFiniteError
from kvslim.evaluating.continuation import prefill
from kvslim.evaluating.results import SCHEMA, Environment, ModelFingerprint
from kvslim.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AXES = ("heads", "tokens", "features", "layers")
ERRORS = (0.1, 0.01)
"""The relative errors that ranks are given for."""

KINDS = {"keys_pre": "keys before RoPE", "keys_post": "keys after RoPE", "values": "values"}


@dataclass(frozen=True)
class AxisSpectrum:
    """One axis of one kind of tensor.

    Attributes:
        kind: ``keys_pre`` or ``keys_post`` (RoPE), or ``values``.
        axis: ``heads``, ``tokens``, ``features`` (mean over layers) or ``layers`` (all layers as one tensor).
        full: the largest possible rank.
        rank_10, rank_1: rank needed for 10 % and 1 % relative error if this axis alone is truncated, mean over layers.
        share: cumulative share of the energy of the first 1, 2, … components, mean over layers.
    """

    kind: str
    axis: str
    full: int
    rank_10: float
    rank_1: float
    share: tuple[float, ...]

    @property
    def fraction_10(self) -> float:
        """``rank_10`` as a fraction of full rank."""
        return self.rank_10 / self.full

    @property
    def fraction_1(self) -> float:
        """``rank_1`` as a fraction of full rank."""
        return self.rank_1 / self.full


@dataclass(frozen=True)
class SpectrumResults:
    """The spectra of one model on one text.

    Attributes:
        model: which.
        text: origin of the text.
        tokens: tokens of the cache that was looked at.
        spectra: one entry per kind and axis.
        findings: what the numbers say, one sentence each.
        environment: where and how.
        schema: version of the JSON layout.
    """

    model: ModelFingerprint
    text: str
    tokens: int
    spectra: tuple[AxisSpectrum, ...]
    findings: tuple[str, ...]
    environment: Environment = field(default_factory=Environment.now)
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values, fractions included."""
        data = dataclasses.asdict(self)
        for entry, one in zip(data["spectra"], self.spectra, strict=True):
            entry |= {"fraction_10": one.fraction_10, "fraction_1": one.fraction_1}
        return data

    def save(self, path: Path) -> None:
        """Write the JSON to ``path``, atomically."""
        write_atomically(path, (json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n").encode())


@torch.no_grad()
def cache_spectra(model: PreTrainedModel, ids: Tensor) -> list[AxisSpectrum]:
    """Prefill ``ids`` ``(T,)`` and take the spectra of its cache.

    Sliding-window layers are left out: they keep only their window.

    Raises:
        ConfigError: fewer than two tokens.
        UnsupportedModelError: the family is unknown or its rotation changes with length.
        NonFiniteError: the cache holds NaN or Inf.
    """
    rope = rope_of(model)
    full = [layer for layer, window in enumerate(sliding_window_of(model)) if window is None]
    if ids.ndim != 1 or ids.shape[0] < 2:
        raise ConfigError(f"A spectrum needs at least 2 tokens, not {tuple(ids.shape)}.")
    if not full:
        raise ConfigError("Every layer of this model has a sliding window; its cache is bounded already.")
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids[None].to(model.device))
    keys = torch.stack([cache.layers[layer].keys[0].float() for layer in full])
    values = torch.stack([cache.layers[layer].values[0].float() for layer in full])
    if not (torch.isfinite(keys).all() and torch.isfinite(values).all()):
        raise NonFiniteError("The cache holds NaN or Inf. Load the model in float32 or bfloat16.")
    pre = rope.rotate(keys, torch.arange(ids.shape[0], device=keys.device), inverse=True)
    tensors = {"keys_pre": pre, "keys_post": keys, "values": values}
    return [axis for kind, x in tensors.items() for axis in tensor_spectra(kind, x)]


def tensor_spectra(kind: str, x: Tensor) -> list[AxisSpectrum]:
    """Spectra of ``x`` ``(layers, heads, tokens, features)``: within layers for three axes, across them for one."""
    spectra = [_axis(kind, axis, [mode_energies(layer, mode) for layer in x]) for mode, axis in enumerate(AXES[:3])]
    return [*spectra, _axis(kind, "layers", [mode_energies(x, 0)])]


def _axis(kind: str, axis: str, energies: list[Tensor]) -> AxisSpectrum:
    shares = torch.stack([cumulative_share(one) for one in energies]).mean(0)
    rank_10, rank_1 = (sum(rank_for_error(one, error) for one in energies) / len(energies) for error in ERRORS)
    return AxisSpectrum(kind, axis, len(energies[0]), rank_10, rank_1, tuple(shares.tolist()))


def findings(spectra: list[AxisSpectrum]) -> list[str]:
    """What the numbers say, in sentences that are made from them."""
    found = []
    for kind, name in KINDS.items():
        axes = sorted((one for one in spectra if one.kind == kind and one.full > 1), key=lambda one: one.fraction_10)
        if not axes:
            continue
        ranked = ", ".join(f"{one.axis} {one.fraction_10:.0%}" for one in axes)
        found.append(
            f"{name[0].upper()}{name[1:]}: for 10 % error a truncation of one axis alone has to keep, of full rank: "
            f"{ranked}. Most redundant: {_alike(axes, axes[0])}; least: {_alike(axes, axes[-1])}."
        )
    by_place = {(one.kind, one.axis): one for one in spectra}
    for axis in ("tokens", "features"):
        pre, post = by_place.get(("keys_pre", axis)), by_place.get(("keys_post", axis))
        if pre and post:
            found.append(_rope_sentence(axis, pre, post))
    return found


def _alike(axes: list[AxisSpectrum], one: AxisSpectrum) -> str:
    """The axes that need the same fraction as ``one``, in words."""
    return " and ".join(other.axis for other in axes if other.fraction_10 == one.fraction_10)


def _rope_sentence(axis: str, pre: AxisSpectrum, post: AxisSpectrum) -> str:
    counts = f"{pre.rank_10:.1f} components before RoPE and {post.rank_10:.1f} after it, of {pre.full}"
    change = post.rank_10 - pre.rank_10
    if abs(change) < 0.05 * pre.full:
        verdict = "so the rotation changes little there"
    elif change > 0:
        verdict = "so the rotation spreads the energy, and keys compress better before it"
    else:
        verdict = "so on this axis keys compress better after the rotation"
    return f"Along {axis}, keys need {counts} for 10 % error: {verdict}."


def spectrum_of(model: PreTrainedModel, name: str, ids: Tensor, origin: str) -> SpectrumResults:
    """Spectra and findings with everything needed to repeat them. Errors as :func:`cache_spectra`."""
    spectra = cache_spectra(model, ids)
    fingerprint = ModelFingerprint.of(name, model)
    return SpectrumResults(fingerprint, origin, int(ids.shape[0]), tuple(spectra), tuple(findings(spectra)))


def plot_spectra(results: SpectrumResults, path: Path) -> None:
    """Draw the energy that is lost against the fraction of rank kept: one panel per kind, one line per axis."""
    from kvslim.evaluating.plots import COLOURS, new_figure, save_png

    figure, panels = new_figure(13, 4.2, columns=len(KINDS))
    for axes, (kind, name) in zip(panels, KINDS.items(), strict=True):
        for index, one in enumerate(axis for axis in results.spectra if axis.kind == kind and axis.full > 1):
            kept = [(rank + 1) / one.full for rank in range(one.full)]
            errors = [max(1 - share, 1e-12) ** 0.5 for share in one.share]
            label = f"{one.axis} (full rank {one.full})"
            axes.plot(kept, errors, color=COLOURS[index], label=label, drawstyle="steps-post")
        for error in ERRORS:
            axes.axhline(error, color="grey", linestyle=":", linewidth=0.8)
        axes.set(yscale="log", ylim=(1e-3, 1.1), xlim=(0, 1), title=name, xlabel="rank kept, as a fraction of full")
        axes.grid(True, alpha=0.2)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("relative error of truncating this axis alone")
    figure.suptitle(f"{results.model.name}, {results.tokens} tokens: mean over layers", fontsize=10)
    save_png(figure, path)
