"""The compressed cache as transformers uses it: states, rows, padding, crops, beams, bytes."""

import copy
import gc
import weakref
from collections.abc import Callable
from types import FunctionType, ModuleType

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from kvslim.baselines import IntegerCache, RotatedCache
from kvslim.caching.compressed import CompressedCache
from kvslim.errors import CacheStateError, ConfigError, NonFiniteError, UnsupportedModelError
from kvslim.jolt import JoltCache

MakeTiny = Callable[..., PreTrainedModel]
NEAR_LOSSLESS = 10**9  # bytes: full rank and 8-bit residual everywhere

MAKERS: dict[str, Callable[..., CompressedCache]] = {
    "jolt": lambda model, **kw: JoltCache(model, budget_bytes=NEAR_LOSSLESS, window=3, **kw),
    "jolt-post": lambda model, **kw: JoltCache(model, budget_bytes=NEAR_LOSSLESS, window=0, pre_rope=False, **kw),
    "int8": lambda model, **kw: IntegerCache(model, 8, sinks=2, window=3, **kw),
    "rot8": lambda model, **kw: RotatedCache(model, 8, **kw),
}


def prompt(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompt(len(lengths), max(lengths)), torch.ones(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        pad = slice(0, max(lengths) - length) if side == "left" else slice(length, None)
        ids[row, pad], mask[row, pad] = 0, 0
    return ids, mask


def greedy(model: PreTrainedModel, ids: torch.Tensor, cache: object = None, **kw: object) -> torch.Tensor:
    out = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0, **kw)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
def test_greedy_equals_dynamic_cache(make_tiny: MakeTiny, name: str, length: int) -> None:
    model, ids = make_tiny(), prompt(1, length)
    cache = MAKERS[name](model)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids, DynamicCache(config=model.config)))
    assert cache.get_seq_length() == length + 11


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("with_mask", [True, False])
def test_left_padded_batch(make_tiny: MakeTiny, name: str, with_mask: bool) -> None:
    model = make_tiny()
    ids, mask = padded([20, 5, 13, 1])
    cache = MAKERS[name](model, attention_mask=mask if with_mask else None)
    got = greedy(model, ids, cache, attention_mask=mask)
    assert torch.equal(got, greedy(model, ids, attention_mask=mask))


@pytest.mark.parametrize("name", MAKERS)
def test_beams_and_return_sequences(make_tiny: MakeTiny, name: str) -> None:
    model = make_tiny()
    ids, mask = padded([20, 9])
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    cache = MAKERS[name](model, attention_mask=mask)
    assert torch.equal(greedy(model, ids, cache, **options), greedy(model, ids, **options))


def test_beams_move_references_not_storage(make_tiny: MakeTiny) -> None:
    model, ids = make_tiny(), prompt(2, 400)
    cache = fill(model, ids, JoltCache(model, ratio=3, window=0))
    cache.compress()
    before = cache.prefix_nbytes
    cache.batch_repeat_interleave(4)
    assert cache.prefix_nbytes == before
    cache.reorder_cache(torch.tensor([7, 0, 3, 4, 5, 6, 1, 2]))
    assert cache.get_seq_length() == 400
    keys, _ = cache.compressible[0].dense()
    assert torch.equal(keys[0], keys[3])
    assert not torch.equal(keys[0], keys[1])


def test_chunked_prefill_compresses_the_whole_prompt(make_tiny: MakeTiny) -> None:
    model, ids = make_tiny(), prompt(1, 400)
    cache = JoltCache(model, ratio=3, window=0)
    with torch.no_grad():
        for chunk in ids.split(67, dim=1):
            model(chunk, past_key_values=cache)
        assert cache.prefix is None
        model(prompt(1, 1), past_key_values=cache)
    assert cache.prefix is not None
    assert cache.prefix.columns == 400
    assert cache.report().tail_tokens == 1
    assert cache.report().ratio >= 3


def fill(model: PreTrainedModel, ids: torch.Tensor, cache: CompressedCache, **kw: object) -> CompressedCache:
    with torch.no_grad():
        model(ids, past_key_values=cache, **kw)
    return cache


def reachable_tensors(root: object) -> list[torch.Tensor]:
    """Every tensor that the garbage collector reaches from ``root``, classes, modules and functions aside."""
    seen, todo, found = set(), [root], []
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        else:
            todo.extend(gc.get_referents(item))
    return found


