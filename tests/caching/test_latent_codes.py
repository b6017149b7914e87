"""The latent cache with packed codes: what is coded when, bytes, cropping, rows, windows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from kvslim.caching.latent import LatentCache, layout_of
from kvslim.caching.latent_codes import CodedLatentLayer, LatentCodes
from kvslim.errors import CacheStateError, ConfigError, NonFiniteError
from kvslim.quantizing import grouped
from kvslim.types import KVShape

KEY_RANKS, VALUE_RANKS = (4, 2), (7,)
TOKEN = 2 * 4 + 1 * 4 + (2 + 1) + 4  # at 4 bits: 2 + 1 bytes and 2 x 4 for keys, 4 bytes and 4 for values


def empty(
    windows: tuple[int | None, ...] = (None, None), *, bits: int = 4, sinks: int = 0, window: int = 0
) -> LatentCache:
    count = len(windows)
    codes = LatentCodes(bits, sinks, window, (KEY_RANKS,) * count, (VALUE_RANKS,) * count)
    return LatentCache(layout_of(KVShape(count, 2, 8), windows, codes=codes))


def latents(batch: int, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, count, rank, generator=generator).to(dtype) for rank in (6, 7))
    return key, value


def feed(cache: LatentCache, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Append to every layer; what the last one returns."""
    for layer in range(len(cache.layers)):
        keys, values, _ = cache.append(*pair, layer, None)
    return keys, values


def coded(x: Tensor, ranks: tuple[int, ...], bits: int = 4) -> Tensor:
    return grouped.decode(grouped.encode(x, ranks, bits), ranks, bits).to(x.dtype)


def stored(cache: LatentCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer.tensors()]


def same(one: LatentCache, other: LatentCache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(stored(one), stored(other), strict=True))


# --- what is coded when -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("sizes", [[9, 1, 1, 1], [2, 2, 8], [1] * 12])
def test_portions_make_no_difference_without_a_window(sinks: int, sizes: list[int]) -> None:
    whole, parts = empty(sinks=sinks), empty(sinks=sinks)
    pair = latents(2, 12)
    at_once = feed(whole, pair)
    seen = [feed(parts, (k, v)) for k, v in zip(pair[0].split(sizes, 1), pair[1].split(sizes, 1), strict=True)]
    assert same(whole, parts)
    for kind in (0, 1):
        for step, stop in zip(seen, torch.tensor(sizes).cumsum(0).tolist(), strict=True):
            assert torch.equal(step[kind], at_once[kind][:, :stop])


def test_sinks_and_recent_tokens_are_exact_and_all_others_coded() -> None:
    cache = empty(sinks=2, window=3)
    pair = latents(2, 9)
    keys, values = feed(cache, pair)
    for exact, ours, ranks in ((pair[0], keys, KEY_RANKS), (pair[1], values, VALUE_RANKS)):
        assert torch.equal(ours[:, :2], exact[:, :2])
        assert torch.equal(ours[:, 6:], exact[:, 6:])
        assert torch.equal(ours[:, 2:6], coded(exact[:, 2:6], ranks))
        assert not torch.equal(ours[:, 2:6], exact[:, 2:6])
    assert [layer.coded for layer in cache.layers] == [4, 4]


@pytest.mark.parametrize("fitted", [True, False])
def test_ranges_are_fitted_as_the_codes_say(fitted: bool) -> None:
    codes = LatentCodes(2, 0, 0, (KEY_RANKS,), (VALUE_RANKS,), fitted=fitted)
    cache = LatentCache(layout_of(KVShape(1, 2, 8), (None,), codes=codes))
    pair = latents(2, 9)
    for ours, exact, ranks in zip(feed(cache, pair), pair, (KEY_RANKS, VALUE_RANKS), strict=True):
        kinds = [grouped.decode(grouped.encode(exact, ranks, 2, fitted=f), ranks, 2) for f in (True, False)]
        assert not torch.equal(*kinds)
        assert torch.equal(ours, kinds[not fitted])


