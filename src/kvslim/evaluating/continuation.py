"""The protocol behind every quality figure: prefill T tokens, compress, score the next N *through* the cache.

One uncompressed run per window gives the reference: its keys and values fill the run-time caches, so that the prefill
is paid once, and its logits are what the others are compared with. A Palu model makes its latents itself.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvslim.attending.compat import cache_keyword
from kvslim.attending.families import attention_modules, sliding_window_of
from kvslim.attending.latent_model import LatentModelMixin
from kvslim.baselines.transformers_cache import TransformersCache, rebuilt
from kvslim.caching.block import storage_bytes
from kvslim.caching.compressed import CompressedCache
from kvslim.caching.latent import LatentCache
from kvslim.caching.layer import CompressedLayer
from kvslim.config import JsonConfig
from kvslim.errors import ConfigError
from kvslim.evaluating.divergence import Divergence, divergence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Steps = Literal["block", "token"]


@dataclass(frozen=True)
class ContinuationConfig(JsonConfig):
    """What is prefilled and scored in each window.

    Attributes:
        tokens: prefilled tokens T, the compressed part.
        score: scored tokens N; a window holds ``T + N + 1``.
        steps: feed the N tokens in one forward (``block``) or one at a time, as decoding does (``token``). The
            mathematics is the same; rounding differs.
    """

    tokens: int = 2048
    score: int = 256
    steps: Steps = "block"

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.score < 1:
            raise ConfigError(f"tokens and score are numbers of tokens ≥ 1, not {self.tokens} and {self.score}.")
        if self.steps not in ("block", "token"):
            raise ConfigError(f"steps is 'block' or 'token', not {self.steps!r}.")

    @property
    def window(self) -> int:
        """Tokens that one window needs."""
        return self.tokens + self.score + 1


@dataclass(frozen=True)
class Reference:
    """The uncompressed run over one window.

    Attributes:
        ids: ``(1, T + N + 1)`` int64, on the model's device.
        filled: the uncompressed cache after the prefill, ``(1, kv_heads, t, head_dim)`` per layer in the model's dtype;
            ``t = T`` except for sliding-window layers, which keep their window.
        logits: ``(N, vocab)`` float32 that predict tokens ``T + 1`` to ``T + N``.
    """

    ids: Tensor
    filled: DynamicCache
    logits: Tensor


@dataclass(frozen=True)
class Scored:
    """One cache on one window.

    Attributes:
        divergence: sums over the N scored tokens.
        key_lost, value_lost: squared error of what attention sees against the uncompressed cache, all layers together.
        key_energy, value_energy: squared norm of the uncompressed keys and values.
        nbytes: measured bytes of the cache after compression, before scoring.
        dense_nbytes: bytes of the same tokens in bf16.
        seconds: time to compress, prefill excluded; for Palu the time of its own prefill.
        key_share: share of the compressed cells' bytes that is for keys; None without cells.
        layer_errors: squared error over energy of each full-attention layer's keys, then its values.
    """

    divergence: Divergence
    key_lost: float
    value_lost: float
    key_energy: float
    value_energy: float
    nbytes: int
    dense_nbytes: int
    seconds: float
    key_share: float | None = None
    layer_errors: tuple[float, ...] = ()


@torch.no_grad()
def run_reference(model: PreTrainedModel, window: Tensor, config: ContinuationConfig) -> Reference:
    """Run the uncompressed model over one window ``(T + N + 1,)`` of token ids.

    Raises:
        ConfigError: the window has another length, or a token that the model does not know.
    """
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    if window.ndim != 1 or window.shape[0] != config.window:
        raise ConfigError(f"A window holds {config.window} tokens here, not {tuple(window.shape)}.")
    if int(window.min()) < 0 or int(window.max()) >= vocabulary:
        raise ConfigError(f"Token ids go from 0 to {vocabulary - 1} in this model; is the tokenizer another model's?")
    ids = window[None].to(model.device)
    cache = DynamicCache(config=model.config)
    prefill(model, cache, ids[:, : config.tokens])
    filled = copy.deepcopy(cache)
    return Reference(ids, filled, score(model, cache, ids, config))


def prefill(model: PreTrainedModel, cache: Cache, ids: Tensor) -> None:
    """Run ``ids`` ``(1, T)`` into ``cache``; no logits are made but the last."""
    model(input_ids=ids, logits_to_keep=1, **{cache_keyword(model): cache})


def share_prefill(model: PreTrainedModel, source: Cache, target: Cache, ids: Tensor) -> None:
    """Put the uncompressed prefill of ``ids`` ``(1, T)`` in ``source`` into the empty run-time cache ``target`` too.

    Keys and values are handed over layer by layer, which is exactly what a prefill does. A model with sliding windows
    keeps too little for that and is run again.
    """
    if any(window is not None for window in sliding_window_of(model)):
        prefill(model, target, ids.to(model.device))
        return
    for index, layer in enumerate(source.layers):
        target.update(layer.keys, layer.values, index)


def score(model: PreTrainedModel, cache: Cache, ids: Tensor, config: ContinuationConfig) -> Tensor:
    """Feed tokens ``T`` to ``T + N - 1`` to the model on top of ``cache``; ``(N, vocab)`` float32 logits."""
    stop = config.tokens + config.score
    starts = range(config.tokens, stop, 1 if config.steps == "token" else config.score)
    size = 1 if config.steps == "token" else config.score
    keep = {cache_keyword(model): cache}
    parts = [model(input_ids=ids[:, at : at + size], **keep).logits[0].float() for at in starts]
    return torch.cat(parts)


@torch.no_grad()
def score_cache(model: PreTrainedModel, cache: Cache, reference: Reference, config: ContinuationConfig) -> Scored:
    """Fill and compress a run-time cache, then score through it. A plain transformers cache is scored as it is.

    Raises:
        ConfigError: the tokens are too few to be compressed, so that the uncompressed cache would be scored.
    """
    prompt, seconds = reference.ids[:, : config.tokens], 0.0
    if isinstance(cache, CompressedCache):
        seconds = fill_and_compress(model, cache, reference.filled, prompt)
    else:
        started = time.perf_counter()
        share_prefill(model, reference.filled, cache, prompt)
        if isinstance(cache, TransformersCache):  # it codes what it is given at once
            _finish(model)
            seconds = time.perf_counter() - started
    return _scored(model, cache, reference, config, seconds)


def fill_and_compress(model: PreTrainedModel, cache: CompressedCache, source: Cache, ids: Tensor) -> float:
    """Put the prefill of ``ids`` ``(1, T)`` in ``source`` into ``cache`` and compress it; the compression's seconds.

    Raises:
        ConfigError: the tokens are too few to be compressed, so that the uncompressed cache would be measured.
    """
    share_prefill(model, source, cache, ids)
    _finish(model)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # said as an error below
        cache.compress()
    if cache.prefix is None:
        raise ConfigError(f"{ids.shape[1]} tokens are too few to measure: {cache.note}. Use more tokens.")
    _finish(model)
    return time.perf_counter() - started


def _finish(model: PreTrainedModel) -> None:
    """Wait for the GPU, so that a clock around its work measures it."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


