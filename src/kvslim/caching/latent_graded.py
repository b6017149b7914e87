"""Latents of one layer at widths chosen channel by channel, coded when a token arrives.

Every layer, and its keys and values, have a layout of their own; together they meet one budget. The scales of the
channels are in the model's factors, so that the layout is all that a cache has to know. The codec is
:mod:`kvslim.quantizing.gained`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from kvslim.caching.latent_tokens import TokenwiseLatentLayer
from kvslim.config import is_count
from kvslim.errors import ConfigError
from kvslim.quantizing import gained
from kvslim.quantizing.channels import WIDTHS, ChannelLayout, layout_of
from kvslim.quantizing.gained import GainedCodes

RUN = 8
"""Neighbouring channels of a group that share a width; the last run of a group may have fewer."""

_Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GradedLatentCodes:
    """How a model's latents are coded at widths per channel.

    Attributes:
        sinks: tokens at the start of the cache that stay exact: columns of the batch, so in a left-padded row they
            are padding first.
        window: most recent tokens that stay exact until as many newer ones have come.
        key_ranks: per layer, the rank of each group of KV heads.
        value_ranks: the same for values.
        key_widths: per layer and group, the bits of each run of :data:`RUN` channels, 0 to 8.
        value_widths: the same for values.

    Raises:
        ConfigError: a number is out of range, or widths and ranks do not fit.
    """

    sinks: int
    window: int
    key_ranks: _Groups
    value_ranks: _Groups
    key_widths: tuple[_Groups, ...]
    value_widths: tuple[_Groups, ...]

    def __post_init__(self) -> None:
        for name, value in (("sinks", self.sinks), ("window", self.window)):
            if not is_count(value, 0):
                raise ConfigError(f"{name} is a number of exact tokens, at least 0, not {value!r}.")
        for kind, ranks, widths in (
            ("keys", self.key_ranks, self.key_widths),
            ("values", self.value_ranks, self.value_widths),
        ):
            if len({len(self.key_ranks), len(ranks), len(widths)}) > 1:
                raise ConfigError(f"Widths of {kind} for {len(widths)} layers, ranks for {len(self.key_ranks)}.")
            for layer, groups in enumerate(zip(ranks, widths, strict=True)):
                _check_groups(*groups, f"the {kind} of layer {layer}")

    @cached_property
    def layouts(self) -> tuple[tuple[ChannelLayout, ChannelLayout], ...]:
        """Per layer those of the keys and of the values, over the channels of all groups."""
        keys, values = (
            [_layout(*groups) for groups in zip(ranks, widths, strict=True)]
            for ranks, widths in ((self.key_ranks, self.key_widths), (self.value_ranks, self.value_widths))
        )
        return tuple(zip(keys, values, strict=True))

    @property
    def bits(self) -> float:
        """Mean width of the latent channels of all layers."""
        every = [layout for pair in self.layouts for layout in pair]
        return sum(sum(layout.widths) for layout in every) / sum(layout.channels for layout in every)

    @property
    def token_bytes(self) -> int:
        """Bytes of one coded token in all layers: codes and gains."""
        return sum(gained.token_bytes(layout) for pair in self.layouts for layout in pair)

    def new_layer(self, layer: int, sliding_window: int | None) -> GradedLatentLayer:
        """An empty cache layer."""
        return GradedLatentLayer(self, layer, sliding_window)


class GradedLatentLayer(TokenwiseLatentLayer[GainedCodes]):
    """Latents of one layer at widths per channel, but for sinks and recent tokens.

    Attributes:
        outlying: tokens coded so far, keys and values apart, whose errors are far larger than calibration predicts
            (:data:`kvslim.quantizing.gained.OUTLYING`); an int64 scalar tensor, ``None`` before the first.

    Args:
        codes: how the model's latents are coded.
        layer: which of its layers this is.
        sliding_window: the attention window in tokens, or ``None``.
    """

    def __init__(self, codes: GradedLatentCodes, layer: int, sliding_window: int | None = None) -> None:
        self.codes, self.layouts = codes, codes.layouts[layer]
        self.outlying: Tensor | None = None
        keys, values = self.layouts
        super().__init__(codes.sinks, codes.window, (keys.channels, values.channels), sliding_window)

    def tensors(self) -> list[Tensor]:
        return super().tensors() if self.outlying is None else [*super().tensors(), self.outlying]

    def _encode(self, latents: Tensor, kind: int) -> GainedCodes:
        stored, outliers = gained.encode(latents, self.layouts[kind])
        self.outlying = outliers if self.outlying is None else self.outlying + outliers
        return stored

    def _decode(self, stored: GainedCodes, kind: int) -> Tensor:
        return gained.decode(stored, self.layouts[kind])

    def _join(self, first: GainedCodes, second: GainedCodes) -> GainedCodes:
        return gained.join(first, second)

    def _clear(self) -> None:
        super()._clear()
        self.outlying = None


def runs_of(rank: int) -> int:
    """Runs of a group of ``rank`` channels."""
    return -(-rank // RUN)


def _check_groups(ranks: Sequence[int], widths: Sequence[Sequence[int]], what: str) -> None:
    """Require one known width for each run of each group."""
    if len(ranks) != len(widths) or any(len(runs) != runs_of(r) for r, runs in zip(ranks, widths, strict=False)):
        raise ConfigError(f"The widths of {what} are not one for each {RUN} channels of the ranks {list(ranks)}.")
    if wrong := [width for runs in widths for width in runs if not is_count(width, 0) or width not in WIDTHS]:
        raise ConfigError(f"The widths of {what} are 0 to 8 bits, not {wrong[0]!r}.")


def _layout(ranks: Sequence[int], widths: Sequence[Sequence[int]]) -> ChannelLayout:
    """Runs end with their group, so the layout is told the width of every channel."""
    flat = [runs[channel // RUN] for rank, runs in zip(ranks, widths, strict=True) for channel in range(rank)]
    return layout_of(flat, 1, len(flat))
