"""A compressed cache on disk: one safetensors file that another process resumes from, bit for bit.

The file holds the compressed prefix as it is in memory, the exact tokens behind it, the token ids if they are given,
the settings, and what the model and the tokenizer must be. The layout is in
:mod:`kvslim.checkpointing.session_file`, the plan of the prefix in :mod:`kvslim.checkpointing.session_plan`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvslim.caching.compressed import CompressedCache
from kvslim.caching.prefix import Prefix
from kvslim.caching.report import CellReport
from kvslim.caching.snapshot import SlidingState, Snapshot, layer_groups, restore, take
from kvslim.checkpointing.fingerprint import ModelIdentity, identity_of, tokenizer_hash
from kvslim.checkpointing.session_about import About, Method
from kvslim.checkpointing.session_blocks import Codec, put_together, take_apart, tensor_forms
from kvslim.checkpointing.session_file import Part, SessionFile, UnreadableHereError, file_bytes, write
from kvslim.checkpointing.session_graded import GradedCodec, HasBases
from kvslim.checkpointing.session_tucker import TuckerCodec
from kvslim.errors import CacheStateError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SLIDING = struct.Struct("<QQ?7x")  # tokens seen, tokens held, record_past
_MASK_DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64)


@dataclass(frozen=True)
class Settings:
    """What a method keeps beside the cache itself.

    Attributes:
        model: the model that filled the cache, None if it is gone.
        config: its settings as JSON values.
        price: numbers that it plans the next prompt by.
        method: whose cache it is.
        stats: digest of the calibration statistics that its codes need, if they do.
    """

    model: PreTrainedModel | None
    config: dict[str, Any]
    price: tuple[float, ...] = ()
    method: Method = "jolt"
    stats: str | None = None


@dataclass(frozen=True)
class Session:
    """A conversation, read back.

    Attributes:
        cache: where it stands; pass it to ``generate()`` with all token ids, old and new.
        input_ids: int64 ``(batch, tokens)`` as they were saved, or None. May be longer than what is cached.
        attention_mask: int64 ``(batch, columns)``, 0 where a cached position is padding.
        price: as in :class:`Settings`.
    """

    cache: Any
    input_ids: Tensor | None
    attention_mask: Tensor
    price: tuple[float, ...]


def write_session(
    path: Path,
    cache: CompressedCache,
    settings: Settings,
    *,
    input_ids: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write ``cache`` to ``path``, atomically; an older file there is replaced when the new one is whole.

    Args:
        path: the file.
        cache: a filled cache, between two forward passes.
        settings: see there.
        input_ids: integers ``(batch, tokens)``, all that is cached and perhaps more.
        tokenizer: its vocabulary is recorded (as a hash), and compared when it is given on reading.

    Raises:
        CacheStateError: nothing is cached, a forward pass is under way, or the model is gone.
        ConfigError: ``input_ids`` do not fit, or the file cannot be written.
    """
    state = take(cache)
    about, head, data = _parts(cache, state, settings, input_ids, tokenizer)
    write(path, about.to_json(), head, data)