@torch.no_grad()
def score_palu(model: PreTrainedModel, cache: LatentCache, reference: Reference, config: ContinuationConfig) -> Scored:
    """Prefill a Palu model into its own latents, then score through them.

    If the model computes in float32 its exact latents are rounded to bf16 after the prefill, as a bf16 model would keep
    them: what is counted is what is scored. Coded latents are what they are.
    """
    _finish(model)
    started = time.perf_counter()
    prefill(model, cache, reference.ids[:, : config.tokens])
    _finish(model)
    seconds = time.perf_counter() - started
    if model.dtype.itemsize > 2:
        for layer in cache.layers:
            layer.round_exact(torch.bfloat16)
    return _scored(model, cache, reference, config, seconds)


def _scored(
    model: PreTrainedModel, cache: Cache, reference: Reference, config: ContinuationConfig, seconds: float
) -> Scored:
    nbytes = cache_bytes(cache)
    lost, energy, layer_errors = [0.0, 0.0], [0.0, 0.0], []
    for index, dense in enumerate(reference.filled.layers):
        pairs = zip(seen_by_attention(model, cache, index), (dense.keys, dense.values), strict=True)
        for kind, (seen, exact) in enumerate(pairs):
            gap = float((seen.float() - exact.float()).square().sum(dtype=torch.float64))
            whole = float(exact.float().square().sum(dtype=torch.float64))
            lost[kind] += gap
            energy[kind] += whole
            if not getattr(dense, "is_sliding", False):
                layer_errors.append(gap / whole if whole else 0.0)
    logits = score(model, cache, reference.ids, config)
    targets = reference.ids[0, config.tokens + 1 : config.tokens + config.score + 1]
    return Scored(
        divergence(logits, reference.logits, targets),
        key_lost=lost[0],
        value_lost=lost[1],
        key_energy=energy[0],
        value_energy=energy[1],
        nbytes=nbytes,
        dense_nbytes=sum(2 * (layer.keys.numel() + layer.values.numel()) for layer in reference.filled.layers),
        seconds=seconds,
        key_share=_key_share(cache),
        layer_errors=tuple(layer_errors),
    )


