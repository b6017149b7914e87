"""Where a model's KV cache is redundant: energy per axis of keys and values, before and after the rotary embedding.

This is JoLT's first observation, made for any model and text: tokens and features hold most of the redundancy of a
layer, heads little, and the rotation spreads the keys' energy over more token components. Each part of it is checked on
the model at hand, and may fail there.
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

NEARLY_FULL = 0.9
"""An axis is called nearly incompressible if a 10 % error takes at least this fraction of its full rank."""

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
class Claim:
    """One part of the paper's finding, checked.

    Attributes:
        text: what the paper says.
        holds: whether it is so here, on every axis and kind that it speaks of.
        evidence: the numbers that decide it, in words.
    """

    text: str
    holds: bool
    evidence: str

    def __str__(self) -> str:
        return f"{self.text}: {'holds' if self.holds else 'does not hold'} ({self.evidence})."


@dataclass(frozen=True)
class SpectrumResults:
    """The spectra of one model on one text.

    Attributes:
        model: which.
        text: origin of the text.
        tokens: tokens of the cache that was looked at.
        spectra: one entry per kind and axis.
        findings: what the numbers say, one sentence each.
        claims: the paper's finding in parts, and whether each holds.
        environment: where and how.
        schema: version of the JSON layout.
    """

    model: ModelFingerprint
    text: str
    tokens: int
    spectra: tuple[AxisSpectrum, ...]
    findings: tuple[str, ...]
    claims: tuple[Claim, ...]
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


def check_claims(spectra: list[AxisSpectrum]) -> list[Claim]:
    """The paper's finding in four parts, each checked by the fractions of full rank that a 10 % error takes.

    An axis of size one says nothing and is left out. With one head, tokens and features are the two sides of one matrix
    and have the same spectrum.
    """
    by_place = {(one.kind, one.axis): one for one in spectra if one.full > 1}
    still = {kind: _axes(by_place, kind, ("heads", "layers")) for kind in KINDS}
    rich = {kind: _axes(by_place, kind, ("tokens", "features")) for kind in KINDS}
    outer = [one for axes in still.values() for one in axes]
    claims = []
    if outer:
        claims += [
            Claim(
                "Heads and layers are nearly incompressible",
                all(one.fraction_10 >= NEARLY_FULL for one in outer),
                _fractions(still),
            ),
            Claim(
                "Tokens and features carry the redundancy",
                all(
                    one.fraction_10 < other.fraction_10 for kind in KINDS for one in rich[kind] for other in still[kind]
                ),
                f"{_fractions(rich)}, against {_fractions(still)}",
            ),
        ]
    for text, easy, hard in (
        ("Values are harder than keys", "keys_pre", "values"),
        ("Keys are easier before RoPE than after", "keys_pre", "keys_post"),
    ):
        pairs = list(zip(rich[easy], rich[hard], strict=True))
        words = [f"{a.axis} {a.rank_10:.1f} against {b.rank_10:.1f} of {a.full}" for a, b in pairs]
        claims.append(Claim(text, all(a.rank_10 < b.rank_10 for a, b in pairs), "components: " + ", ".join(words)))
    return claims


def _axes(by_place: dict[tuple[str, str], AxisSpectrum], kind: str, axes: tuple[str, ...]) -> list[AxisSpectrum]:
    return [by_place[kind, axis] for axis in axes if (kind, axis) in by_place]


def _fractions(axes: dict[str, list[AxisSpectrum]]) -> str:
    parts = [
        f"{KINDS[kind]} {', '.join(f'{one.axis} {one.fraction_10:.0%}' for one in chosen)}"
        for kind, chosen in axes.items()
        if chosen
    ]
    return "; ".join(parts)


def spectrum_of(model: PreTrainedModel, name: str, ids: Tensor, origin: str) -> SpectrumResults:
    """Spectra and findings with everything needed to repeat them. Errors as :func:`cache_spectra`."""
    spectra = cache_spectra(model, ids)
    fingerprint = ModelFingerprint.of(name, model)
    found, checked = tuple(findings(spectra)), tuple(check_claims(spectra))
    return SpectrumResults(fingerprint, origin, int(ids.shape[0]), tuple(spectra), found, checked)


def plot_spectra(results: SpectrumResults, path: Path) -> None:
    """Draw the energy that is lost against the fraction of rank kept: one panel per kind, one line per axis."""
    from kvslim.evaluating.plots import COLOURS, new_figure, save_png

    figure, panels = new_figure(13, 4.2, columns=len(KINDS))
    for axes, (kind, name) in zip(panels, KINDS.items(), strict=True):
        for index, one in enumerate(axis for axis in results.spectra if axis.kind == kind and axis.full > 1):
            kept = [(rank + 1) / one.full for rank in range(one.full)]
            errors = [max(1 - share, 1e-12) ** 0.5 for share in one.share]
            label = f"{one.axis} (full rank {one.full})"
            style = ("-", (0, (2, 2)))[index % 2]  # lines that lie on each other stay two
            axes.plot(kept, errors, color=COLOURS[index], label=label, drawstyle="steps-post", linestyle=style)
        for error in ERRORS:
            axes.axhline(error, color="grey", linestyle=":", linewidth=0.8)
        axes.set(yscale="log", ylim=(1e-3, 1.1), xlim=(0, 1), title=name, xlabel="rank kept, as a fraction of full")
        axes.grid(True, alpha=0.2)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("relative error of truncating this axis alone")
    figure.suptitle(f"{results.model.name}, {results.tokens} tokens: mean over layers", fontsize=10)
    save_png(figure, path)
