"""The attention implementation ``kvslim``: attention straight from the compressed form (handle mode).

    import kvslim
    kvslim.register()
    model.set_attn_implementation("kvslim")

With plain keys and values it is ``sdpa``. With the handles of a compressed cache it walks over the prefix tile by tile
under an online softmax, in float32, and never has more than one tile of it dense: post-RoPE keys and all values are
multiplied as they are stored, pre-RoPE keys are rebuilt and rotated one tile at a time.

What a missing mask means here: every query sees all real tokens up to its own, the last query being the last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvslim.caching.handles import HANDLE_ATTENTION, KEYS, VALUES, Handle, LayerView
from kvslim.caching.prefix import CompressedRow, Stretch
from kvslim.errors import UnsupportedModelError

TILE_TOKENS = 1024
"""Tokens that are dense at a time, at most; fewer when there are so many queries that their scores would be larger."""
_TILE_SCORES = 1 << 24  # 64 MiB of float32
_REFUSED = {
    "softcap": "a soft cap on the scores",
    "s_aux": "attention sinks learned per head",
}


def register() -> None:
    """Make ``kvslim`` known to transformers, as an attention and as a mask function; again is harmless."""
    AttentionInterface.register(HANDLE_ATTENTION, attention_forward)
    AttentionMaskInterface.register(HANDLE_ATTENTION, attention_mask)


# ---- the mask --------------------------------------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The boolean mask of ``sdpa``, ``(batch, 1, q_length, kv_length)``; None where it would say nothing new.

    That is a plain causal mask whose last query is the last key, without padding and within the window: also for
    several queries behind a cache, where ``sdpa`` cannot do without. The arguments are those of ``sdpa``'s own.
    """
    make: Callable[..., Tensor | None] = AttentionMaskInterface()["sdpa"]
    to_the_end = isinstance(q_offset, int) and kv_offset == 0 and q_offset + q_length == kv_length
    if allow_is_causal_skip and to_the_end and not torch.compiler.is_compiling():
        within = local_size is None or kv_length < local_size
        padded = attention_mask is not None and (
            attention_mask.shape[-1] < kv_length or not bool(attention_mask[:, :kv_length].all())
        )
        if within and not padded:
            return None
    # sdpa's other reading of a missing mask, queries that are the first keys of a static cache, is not ours.
    skip = allow_is_causal_skip and q_length in (1, kv_length)
    return make(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=skip, **kwargs,
    )  # fmt: skip