class Model:
    """A cache layer in slow motion: a list of tokens, each exact or coded for good."""

    def __init__(self, sinks: int, window: int, sliding: int | None, batch: int) -> None:
        self.sinks, self.window, self.sliding = sinks, window, sliding
        self.tokens: list[list[Any]] = []  # [index, key row, value row, coded]
        self.seen, self.order = 0, list(range(batch))

    def append(self, keys: Tensor, values: Tensor) -> list[list[Any]]:
        for step in range(keys.shape[1]):
            self.tokens.append([self.seen + step, keys[:, step], values[:, step], False])
        self.seen += keys.shape[1]
        for token in self.tokens:
            if not token[3] and self.sinks <= token[0] < self.seen - self.window:
                token[1:] = coded(token[1], KEY_RANKS), coded(token[2], VALUE_RANKS), True
        if self.sliding is None:
            return self.tokens
        return self.tokens[-(self.sliding - 1 + keys.shape[1]) :]

    def settle(self, recording: bool) -> None:
        if self.sliding is not None and not recording:
            self.tokens = self.tokens[len(self.tokens) - min(len(self.tokens), self.sliding - 1) :]

    def crop(self, removed: int) -> None:
        removed = min(removed, self.seen)
        self.seen -= removed
        self.tokens = self.tokens[: max(len(self.tokens) - removed, 0)]
        self.settle(recording=False)

    def rows(self, order: Tensor) -> None:
        for token in self.tokens:
            token[1:3] = token[1][order], token[2][order]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 7)),
        st.tuples(st.just("crop"), st.integers(0, 5)),
        st.tuples(st.just("rows"), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 4), st.integers(0, 4), st.sampled_from([None, 2, 5]), STEPS)
def test_any_history_gives_what_a_list_of_tokens_gives(
    sinks: int, window: int, sliding: int | None, steps: list[tuple[str, int]]
) -> None:
    cache, model = empty((sliding,), sinks=sinks, window=window), Model(sinks, window, sliding, 2)
    cache.activate_past_recording()
    for seed, (what, number) in enumerate(steps):
        if what == "append":
            keys, values = latents(2, number, seed)
            got = cache.append(keys, values, 0, None)
            wanted = model.append(keys, values)
            for kind in (1, 2):
                assert torch.equal(got[kind - 1], torch.stack([token[kind] for token in wanted], 1))
            model.settle(recording=True)
        elif what == "crop":
            cache.crop(-number)
            model.crop(number)
        elif model.tokens:
            order = torch.tensor([number, 1 - number])
            cache.reorder_cache(order)
            model.rows(order)
        assert cache.get_seq_length() == model.seen
        assert cache.layers[0].held == len(model.tokens)
        assert cache.layers[0].coded == sum(token[3] for token in model.tokens)
        owners = [t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in stored(cache)]
        assert all(owners)


def test_a_coded_token_is_never_coded_again() -> None:
    cache = empty((None,), window=4)
    feed(cache, latents(1, 9))
    before = stored(cache)[1].clone()
    for seed in range(5):
        feed(cache, latents(1, 1, seed))
    assert torch.equal(stored(cache)[1][:, :5], before)
    cache.crop(-7)  # back into the codes: seven tokens stay, five coded before and two since
    assert cache.layers[0].coded == 7
    assert torch.equal(stored(cache)[1][:, :5], before)


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_bytes_by_hand() -> None:
    cache = empty(sinks=2, window=3)
    feed(cache, latents(2, 9))
    exact = 5 * (6 + 7) * 4
    positions = 2 * 9 * 4
    assert cache.nbytes == 2 * 2 * (4 * TOKEN + exact) + positions
    report = cache.report()
    assert (report.rows, report.tokens, report.bits) == (2, 9, 4)
    assert report.dense_nbytes == 2 * 9 * 2 * 2 * 2 * 8 * 2
    assert report.bytes_per_token == cache.nbytes / 18
    assert "at 4 bits" in str(report)
    assert f"{report.ratio:.2f}" in str(report)


@pytest.mark.parametrize(("bits", "bytes_"), [(2, 1 + 1 + 2), (3, 2 + 2 + 3), (4, 2 + 1 + 4), (8, 4 + 2 + 7)])
def test_bytes_of_every_width(bits: int, bytes_: int) -> None:
    cache = empty((None,), bits=bits)
    feed(cache, latents(3, 5))
    assert cache.nbytes == 3 * 5 * (bytes_ + 3 * 4 + 4)  # codes, three groups' steps and minima, a position


def test_an_empty_cache() -> None:
    cache = empty(sinks=1, window=1)
    assert (cache.nbytes, cache.get_seq_length(), cache.report().bytes_per_token) == (0, 0, 0.0)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([0]))
    for layer in cache.layers:
        layer.offload()
    with pytest.raises(CacheStateError, match="empty"):
        cache.layers[0].dense()


# --- rows, copies, devices --------------------------------------------------------------------------------------------


def test_rows_are_moved_together() -> None:
    cache = empty(sinks=1, window=2)
    feed(cache, latents(3, 7))
    before = [tensor.clone() for tensor in stored(cache)]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0, 1]))
    assert all(torch.equal(now, old[[2, 0, 0]]) for now, old in zip(stored(cache), before, strict=True))
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert all(torch.equal(now, old[[0]]) for now, old in zip(stored(cache), before, strict=True))