def session_bytes(
    cache: CompressedCache,
    settings: Settings,
    *,
    input_ids: Tensor | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> int:
    """Size of the file that :func:`write_session` would make. Raises as it does."""
    about, head, data = _parts(cache, take(cache), settings, input_ids, tokenizer)
    return file_bytes(about.to_json(), (*head, *data))


def serialized_bytes(
    cache: CompressedCache,
    settings: Settings,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> int:
    """Bytes that the compressed prefix takes in a file, all of the file's own description included.

    That is the size of the file without token ids, without the exact tokens behind the prefix, and without
    sliding-window layers: what a budget covers.

    Raises:
        CacheStateError: as :func:`write_session`.
    """
    state = take(cache)
    about, head, data = _parts(cache, state, settings, None, tokenizer)
    apart = sum(part.nbytes for part in data if part.name in ("tail", "sliding"))
    return file_bytes(about.to_json(), (*head, *data)) - apart


def read_session(
    path: Path,
    model: PreTrainedModel,
    make_cache: Callable[[About, dict[str, Any]], CompressedCache],
    *,
    device: torch.device | str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Session:
    """Read what :func:`write_session` wrote.

    Args:
        path: the file.
        model: the model that the cache is for; it must be the one that filled it.
        make_cache: makes an empty cache for ``model`` from what the session is about and the settings; may refuse.
        device: where the tensors go, by default where the model is.
        tokenizer: compared with that of the session.

    Raises:
        CheckpointError: the file is missing, truncated, was edited, is no session or of a newer format.
        CacheStateError: the session is of another model, dtype, rotation or tokenizer; the message says which.
    """
    with SessionFile(path) as file:
        about = About.of_file(file)
        check_model(path, about, identity_of(model))
        _check_tokenizer(path, about, tokenizer)
        file.check_data()
        try:
            cache = make_cache(about, about.config_of(file))
        except (ConfigError, TypeError) as error:  # of values that no JSON writer of ours makes
            raise UnreadableHereError(f"The settings of the session {path} are none of this kvslim: {error}") from error
        device = torch.device(device) if device is not None else model.device
        state = _read_state(file, about, cache, device)
        ids = read_ids(file, about)
    restore(cache, state)
    mask = real_columns(state)
    if ids is not None and ids.shape[1] < state.columns:
        raise file.damaged("it has fewer token ids than cached tokens")
    return Session(cache, None if ids is None else ids.to(device), mask.to(device), about.price_of(file))


def check_model(path: Path, about: About, identity: ModelIdentity) -> None:
    """Refuse a session of another model.

    Raises:
        CacheStateError: with what differs.
    """
    if difference := identity.difference(about.model):
        raise CacheStateError(
            f"The session {path} belongs to another model: it has {difference}; this model is {identity.summary()}. "
            "Load the model that it was made with."
        )


def _check_tokenizer(path: Path, about: About, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None:
        return
    if about.tokenizer is None:
        raise CacheStateError(
            f"The session {path} was saved without a tokenizer, so yours cannot be compared. Load it without one."
        )
    if about.tokenizer != tokenizer_hash(tokenizer):
        raise CacheStateError(f"The session {path} was made with another tokenizer: the vocabularies differ.")


# ---- what goes into the file -----------------------------------------------------------------------------------------


def _parts(
    cache: CompressedCache,
    state: Snapshot,
    settings: Settings,
    input_ids: Tensor | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[About, list[Part], list[Part]]:
    """What the file is about, the parts of its head, and the others. Arena last, as its length is any number."""
    if settings.model is None:
        raise CacheStateError("The model of this cache is gone, so a session cannot say whose it is. Keep both.")
    weights = settings.config.get("weights")
    about = About(
        model=identity_of(settings.model),
        config=settings.config | ({"weights": None} if settings.method == "jolt" else {}),
        dtype=str(state.dtype).removeprefix("torch."),
        weights=len(weights or ()),
        price=len(settings.price),
        compressed=state.prefix is not None,
        decoding=state.decoding,
        rolled_back=state.rolled_back,
        note=state.note,
        tokenizer=tokenizer_hash(tokenizer) if tokenizer is not None else None,
        method=settings.method,
        stats=settings.stats,
    )
    plan, arena = b"", []
    if state.prefix is not None:
        record, tensors = take_apart(state.prefix, state.reports, codec_of(cache, about))
        plan, arena = record.to_bytes(), list(tensors.values())
    plan += struct.pack(f"<{about.weights + about.price}d", *(weights or ()), *settings.price)
    plan += bytes(-len(plan) % 8)
    head = [_bytes_part("plan", [torch.frombuffer(bytearray(plan), dtype=torch.uint8)])] if plan else []
    if input_ids is not None:
        ids = _checked_ids(input_ids, state)
        head.append(Part("input_ids", ids.dtype, tuple(ids.shape), [ids]))
    if state.attention_mask is not None:
        mask = state.attention_mask
        mask = mask if mask.dtype in _MASK_DTYPES else mask.bool()
        head.append(Part("attention_mask", mask.dtype, tuple(mask.shape), [mask]))
    head.sort(key=lambda part: -part.dtype.itemsize if part.name != "plan" else -8)  # every tensor stays aligned
    shape = cache.shape
    tail_shape = (shape.layers, 2, state.batch, shape.kv_heads, state.tail[0][0].shape[2], shape.head_dim)
    pieces = [part for pair in state.tail for part in pair]
    data = [Part("tail", state.dtype, tail_shape, pieces)]
    if state.sliding:
        table = b"".join(_SLIDING.pack(s.seen, s.keys.shape[2], s.record_past) for s in state.sliding)
        kept = [part for layer in state.sliding for part in (layer.keys, layer.values)]
        data.append(_bytes_part("sliding", [torch.frombuffer(bytearray(table), dtype=torch.uint8), *kept]))
    if arena:
        data.append(_bytes_part("arena", arena))
    return about, head, data


def _bytes_part(name: str, pieces: Sequence[Tensor]) -> Part:
    return Part(name, torch.uint8, (sum(piece.numel() * piece.element_size() for piece in pieces),), pieces)


def _checked_ids(input_ids: Tensor, state: Snapshot) -> Tensor:
    ids = torch.as_tensor(input_ids)
    if ids.dim() != 2 or ids.shape[0] != state.batch or ids.shape[1] < state.columns or ids.is_floating_point():
        raise ConfigError(
            f"input_ids are integers (batch, tokens) for {state.batch} rows and at least the {state.columns} tokens "
            f"that are cached, not {tuple(ids.shape)} {ids.dtype}."
        )
    if ids.numel() and not -(1 << 31) <= int(ids.min()) <= int(ids.max()) < 1 << 31:
        raise ConfigError("input_ids are token numbers below 2**31.")
    return ids.to(torch.int32)


def codec_of(cache: CompressedCache, about: About) -> Codec:
    """What all blocks of ``cache`` have in common."""
    common: dict[str, Any] = {
        "shape": cache.shape,
        "groups": layer_groups(cache),
        "model_layers": cache._model_layers(),
        "dtype": getattr(torch, about.dtype),
        "rope": cache.rope,
    }
    config = about.config
    if about.method == "jolt":
        return TuckerCodec(**common, levels=config["levels"], seed=config["seed"])
    return GradedCodec(**common, bases=cast(HasBases, cache).bases, run=config["run"])


# ---- what comes out of it --------------------------------------------------------------------------------------------


def _read_state(file: SessionFile, about: About, cache: CompressedCache, device: torch.device) -> Snapshot:
    codec = codec_of(cache, about)
    shape, dtype = cache.shape, codec.dtype
    tail = file.parts.get("tail")
    if tail is None or tail.dtype != dtype or len(tail.shape) != 6:
        raise file.damaged("it has no exact tokens of its dtype")
    _, _, batch, _, tokens, _ = tail.shape
    if tail.shape != (shape.layers, 2, batch, shape.kv_heads, tokens, shape.head_dim) or not batch:
        raise file.damaged("its exact tokens are not of the model's shape")
    one = (dtype, (batch, shape.kv_heads, tokens, shape.head_dim))
    pieces = [piece.to(device) for piece in file.read("tail", [one] * (2 * shape.layers))]
    prefix: Prefix | None = None
    reports: list[CellReport] = []
    if about.compressed:
        plan = about.plan_of(file)
        if len(plan.batch) != batch:
            raise file.damaged("its prefix has another number of rows than its tail")
        forms = tensor_forms(plan, codec)
        stored = file.read("arena", list(forms.values()))
        tensors = {key: tensor.to(device) for key, tensor in zip(forms, stored, strict=True)}
        like = pieces[0].new_zeros(shape.kv_heads, 0, shape.head_dim)
        prefix, reports = put_together(plan, tensors, codec, like)
    elif not tokens:
        raise file.damaged("it holds no tokens")
    columns = tokens + (prefix.columns if prefix is not None else 0)
    layers = list(zip(pieces[::2], pieces[1::2], strict=True))
    sliding = _read_sliding(file, about, columns, one, device)
    mask = _read_mask(file, batch, columns)
    return Snapshot(prefix, tuple(reports), tuple(layers), sliding, mask, about.note, about.decoding, about.rolled_back)


def _read_sliding(
    file: SessionFile, about: About, columns: int, one: tuple[torch.dtype, tuple[int, ...]], device: torch.device
) -> tuple[SlidingState, ...]:
    """The sliding-window layers: a table of what each has seen and holds, then keys and values."""
    part, count = file.parts.get("sliding"), about.model.sliding
    if (part is None) != (count == 0):
        raise file.damaged("it has not the sliding-window layers of its model")
    if part is None or about.model.window is None:
        return ()
    table_form: tuple[torch.dtype, tuple[int, ...]] = (torch.uint8, (count * _SLIDING.size,))
    table = file.peek("sliding", count * _SLIDING.size)
    dtype, (batch, heads, _, features) = one
    states, forms = list(_SLIDING.iter_unpack(table)), [table_form]
    for seen, held, record_past in states:
        enough = min(columns, about.model.window - 1)
        if seen != columns or not (enough <= held <= columns if record_past else held <= columns):
            raise file.damaged("its sliding-window layers have not seen what the others have")
        forms += [(dtype, (batch, heads, held, features))] * 2
    _, *kept = file.read("sliding", forms)
    pairs = zip(kept[::2], kept[1::2], strict=True)
    return tuple(
        SlidingState(keys.to(device), values.to(device), seen, record_past)
        for (seen, _, record_past), (keys, values) in zip(states, pairs, strict=True)
    )


def read_ids(file: SessionFile, about: About) -> Tensor | None:
    """The token ids of a session, int64 ``(batch, tokens)``, or None.

    Raises:
        CheckpointError: they are no such tensor.
    """
    part = file.parts.get("input_ids")
    if part is None:
        return None
    if part.dtype != torch.int32 or len(part.shape) != 2:
        raise file.damaged("its token ids are none")
    return _from_bytes(file.small("input_ids"), part).long()


def _read_mask(file: SessionFile, batch: int, columns: int) -> Tensor | None:
    part = file.parts.get("attention_mask")
    if part is None:
        return None
    fits = part.dtype in _MASK_DTYPES and len(part.shape) == 2 and part.shape[0] and batch % part.shape[0] == 0
    if not fits or part.shape[1] > columns:
        raise file.damaged("its attention mask does not fit")
    stored = file.small("attention_mask")
    if part.dtype == torch.bool and stored and max(stored) > 1:
        raise file.damaged("its attention mask is none")
    return _from_bytes(stored, part)


def _from_bytes(data: bytes, part: Part) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=part.dtype) if data else torch.empty(0, dtype=part.dtype)
    return flat.reshape(part.shape)


def real_columns(state: Snapshot) -> Tensor:
    """int64 ``(batch, columns)``: 1 where a cached position is a real token."""
    mask = torch.ones(state.batch, state.columns, dtype=torch.int64)
    if state.attention_mask is not None:
        given = state.attention_mask.to("cpu").bool().long()
        given = given.repeat_interleave(state.batch // given.shape[0], dim=0)
        mask[:, : given.shape[1]] = given
    if state.prefix is not None:
        mask[:, : state.prefix.columns] = 0
        for index, row in enumerate(state.prefix.rows):
            for part in row.stretches:
                mask[index, part.column : part.column + part.tokens] = 1
    return mask