def _key_share(cache: Any) -> float | None:
    cells = getattr(cache, "cells", ())
    total = sum(cell.nbytes for cell in cells)
    return sum(cell.nbytes for cell in cells if cell.kind == "keys") / total if total else None


def cache_bytes(cache: Any) -> int:
    """Measured bytes of everything a cache keeps.

    An uncompressed cache in float32 is measured on a bf16 copy: nobody stores it wider, and the ratio is one then.
    """
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    kept = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(storage_bytes([tensor.to(torch.bfloat16).clone()]) for tensor in kept)


def seen_by_attention(model: PreTrainedModel, cache: Cache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys, rotated, and values that attention gets for the cached tokens: ``(1, kv_heads, t, head_dim)`` each.

    For Palu they are rebuilt from the latents. Its deeper layers see inputs that earlier layers have changed, so the
    error is that of the whole model at this layer, not of one factorization alone.
    """
    held = cache.layers[layer]
    if isinstance(held, CompressedLayer):
        return held.dense()
    if isinstance(cache, TransformersCache):
        return rebuilt(held)
    if not isinstance(cache, LatentCache):
        return held.keys, held.values
    attention: Any = attention_modules(model)[layer]
    dtype = attention.k_latent.down.weight.dtype
    positions = cache.positions.last(held.held) if cache.layout.rotary else None
    latents = (part.to(dtype) for part in held.dense())
    keys, values = attention.dense(*latents, positions)
    return keys, values


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Tensor) -> float:
    """One-pass perplexity over ``(windows, length)`` token ids that do not overlap; each window is run on its own.

    No cache is read back, so a run-time cache has no part in it. For a Palu model keys and values go through the
    factors all the same, so its loss shows; if it codes latents, each window passes through an empty cache of its own,
    and attention sees what that cache keeps.

    Raises:
        ConfigError: the windows are not of this shape, or shorter than two tokens.
    """
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ConfigError(f"Windows have the shape (windows, length >= 2), not {tuple(windows.shape)}.")
    nll = 0.0
    coded = isinstance(model, LatentModelMixin) and model.palu_layout.codes is not None
    for window in windows.to(model.device):
        logits = model(input_ids=window[None], use_cache=coded).logits[0, :-1].float()
        nll += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(nll / (windows.shape[0] * (windows.shape[1] - 1)))