def test_reset_copy_and_offload() -> None:
    cache, fresh = empty(sinks=1, window=2), empty(sinks=1, window=2)
    feed(cache, latents(3, 7, 5))
    cache.reset()
    assert cache.nbytes == 0
    feed(cache, latents(2, 6))
    feed(fresh, latents(2, 6))
    twin = copy.deepcopy(cache)
    feed(twin, latents(2, 3))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert same(cache, fresh)
    assert (twin.get_seq_length(), cache.get_seq_length()) == (9, 6)


def test_exact_tokens_can_be_rounded_and_codes_stay() -> None:
    cache = empty((None,), sinks=1, window=2)
    pair = latents(1, 6)
    feed(cache, pair)
    codes = stored(cache)[1].clone()
    cache.layers[0].round_exact(torch.bfloat16)
    keys, _ = cache.layers[0].dense()
    assert torch.equal(keys[:, [0, 4, 5]], pair[0][:, [0, 4, 5]].bfloat16().float())
    assert torch.equal(stored(cache)[1], codes)
    assert cache.nbytes == 3 * 13 * 2 + 3 * TOKEN + 6 * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_latents_come_back_in_the_models_dtype(dtype: torch.dtype) -> None:
    keys, values = feed(empty(sinks=1, window=1), latents(1, 5, dtype=dtype))
    assert keys.dtype == values.dtype == dtype


def test_a_sliding_window_keeps_what_the_next_query_sees_coded() -> None:
    cache = empty((5,), sinks=2)
    feed(cache, latents(1, 3))
    assert cache.layers[0].coded == 1
    feed(cache, latents(1, 6, 1))
    assert (cache.layers[0].held, cache.layers[0].coded) == (4, 4)  # the sinks have left the window
    assert cache.nbytes == 4 * (TOKEN + 4)
    with pytest.raises(CacheStateError, match="activate_past_recording"):
        cache.crop(-2)


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_in_words() -> None:
    cache = empty()
    feed(cache, latents(2, 3))
    with pytest.raises(CacheStateError, match="of rank 6, the model makes rank 7"):
        cache.append(torch.zeros(2, 1, 7), torch.zeros(2, 1, 7), 0, None)
    with pytest.raises(CacheStateError, match="2 rows and the input has 3"):
        feed(cache, latents(3, 1))
    other = empty(bits=3).layout
    with pytest.raises(CacheStateError, match="other bits, ranks or exact tokens"):
        LatentCache.adopt(cache, other)
    assert LatentCache.adopt(cache, copy.deepcopy(cache.layout)) is cache
    with pytest.raises(CacheStateError, match="as many ranks"):
        layout_of(KVShape(1, 2, 8), [None], codes=cache.layout.codes)


def test_adoption_takes_codes_along() -> None:
    theirs: Any = DynamicCache()
    ours = LatentCache.adopt(theirs, empty(window=2).layout)
    assert ours is theirs
    assert all(isinstance(layer, CodedLatentLayer) for layer in ours.layers)
    feed(ours, latents(1, 5))
    assert ours.layers[0].coded == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [0, 1])
def test_latents_that_are_no_numbers(bad: float, kind: int) -> None:
    cache, pair = empty((None,)), latents(1, 4)
    pair[kind][0, 1, 2] = bad
    with pytest.raises(NonFiniteError, match=f"{('key', 'value')[kind]} latents of layer 0"):
        feed(cache, pair)
    assert cache.nbytes == 0
    feed(cache, (pair[0][:, :1], pair[1][:, :1]))
    returned = feed(cache, (pair[0][:, 1:2], pair[1][:, 1:2]))[kind]  # one token is not checked, and shows
    assert returned[0, 1].isnan().any()
    assert not returned[0, 0].isnan().any()


@pytest.mark.parametrize(
    ("fields", "words"),
    [((5, 0, 0), "2, 3, 4, 8 bits, not 5"), ((4, -1, 0), "sinks"), ((4, 0, 1.5), "window"), ((True, 0, 0), "not True")],
)
def test_bad_settings(fields: tuple[Any, Any, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LatentCodes(*fields, key_ranks=(KEY_RANKS,), value_ranks=(VALUE_RANKS,))


def test_layers_of_keys_and_values_must_agree() -> None:
    with pytest.raises(ConfigError, match="2 layers of keys, 1 of values"):
        LatentCodes(4, 0, 0, (KEY_RANKS,) * 2, (VALUE_RANKS,))