def test_dense_prefill_is_freed(make_tiny: MakeTiny) -> None:
    """Nothing of the dense size may stay alive behind the compressed prefix."""
    model = make_tiny()
    cache = fill(model, prompt(1, 400), JoltCache(model, ratio=4, window=0))
    dense = [weakref.ref(tensor) for layer in cache.compressible for tensor in (layer.keys, layer.values)]
    cache.compress()
    gc.collect()
    assert not any(ref() is not None for ref in dense)
    # what the collector can reach from the cache, counted without the cache's own walk over its fields
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable_tensors(cache)}
    assert sum(kept.values()) <= cache.shape.dense_bytes(400) / 4
    assert sum(kept.values()) == pytest.approx(cache.nbytes, abs=64)  # the rotary frequencies belong to the model


def test_rows_do_not_depend_on_their_neighbours(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    ids, mask = padded([220, 201])
    together = fill(
        model, ids, JoltCache(model, ratio=3, window=2, attention_mask=mask),
        attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
    )  # fmt: skip
    together.compress()
    alone = fill(model, ids[1:, 19:], JoltCache(model, ratio=3, window=2))
    alone.compress()
    for one, two in zip(together.compressible, alone.compressible, strict=True):
        for mine, theirs in zip(one.dense(), two.dense(), strict=True):
            assert torch.allclose(mine[1, :, 19:], theirs[0], atol=1e-3)
            assert torch.equal(mine[1, :, :19], torch.zeros_like(mine[1, :, :19]))
    assert together.report().prefix_tokens == 421


def test_right_padding_is_kept_apart_too(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    ids, mask = padded([30, 18], side="right")
    cache = fill(model, ids, MAKERS["jolt"](model, attention_mask=mask), attention_mask=mask)
    exact = [layer.keys.clone() for layer in cache.compressible]
    cache.compress()
    for layer, keys in zip(cache.compressible, exact, strict=True):
        rebuilt, _ = layer.dense()
        assert torch.allclose(rebuilt[0], keys[0], atol=1e-2)
        assert torch.allclose(rebuilt[1, :, :18], keys[1, :, :18], atol=1e-2)


@pytest.mark.parametrize("keep", [52, 50, 49, 45, 20, 3, 1, 0])
def test_crop_through_tail_window_middle_and_sinks(make_tiny: MakeTiny, keep: int) -> None:
    model, ids = make_tiny(), prompt(1, 50)
    cache = fill(model, ids, JoltCache(model, budget_bytes=NEAR_LOSSLESS, sinks=2, window=4))
    cache.compress()
    fill(model, prompt(1, 2, seed=1), cache)
    before = [layer.dense()[0] for layer in cache.compressible]
    size = cache.nbytes
    cache.crop(keep - 52)
    assert cache.get_seq_length() == keep
    assert cache.nbytes <= size
    for layer, keys in zip(cache.compressible, before, strict=True):
        assert torch.allclose(layer.dense()[0], keys[:, :, :keep], atol=1e-5)
    more = prompt(1, 5, seed=2)
    full = torch.cat((torch.cat((ids, prompt(1, 2, seed=1)), 1)[:, :keep], more), 1)
    with torch.no_grad():
        assert torch.allclose(model(more, past_key_values=cache).logits, model(full).logits[:, -5:], atol=2e-2)


def test_prefix_continuation_by_deepcopy(make_tiny: MakeTiny) -> None:
    model, ids = make_tiny(), prompt(1, 300)
    cache = fill(model, ids, JoltCache(model, ratio=2, window=0))
    cache.compress()
    twin = copy.deepcopy(cache)
    more = prompt(1, 4, seed=5)
    with torch.no_grad():
        one = model(more, past_key_values=cache).logits
        two = model(more, past_key_values=twin).logits
    assert torch.equal(one, two)
    assert twin.nbytes == cache.nbytes


def test_equal_rows_are_encoded_once(make_tiny: MakeTiny) -> None:
    """Beams of one prompt: four equal rows take the bytes of one, and the report does not count them four times."""
    model = make_tiny()
    ids = prompt(1, 300)
    cache = fill(model, ids.repeat(4, 1), JoltCache(model, ratio=3))
    cache.compress()
    assert cache.prefix is not None
    assert len({id(row) for row in cache.prefix.rows}) == 1
    assert cache.report().prefix_tokens == 300
    assert 3 <= cache.report().ratio < 3.5


def test_assisted_decoding_and_prompt_lookup_compress_too(make_tiny: MakeTiny) -> None:
    model, draft, ids = make_tiny(), make_tiny(layers=1, seed=3), prompt(1, 60)
    for options in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 4}):
        cache = MAKERS["jolt"](model)
        assert torch.equal(greedy(model, ids, cache, **options), greedy(model, ids))
        assert cache.prefix is not None


