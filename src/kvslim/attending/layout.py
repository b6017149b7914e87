"""Which layers of a model a run-time cache compresses, and which stay exact."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvslim.attending.families import family_of, kv_shape_of, sliding_window_of
from kvslim.errors import UnsupportedModelError
from kvslim.types import KVShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerSlot = tuple[int | None, int | None]
"""``(slot, None)`` for a layer that is compressed, ``(None, window)`` for a sliding-window layer that stays exact."""


def compressible_layers(model: PreTrainedModel) -> tuple[KVShape, list[LayerSlot]]:
    """The shape of the full-attention layers together, and per model layer its slot among them.

    Raises:
        UnsupportedModelError: the model type has no row, or every layer has a sliding window.
    """
    family_of(model, run_time=True)
    windows = sliding_window_of(model)
    slots: list[LayerSlot] = []
    for window in windows:
        slots.append((None, window) if window is not None else (sum(s is not None for s, _ in slots), None))
    full = windows.count(None)
    if not full:
        raise UnsupportedModelError(
            "Every layer of this model has a sliding window, which already bounds its cache. "
            "There is nothing to compress."
        )
    return dataclasses.replace(kv_shape_of(model), layers=full), slots
