"""The latent cache by itself: bytes, cropping, rows, windows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvslim.caching.latent import LatentCache, layout_of
from kvslim.caching.latent_layer import tokens_to_crop
from kvslim.caching.latent_positions import TokenPositions
from kvslim.errors import CacheStateError
from kvslim.types import KVShape

RANKS = (6, 10)


def empty(windows: tuple[int | None, ...] = (None, None)) -> LatentCache:
    return LatentCache(layout_of(KVShape(len(windows), 2, 8), windows))


def latents(batch: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, count, rank, generator=generator) for rank in RANKS)
    return key, value


def fill(cache: LatentCache, batch: int, count: int, seed: int = 0, start: int = 0) -> None:
    """Append to every layer, as one forward pass does."""
    positions = torch.arange(start, start + count).expand(batch, count) + torch.arange(batch)[:, None] * 100
    for layer in range(len(cache.layers)):
        cache.append(*latents(batch, count, seed + layer), layer, positions)


def state(cache: LatentCache) -> list[Tensor]:
    assert cache.positions.ids is not None
    return [cache.positions.ids, *(t for layer in cache.layers for t in (layer.keys, layer.values))]


def same(one: LatentCache, other: LatentCache) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


def bytes_of(batch: int, tokens: int, layers: int = 2) -> int:
    return batch * tokens * (layers * sum(RANKS) * 4 + 4)


def test_empty_cache() -> None:
    cache = empty()
    assert cache.nbytes == 0
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.report().ratio == 1.0
    assert cache.get_max_length() == -1
    assert not cache.is_compileable
    cache.crop(0)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([0]))
    assert cache.nbytes == 0


def test_append_returns_all_tokens_and_their_positions() -> None:
    cache = empty()
    fill(cache, 2, 5)
    keys, values, positions = cache.append(*latents(2, 1, 9), 0, torch.tensor([[5], [105]]))
    assert keys.shape == (2, 6, 6)
    assert values.shape == (2, 6, 10)
    assert positions.dtype == torch.int32
    assert positions.tolist() == [list(range(6)), list(range(100, 106))]
    assert cache.get_mask_sizes(3, 1) == (8, 0)


def test_positions_are_counted_when_none_are_given() -> None:
    cache = empty()
    cache.append(*latents(2, 3), 0, None)
    cache.append(*latents(2, 3), 1, None)
    *_, positions = cache.append(*latents(2, 2), 0, None)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_bytes_are_those_of_the_storages_with_positions_once() -> None:
    cache = empty()
    fill(cache, 2, 7)
    assert cache.nbytes == bytes_of(2, 7)
    report = cache.report()
    assert (report.rows, report.tokens) == (2, 7)
    assert report.dense_nbytes == 2 * 7 * 2 * 2 * 2 * 8 * 2


def test_views_do_not_hide_storage() -> None:
    cache = empty((None,))
    wide = torch.randn(1, 64, 16)
    cache.append(wide[:, :4, :6], wide[:, :4, 6:], 0, None)
    assert cache.nbytes == bytes_of(1, 4, layers=1)
    cache.layers[0].keys = wide[:, :4, :6]  # were a view kept, its whole storage would show
    assert cache.nbytes == 4 * (64 * 16 + 4 * 10 + 4)


def test_rows_share_no_expanded_positions() -> None:
    cache = empty((None,))
    cache.append(*latents(3, 4), 0, torch.arange(4)[None])
    assert cache.nbytes == bytes_of(3, 4, layers=1)
    cache.append(*latents(3, 1), 0, torch.tensor([[4]]))
    assert cache.nbytes == bytes_of(3, 5, layers=1)


@pytest.mark.parametrize(("request_", "kept"), [(-3, 4), (0, 7), (5, 5), (9, 7), (-7, 0), (-20, 0)])
def test_crop(request_: int, kept: int) -> None:
    cache, wanted = empty(), empty()
    fill(cache, 2, 7)
    before = state(cache)
    cache.crop(request_)
    assert cache.get_seq_length() == kept
    assert cache.nbytes == bytes_of(2, kept)
    assert all(torch.equal(now, old[:, :kept]) for now, old in zip(state(cache), before, strict=True))
    fill(cache, 2, 2, seed=50, start=kept)
    fill(wanted, 2, 2, seed=50, start=kept)
    assert torch.equal(state(cache)[0][:, kept:], state(wanted)[0])
    assert cache.get_seq_length() == kept + 2


def test_rows_are_moved_together() -> None:
    cache = empty()
    fill(cache, 3, 4)
    before = [tensor.clone() for tensor in state(cache)]
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    assert all(torch.equal(now, old[order]) for now, old in zip(state(cache), before, strict=True))
    cache.batch_repeat_interleave(2)
    assert all(
        torch.equal(now, old[order].repeat_interleave(2, 0)) for now, old in zip(state(cache), before, strict=True)
    )
    assert cache.nbytes == bytes_of(6, 4)
    cache.batch_select_indices(torch.tensor([0, 5]))
    assert all(torch.equal(now, old[[2, 0]]) for now, old in zip(state(cache), before, strict=True))
    cache.batch_select_indices(torch.tensor([False, True]))
    assert all(torch.equal(now, old[[0]]) for now, old in zip(state(cache), before, strict=True))
    assert cache.nbytes == bytes_of(1, 4)


def test_reset_and_reuse() -> None:
    cache, fresh = empty((None, 4)), empty((None, 4))
    fill(cache, 2, 9)
    cache.reset()
    assert cache.nbytes == 0
    assert cache.get_seq_length() == 0
    fill(cache, 3, 2)
    fill(fresh, 3, 2)
    assert same(cache, fresh)


def test_a_copy_is_independent() -> None:
    cache = empty()
    fill(cache, 1, 3)
    twin = copy.deepcopy(cache)
    fill(twin, 1, 2, start=3)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (3, 5)
    assert cache.nbytes == bytes_of(1, 3)


def test_offload_and_prefetch_keep_the_content() -> None:
    cache, other = empty(), empty()
    fill(cache, 1, 3)
    fill(other, 1, 3)
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert same(cache, other)


# --- sliding windows --------------------------------------------------------------------------------------------------


def test_a_window_keeps_what_the_next_query_sees() -> None:
    cache = empty((5, 5))
    fill(cache, 2, 9)
    assert cache.get_seq_length() == 9
    assert cache.nbytes == bytes_of(2, 4)
    assert cache.get_mask_sizes(2, 0) == (6, 5)
    keys, _, positions = cache.append(*latents(2, 2), 0, torch.tensor([[9, 10], [109, 110]]))
    assert keys.shape[1] == 6
    assert positions[0].tolist() == [5, 6, 7, 8, 9, 10]
    assert cache.get_max_length() == 5
    assert cache.is_sliding == [True, True]


def test_mixed_layers_keep_the_positions_of_the_longest() -> None:
    cache = empty((5, None))
    fill(cache, 1, 9)
    *_, positions = cache.append(*latents(1, 1), 0, torch.tensor([[9]]))
    assert positions[0].tolist() == [5, 6, 7, 8, 9]
    *_, positions = cache.append(*latents(1, 1), 1, torch.tensor([[9]]))
    assert positions[0].tolist() == list(range(10))


@pytest.mark.parametrize("count", [1, 3, 4, 5, 6, 12])
def test_masks_have_the_size_of_transformers_own(count: int) -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    theirs = DynamicSlidingWindowLayer(sliding_window=5)
    theirs.update(torch.zeros(1, 1, count, 2), torch.zeros(1, 1, count, 2))
    cache = empty((5,))
    fill(cache, 1, count)
    for query in (1, 2, 7):
        assert cache.get_mask_sizes(query, 0) == theirs.get_mask_sizes(query)
        kept = copy.deepcopy(cache)
        keys, _, _ = kept.append(*latents(1, query), 0, None)
        assert keys.shape[1] == theirs.get_mask_sizes(query)[0]


def test_cropping_a_left_window_needs_recording_and_changes_nothing_without() -> None:
    cache, untouched = empty((None, 5)), empty((None, 5))
    fill(cache, 1, 9)
    fill(untouched, 1, 9)
    with pytest.raises(CacheStateError, match="activate_past_recording"):
        cache.crop(-2)
    assert same(cache, untouched)
    cache.crop(0)
    assert same(cache, untouched)


def test_recorded_windows_can_be_cropped() -> None:
    cache, shorter = empty((5, 5)), empty((5, 5))
    cache.activate_past_recording()
    fill(cache, 1, 9)
    fill(shorter, 1, 9)
    before = state(cache)
    assert before[0].shape[1] == 9
    cache.crop(-2)
    assert cache.get_seq_length() == 7
    assert state(cache)[0].tolist() == [[3, 4, 5, 6]]
    assert all(torch.equal(now, old[:, 3:7]) for now, old in zip(state(cache), before, strict=True))
    assert cache.nbytes == bytes_of(1, 4)


# --- wrong use --------------------------------------------------------------------------------------------------------


def test_wrong_use_is_refused_in_words() -> None:
    cache = empty()
    fill(cache, 2, 3)
    with pytest.raises(CacheStateError, match="2 rows and the input has 3"):
        fill(cache, 3, 1, start=3)
    with pytest.raises(CacheStateError, match="rank 6, the model makes rank 7"):
        cache.append(torch.zeros(2, 1, 7), torch.zeros(2, 1, 10), 0, None)
    with pytest.raises(CacheStateError, match="DynamicCache with other models"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)
    with pytest.raises(CacheStateError, match="as many windows"):
        layout_of(KVShape(2, 2, 8), [None])


def test_layers_that_disagree_are_noticed() -> None:
    positions = TokenPositions()
    positions.append(0, torch.arange(4)[None])
    positions.append(0, torch.arange(4)[None])
    with pytest.raises(CacheStateError, match="different tokens"):
        positions.append(2, torch.arange(4)[None])


def test_adoption() -> None:
    layout = layout_of(KVShape(2, 2, 8), [None, 4])
    theirs = DynamicCache()
    ours = LatentCache.adopt(theirs, layout)
    assert ours is theirs
    assert LatentCache.adopt(ours, layout) is ours
    assert ours.is_sliding == [False, True]
    fill(ours, 1, 3)
    filled = DynamicCache()
    filled.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), 0)
    with pytest.raises(CacheStateError, match="a filled DynamicCache"):
        LatentCache.adopt(filled, layout)
    with pytest.raises(CacheStateError, match="a tuple"):
        LatentCache.adopt((), layout)


def test_tokens_to_crop() -> None:
    assert [tokens_to_crop(n, 5) for n in (-2, 0, 2, 9, -9)] == [2, 0, 3, 0, 5]