def test_a_long_second_turn_after_a_short_first_is_compressed(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    cache = JoltCache(model, ratio=3, window=4)
    fill(model, prompt(1, 5), cache)
    fill(model, prompt(1, 1), cache)
    assert "row 0 stays exact" in cache.report().note
    fill(model, prompt(1, 400, seed=1), cache)
    fill(model, prompt(1, 1), cache)
    assert cache.report().prefix_tokens == 406
    assert cache.report().note == ""


def test_total_ratio_counts_everything(make_tiny: MakeTiny) -> None:
    model = make_tiny().to(torch.bfloat16)
    cache = fill(model, prompt(1, 300), JoltCache(model, ratio=3))
    assert cache.report().total_ratio == pytest.approx(1.0)
    cache.compress()
    fill(model, prompt(1, 300, seed=1), cache)
    report = cache.report()
    assert report.total_ratio == pytest.approx(2 * cache.shape.dense_bytes(300) / cache.nbytes)
    assert 1.4 < report.total_ratio < 1.6 < report.ratio


def test_the_mask_follows_the_rows_and_ends_with_them(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    ids, mask = padded([300, 200])
    cache = fill(model, ids, JoltCache(model, ratio=2, attention_mask=mask), attention_mask=mask)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.compress()
    assert cache.prefix is not None
    assert [row.length for row in cache.prefix.rows] == [200, 200, 300, 300]
    cache.reset()
    fill(model, prompt(1, 350), cache)
    cache.compress()
    assert [row.length for row in cache.prefix.rows] == [350]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_measured_errors_survive_any_magnitude(make_tiny: MakeTiny, scale: float) -> None:
    model = make_tiny()
    cache = fill(model, prompt(1, 200), JoltCache(model, ratio=4))
    for layer in cache.compressible:
        layer.values = layer.values * scale
    cache.compress()
    assert 0.01 < cache.report().value_error < 0.9


def test_reset_makes_it_new(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    cache = JoltCache(model, ratio=2, window=0)
    first = greedy(model, prompt(1, 300), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(greedy(model, prompt(1, 300), cache), first)


def test_sliding_layers_stay_exact(make_tiny: MakeTiny) -> None:
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        JoltCache(make_tiny("mistral", sliding_window=8), ratio=2)
    config = Qwen2Config(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=1, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    ids = prompt(1, 30)
    cache = fill(model, ids, MAKERS["jolt"](model))
    cache.compress()
    sliding = next(layer for layer in cache.layers if layer.is_sliding)
    assert sliding.keys.untyped_storage().nbytes() <= 8 * 2 * 16 * 4  # no view of the whole prefill
    with pytest.raises(CacheStateError, match="activate_past_recording"):
        cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {30}
    cache = MAKERS["jolt"](model)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))
    assert len(cache.compressible) == 1
    cache.reset()
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_non_finite_names_the_layer_and_changes_nothing(make_tiny: MakeTiny, bad: float, where: str) -> None:
    model = make_tiny()
    cache = fill(model, prompt(1, 300), JoltCache(model, ratio=2, window=0))
    getattr(cache.compressible[1], where)[0, 1, 7, 3] = bad
    with pytest.raises(NonFiniteError, match=f"{where} of layer 1"):
        cache.compress()
    for _ in range(2):  # and the next step does not slip through
        with pytest.raises(NonFiniteError), torch.no_grad():
            model(prompt(1, 1), past_key_values=cache)
    assert cache.prefix is None
    assert cache.compressible[0].keys.shape[2] == 300


def test_short_prompt_stays_exact_and_says_so(make_tiny: MakeTiny) -> None:
    model, ids = make_tiny(), prompt(1, 20)
    cache = JoltCache(model, ratio=2, sinks=4, window=16)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))
    assert cache.prefix is None
    assert "stays exact" in str(cache.report())


def test_short_row_beside_a_long_one(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    ids, mask = padded([60, 3])
    cache = JoltCache(model, budget_bytes=NEAR_LOSSLESS, sinks=4, window=8, attention_mask=mask)
    assert torch.equal(greedy(model, ids, cache, attention_mask=mask), greedy(model, ids, attention_mask=mask))
    assert cache.prefix is not None
    assert [row.coded for row in cache.prefix.rows] == [48, 0]


def test_state_errors(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    with pytest.raises(CacheStateError, match="empty cache"):
        JoltCache(model, ratio=2).compress()
    with pytest.raises(ConfigError, match="token counts"):
        IntegerCache(model, 4, sinks=-1)
    with pytest.raises(ConfigError, match="1 to 8"):
        IntegerCache(model, 9)
    cache = fill(model, prompt(2, 30), JoltCache(model, ratio=2, attention_mask=torch.ones(3, 30)))
    with pytest.raises(CacheStateError, match="does not fit"):
        cache.compress()
    cache = fill(model, prompt(2, 30), JoltCache(model, ratio=2, attention_mask=torch.zeros(2, 30)))
    with pytest.raises(CacheStateError, match="no real token"):
        cache.compress()