# ---- the attention ---------------------------------------------------------------------------------------------------


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend; the signature is that of every attention function of transformers.

    Args:
        module: the attention module, asked for ``is_causal`` only.
        query: ``(batch, heads, n, head_dim)``.
        key: ``(batch, kv_heads, columns, head_dim)``, plain or a handle.
        value: of the same shape; the other handle of the layer if ``key`` is one.
        attention_mask: boolean or additive, broadcastable to ``(batch, heads, n, columns)``; more columns are ignored.
        dropout: on the attention weights; handles are decoded for it, since ``sdpa`` draws it.
        scaling: of the scores; one over the root of ``head_dim`` by default.
        is_causal: overrides the module's.
        **kwargs: ``position_bias`` is passed on to ``sdpa``; what would change the result otherwise is refused.

    Returns:
        ``(batch, n, heads, head_dim)`` in the dtype of ``query``, zeros for a query that sees nothing; and no weights.

    Raises:
        UnsupportedModelError: the model wants a soft cap or learned sinks.
    """
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"The attention implementation {HANDLE_ATTENTION!r} does not know {what} ({name}), which this model "
                "asks for. Call model.set_attn_implementation('eager'); a compressed cache works with it too."
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    view = _view_of(key, value)
    if view is None or view.decoded or dropout or kwargs.get("position_bias") is not None:
        sdpa: Callable[..., tuple[Tensor, None]] = AttentionInterface()["sdpa"]
        queries, columns = query.shape[2], key.shape[2]
        if attention_mask is None and causal and 1 < queries < columns:
            attention_mask = _visible(queries, columns, 0, columns, query.device)[None, None]
        return sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = attend(view, query, attention_mask, scaling=scaling, causal=causal)
    return attended.transpose(1, 2).contiguous(), None


def _view_of(key: Tensor, value: Tensor) -> LayerView | None:
    """The layer behind two handles, or None if these are not the handles of one layer in their places."""
    if not (isinstance(key, Handle) and isinstance(value, Handle)):
        return None
    return key.source if key.source is value.source and (key.side, value.side) == (KEYS, VALUES) else None


def attend(view: LayerView, query: Tensor, mask: Tensor | None, *, scaling: float, causal: bool) -> Tensor:
    """Attention of ``query`` ``(batch, heads, n, head_dim)`` to a layer: the same shape and dtype.

    Without a ``mask``, columns that belong to no token of a row (its padding) are not seen, and if ``causal`` the
    queries are the last ``n`` tokens.
    """
    batch, kv_heads, columns, _ = view.shape
    # (batch, kv_heads, heads per kv head, n, head_dim): heads of one KV head are neighbours, as in repeat_kv
    heads = (query.to(torch.float32) * scaling).unflatten(1, (kv_heads, -1))
    if mask is not None:
        mask = mask[..., :columns].expand(batch, -1, -1, -1)
        mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, -1))
    groups = view.prefix.groups()
    parts = [_attend_prefix(view, heads, rows, mask) for rows in groups]
    order = [row for rows in groups for row in rows]
    back = sorted(range(batch), key=order.__getitem__)
    running = _Softmax(*(_rows(torch.cat(part), back) for part in zip(*parts, strict=True)))
    _attend_tail(view, heads, mask, running, causal=causal)
    return running.result().flatten(1, 2).to(query.dtype)


def _attend_prefix(view: LayerView, heads: Tensor, rows: list[int], mask: Tensor | None) -> tuple[Tensor, ...]:
    """The prefix of the batch ``rows`` that share one stored row: decoded once, attended to by the queries of all."""
    own = _rows(heads, rows).transpose(0, 1)
    shape, flat = own.shape[1:-1], own.flatten(1, 3)  # (kv_heads, n of all rows, head_dim)
    running = _Softmax.empty(flat)
    size = max(1, min(TILE_TOKENS, _TILE_SCORES // (flat.shape[0] * flat.shape[1])))
    for column, scores, mix in _tiles(view.prefix.rows[rows[0]], view.slot, flat, size):
        visible = scores
        if mask is not None:
            part = _rows(mask, rows)[..., column : column + scores.shape[-1]].transpose(0, 1)
            visible = _masked(scores.unflatten(1, shape), part).flatten(1, 3)
        running.add(visible, mix)
    return tuple(state.unflatten(1, shape).transpose(0, 1) for state in running.state)


def _rows(x: Tensor, rows: list[int]) -> Tensor:
    """``x[rows]``; a view if these are neighbours, as the beams of one prompt are."""
    first, last = rows[0], rows[-1] + 1
    return x[first:last] if rows == list(range(first, last)) else x[rows]


def _tiles(
    row: CompressedRow, layer: int, query: Tensor, size: int
) -> Iterator[tuple[int, Tensor, Callable[[Tensor], Tensor]]]:
    """Piece by piece: first column, scores ``(kv_heads, n, tokens)``, and what mixes the values by weights of them.

    What is stored elsewhere (offloaded) travels to the query compressed, one stretch of this layer at a time.
    """
    for stored in row.stretches:
        stretch = stored.on(layer, query.device)
        for start in range(0, stretch.tokens, size):
            stop = min(start + size, stretch.tokens)
            scores = stretch.scores(layer, query, start, stop)
            yield stretch.column + start, scores, partial(_mix_stored, stretch, layer, start, stop)


def _mix_stored(stretch: Stretch, layer: int, start: int, stop: int, weights: Tensor) -> Tensor:
    return stretch.mix(layer, weights, start, stop)


def _mix_exact(values: Tensor, weights: Tensor) -> Tensor:
    return weights @ values.to(weights)


def _attend_tail(view: LayerView, heads: Tensor, mask: Tensor | None, running: _Softmax, *, causal: bool) -> None:
    """The exact tail, all rows together."""
    keys, values = view.tail
    tokens, queries, columns = keys.shape[2], heads.shape[3], view.prefix.columns
    size = max(1, min(TILE_TOKENS, _TILE_SCORES // heads[..., 0].numel()))
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        scores = heads @ keys[:, :, None, start:stop].to(heads).mT
        if mask is not None:
            scores = _masked(scores, mask[..., columns + start : columns + stop])
        elif causal and queries > 1:
            scores = _masked(scores, _visible(queries, tokens, start, stop, scores.device))
        running.add(scores, partial(_mix_exact, values[:, :, None, start:stop]))


def _visible(queries: int, tokens: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Which of tokens ``start`` to ``stop`` each of the last ``queries`` tokens sees: boolean ``(queries, tokens)``."""
    own = torch.arange(tokens - queries, tokens, device=device)
    return torch.arange(start, stop, device=device) <= own[:, None]


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask.to(scores.dtype)


class _Softmax:
    """Softmax-weighted values of what was seen so far, rescaled as larger scores come (online softmax).

    Args:
        top: largest score of each query.
        total: sum of the weights relative to it.
        mixed: ``(..., head_dim)`` values summed with these weights.
    """

    def __init__(self, top: Tensor, total: Tensor, mixed: Tensor) -> None:
        self.state = (top, total, mixed)

    @classmethod
    def empty(cls, query: Tensor) -> _Softmax:
        zero = torch.zeros_like(query[..., 0])
        return cls(zero - torch.inf, zero, torch.zeros_like(query))

    def add(self, scores: Tensor, mix: Callable[[Tensor], Tensor]) -> None:
        """Take in a tile of ``scores``; ``mix`` sums its values by given weights."""
        top, total, mixed = self.state
        new = torch.maximum(top, scores.amax(-1))
        # A query that has seen nothing has top −inf; measured from 0 its weights are 0, not NaN.
        base = new.masked_fill(new == -torch.inf, 0)
        weights = (scores - base[..., None]).exp_()
        fade = (top - base).exp()
        self.state = (new, total * fade + weights.sum(-1), mixed * fade[..., None] + mix(weights))

    def result(self) -> Tensor:
        """The weighted mean; zeros for a query that saw nothing."""
        _, total, mixed = self.state
        return mixed / total.masked_fill(total == 0, 1)[..., None]
