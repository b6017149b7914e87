"""Later tokens sealed under the same ratio, layer groups compressed as they arrive, places moved."""

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvslim.caching.prefix import CodedStretch
from kvslim.caching.report import header_bytes, stretch_header_bytes
from kvslim.caching.tucker_residual import TuckerResidual
from kvslim.errors import BudgetError, CacheStateError, ConfigError, NonFiniteError
from kvslim.jolt import JoltCache, Price

MakeTiny = Callable[..., PreTrainedModel]


class Source:
    """Keys and values with a falling spectrum on a basis that stays, or that is exchanged by ``turn``."""

    def __init__(self, cache: JoltCache, rank: int = 6, noise: float = 0.3, seed: int = 0) -> None:
        self.rng, self.cache, self.noise = torch.Generator().manual_seed(seed), cache, noise
        self.rank = rank
        for layer in cache.compressible:
            layer.reader = None  # nobody attends here: nothing needs to be rebuilt
        self.turn()
        self.seen: list[list[list[torch.Tensor]]] = [[[], []] for _ in cache.layers]

    def turn(self) -> None:
        heads, dim = self.cache.shape.kv_heads, self.cache.shape.head_dim
        self.mixes = [
            [torch.randn(heads, self.rank, dim, generator=self.rng) for _ in range(2)] for _ in self.cache.layers
        ]

    def feed(self, tokens: int, rows: int = 1) -> None:
        heads, dim = self.cache.shape.kv_heads, self.cache.shape.head_dim
        for index, mixes in enumerate(self.mixes):
            pair = []
            for kind, mix in enumerate(mixes):
                # one set of coefficients for all heads, as the token mode of the Tucker form wants it
                token = torch.randn(rows, 1, tokens, self.rank, generator=self.rng)
                x = token @ mix + self.noise * torch.randn(rows, heads, tokens, dim, generator=self.rng)
                self.seen[index][kind].append(x)
                pair.append(x)
            self.cache.update(*pair, index)

    def errors(self, start: int = 0, stop: int | None = None) -> tuple[float, float]:
        """Relative error of keys and values between columns ``start`` and ``stop``, all layers together."""
        lost, energy = [0.0, 0.0], [0.0, 0.0]
        for layer, seen in zip(self.cache.compressible, self.seen, strict=True):
            for kind, dense in enumerate(layer.dense()):
                exact = torch.cat(seen[kind], dim=2)[:, :, start:stop]
                lost[kind] += float((dense[:, :, start:stop] - exact).square().sum())
                energy[kind] += float(exact.square().sum())
        return tuple((a / b) ** 0.5 for a, b in zip(lost, energy, strict=True))  # type: ignore[return-value]


def jolt(make_tiny: MakeTiny, **settings: object) -> JoltCache:
    return JoltCache(make_tiny(head_dim=32), **{"ratio": 4, "pre_rope": False, **settings})  # type: ignore[arg-type]


def stretches(cache: JoltCache, row: int = 0) -> list[CodedStretch]:
    assert cache.prefix is not None
    return [s for s in cache.prefix.rows[row].stretches if isinstance(s, CodedStretch)]


# ---- sealing ---------------------------------------------------------------------------------------------------------


def test_the_tail_is_sealed_in_blocks_under_the_same_ratio(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny, seal=64)
    source = Source(cache)
    source.feed(600)
    cache.compress()
    for _ in range(200):
        source.feed(1)
    assert cache.prefix is not None
    assert cache.prefix.columns == 600 + 128  # 200 - 32 recent ones, in whole blocks
    assert cache.tail_tokens == 72
    assert [s.tokens for s in stretches(cache)] == [596, 64, 64]
    cells = 2 * cache.shape.layers
    for stretch in stretches(cache)[1:]:
        kept = sum(cell.nbytes for cell in cache.cells if cell.start == stretch.place)
        assert kept + stretch_header_bytes(cells) <= cache.shape.dense_bytes(64) / 4 + 1e-9
    total = cache.prefix_nbytes + header_bytes(cells) + 2 * stretch_header_bytes(cells)
    assert total <= cache.shape.dense_bytes(728) / 4 + 1
    assert cache.report().ratio >= 4


def test_sealed_tokens_are_as_good_as_the_prefill_while_the_basis_holds(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny, seal=128)
    source = Source(cache)
    source.feed(1200)
    cache.compress()
    for _ in range(30):
        source.feed(100)
    old, new = source.errors(0, 1200), source.errors(1200, cache.prefix.columns)  # type: ignore[union-attr]
    assert new[0] < 1.35 * old[0]
    assert new[1] < 1.35 * old[1]
    inherited = [placed.block for s in stretches(cache)[1:] for placed in (*s.keys, *s.values)]
    assert any(isinstance(block, TuckerResidual) and block.inherited for block in inherited)


def test_error_stays_bounded_over_sixteen_thousand_appended_tokens(make_tiny: MakeTiny) -> None:
    """The first sealed block and the last one lose the same, and old tokens are never touched again."""
    cache = jolt(make_tiny, seal=256, ratio=3)
    source = Source(cache)
    source.feed(512)
    cache.compress()
    first = [x.clone() for x in cache.compressible[0].dense()]
    for _ in range(63):
        source.feed(256)
    assert cache.get_seq_length() == 512 + 63 * 256
    parts = [max(source.errors(start, start + 1024)) for start in range(512, 512 + 15 * 1024, 3 * 1024)]
    assert max(parts) < 1.1 * min(parts)
    for now, then in zip(cache.compressible[0].dense(), first, strict=True):
        assert torch.equal(now[:, :, :512], then)
    assert cache.report().ratio >= 3


def test_a_drifted_basis_is_replaced(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny, seal=1024, ratio=4)
    source = Source(cache, noise=0.05)
    source.feed(1024)
    cache.compress()
    source.turn()  # another subject
    source.feed(1100)
    source.feed(1)
    fresh = [placed.block for placed in (*stretches(cache)[1].keys, *stretches(cache)[1].values)]
    assert all(isinstance(b, TuckerResidual) and b.factors is not None and not b.inherited for b in fresh)
    source.feed(1100)
    source.feed(1)
    later = [placed.block for placed in (*stretches(cache)[2].keys, *stretches(cache)[2].values)]
    assert any(isinstance(b, TuckerResidual) and b.inherited for b in later)  # on the new one
    assert max(source.errors(1024, 2100)) < 1.5 * max(source.errors(0, 1024))


def test_without_seal_later_tokens_stay_exact(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny, seal=None)
    source = Source(cache)
    source.feed(300)
    cache.compress()
    for _ in range(5):
        source.feed(200)
    assert cache.tail_tokens == 1000
    cache.compress()  # by hand
    assert cache.tail_tokens == 0
    assert cache.report().ratio >= 4


def test_a_block_too_small_for_its_ratio_stays_exact(make_tiny: MakeTiny) -> None:
    cache = JoltCache(make_tiny(), ratio=8, seal=1)
    source = Source(cache)
    source.feed(1500)
    cache.compress()
    for _ in range(40):
        source.feed(1)
    assert cache.tail_tokens > 32
    assert "later tokens stay exact" in cache.report().note
    with pytest.raises(BudgetError, match="Seal more tokens together"):
        cache.seal(1)
    with pytest.raises(CacheStateError, match="cannot be sealed"):
        cache.seal(1000)


def test_crop_reorder_and_copy_reach_into_sealed_blocks(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny, seal=64, window=8)
    source = Source(cache)
    source.feed(400, rows=2)
    cache.compress()
    for _ in range(3):
        source.feed(70, rows=2)
    before = [[x.clone() for x in layer.dense()] for layer in cache.compressible]
    twin = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    for keep in (603, 500, 465, 464, 401, 399, 300, 2):
        cache.crop(keep - cache.get_seq_length())
        assert cache.get_seq_length() == keep
        for layer, dense in zip(cache.compressible, before, strict=True):
            for mine, exact in zip(layer.dense(), dense, strict=True):
                assert torch.allclose(mine, exact[[1, 0], :, :keep], atol=1e-5)
    for layer, dense in zip(twin.compressible, before, strict=True):
        assert torch.equal(layer.dense()[0], dense[0])


def test_diverged_beams_are_sealed_apart_and_equal_ones_together(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    ids = torch.randint(2, 128, (1, 300))
    cache = JoltCache(model, ratio=3, seal=None)
    with torch.no_grad():
        model(ids.repeat(3, 1), past_key_values=cache)
        cache.compress()
        later = torch.randint(2, 128, (3, 80))
        later[1] = later[0]
        model(later, past_key_values=cache)
    cache.seal()
    assert cache.prefix is not None
    rows = cache.prefix.rows
    assert rows[0] is rows[1]
    assert rows[0] is not rows[2]
    assert rows[0].stretches[1] is rows[2].stretches[1]  # the prefill is still shared


def test_left_padded_rows_are_sealed_at_their_own_places(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    ids, mask = torch.randint(2, 128, (2, 300)), torch.ones(2, 300, dtype=torch.long)
    mask[1, :60] = 0
    options = {"max_new_tokens": 90, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    cache = JoltCache(model, budget_bytes=10**9, seal=16, attention_mask=mask)
    got = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, model.generate(ids, **options))
    assert [s.place for s in stretches(cache, 1)][:2] == [4, 240]
    assert [s.column for s in stretches(cache, 1)][:2] == [64, 300]


def test_fifty_turns_keep_ratio_and_error(make_tiny: MakeTiny) -> None:
    """A dialogue of fifty turns in one cache: logits stay near those of an exact cache."""
    model = make_tiny()
    cache, exact = JoltCache(model, ratio=2, seal=64), DynamicCache(config=model.config)
    rng, gaps = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for turn in range(50):
            ids = torch.randint(2, 128, (1, 300 if turn == 0 else 30), generator=rng)
            one = model(ids, past_key_values=cache).logits
            two = model(ids, past_key_values=exact).logits
            gaps.append(float((one[:, -1] - two[:, -1]).norm() / two[:, -1].norm()))
            if turn == 0:
                cache.compress()
    assert cache.get_seq_length() == 300 + 49 * 30
    assert cache.tail_tokens < 64 + 32 + 30
    assert cache.report().ratio >= 2
    assert sum(gaps[25:]) / 25 < 1.5 * sum(gaps[1:25]) / 24 + 1e-3
    assert max(gaps) < 0.1


def test_not_finite_later_tokens_are_named(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny, seal=None)
    source = Source(cache)
    source.feed(300)
    cache.compress()
    source.feed(50)
    cache.compressible[1].values[0, 0, 3, 3] = float("nan")
    before = cache.prefix
    with pytest.raises(NonFiniteError, match="values of layer 1"):
        cache.seal()
    assert cache.prefix is before
    assert cache.tail_tokens == 50


# ---- arriving layers -------------------------------------------------------------------------------------------------


def test_layers_are_compressed_as_they_arrive_at_an_earlier_price(make_tiny: MakeTiny) -> None:
    first = JoltCache(make_tiny(head_dim=32, layers=8), ratio=4)
    Source(first, seed=1).feed(1200)
    first.compress()
    assert first.price is not None
    cache = JoltCache(make_tiny(head_dim=32, layers=8), ratio=4, price=first.price)
    source = Source(cache, seed=2)
    peaks = []
    update = cache.update

    def watched(*args: object) -> object:
        out = update(*args)
        peaks.append(cache.tail_nbytes)
        return out

    cache.update = watched  # type: ignore[assignment]
    source.feed(1200)
    assert max(peaks) == 0  # after its update no layer is dense
    assert cache.prefix is not None
    assert cache.report().ratio >= 4
    assert cache.prefix_nbytes >= 0.98 * cache.shape.dense_bytes(1200) / 4
    exact = JoltCache(make_tiny(head_dim=32, layers=8), ratio=4)
    other = Source(exact, seed=2)
    other.feed(1200)
    exact.compress()
    mine, theirs = source.errors(), other.errors()
    assert sum(x * x for x in mine) < 1.1 * sum(x * x for x in theirs)


@pytest.mark.parametrize("group", [1, 3])
def test_generate_with_arriving_layers(make_tiny: MakeTiny, group: int) -> None:
    model, ids = make_tiny(layers=4), torch.randint(2, 128, (2, 200))
    settings = {"budget_bytes": 10**9, "layer_group": group}
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    first = JoltCache(model, **settings)
    want = model.generate(ids, past_key_values=first, **options)
    cache = JoltCache(model, price=first.price, **settings)
    got = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, want)
    assert cache.report().prefix_tokens == 400
    beams = JoltCache(model, price=first.price, **settings)
    assert torch.equal(
        model.generate(ids, past_key_values=beams, num_beams=3, **options), model.generate(ids, num_beams=3, **options)
    )
    assert beams.prefix is not None
    assert len({id(row) for row in beams.prefix.rows}) == 2  # beams arrive as equal rows


def test_a_failure_while_layers_arrive_leaves_an_empty_cache(make_tiny: MakeTiny) -> None:
    price = Price(1e-3, (0.25, 0.25, 0.25, 0.25))
    cache = JoltCache(make_tiny(layers=4), ratio=4, price=price)
    x = torch.randn(1, 2, 400, 16)
    cache.update(x, x, 0)
    bad = x.clone()
    bad[0, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteError, match="keys of layer 1"):
        cache.update(bad, x, 1)
    assert cache.get_seq_length() == 0
    cache.update(x, x, 0)
    with pytest.raises(CacheStateError, match="prefill again"):
        cache.update(x, x, 0)  # the forward died between two layers
    for index in range(4):
        cache.update(x, x, index)
    assert cache.prefix is not None
    with pytest.raises(BudgetError, match="least"):
        JoltCache(make_tiny(layers=4), budget_bytes=3000, price=price).update(x, x, 0)
    with pytest.raises(ConfigError, match="layer groups"):
        JoltCache(make_tiny(layers=2), ratio=4, price=price)
    with pytest.raises(ConfigError, match="shares"):
        Price(1e-3, (0.0, 1.0))


# ---- lossless, weights, places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sixteen_bits_give_what_a_dynamic_cache_gives_bit_for_bit(make_tiny: MakeTiny, dtype: torch.dtype) -> None:
    model, ids = make_tiny().to(dtype), torch.randint(2, 128, (1, 150))
    cache, exact = JoltCache(model, budget_bytes=10**9, bits=(16,), seal=16), DynamicCache(config=model.config)
    with torch.no_grad():
        for chunk in (ids[:, :100], ids[:, 100:101], ids[:, 101:]):
            assert torch.equal(model(chunk, past_key_values=cache).logits, model(chunk, past_key_values=exact).logits)
        cache.seal()
    for mine, theirs in zip(cache.compressible, exact.layers, strict=True):
        assert torch.equal(mine.dense()[0], theirs.keys)
        assert torch.equal(mine.dense()[1], theirs.values)


def test_weights_move_bytes_to_what_matters(make_tiny: MakeTiny) -> None:
    errors = []
    for weights in (None, (100.0, 1.0, 1.0, 1.0)):
        cache = jolt(make_tiny, weights=weights)
        Source(cache).feed(600)
        cache.compress()
        errors.append([cell.error for cell in cache.cells])
    assert errors[1][0] < 0.7 * errors[0][0]
    assert sum(errors[1][1:]) > sum(errors[0][1:])


@pytest.mark.parametrize(
    "settings",
    [{"allocation": "uniform"}, {"allocation": "greedy"}, {"split": 0.5}, {"bits": (0,)}, {"backbone": False},
     {"slab_share": 0.5}],
)  # fmt: skip
def test_every_comparison_keeps_its_budget_and_the_joint_allocation_is_best(
    make_tiny: MakeTiny, settings: dict[str, object]
) -> None:
    errors = []
    for options in ({}, settings):
        cache = jolt(make_tiny, ratio=3, **options)
        Source(cache).feed(800)
        cache.compress()
        assert cache.report().ratio >= 3
        errors.append(sum(cell.error**2 for cell in cache.cells))
    assert errors[0] <= 1.02 * errors[1]


def test_half_the_slabs_leave_more_error_and_smaller_cores(make_tiny: MakeTiny) -> None:
    cache = JoltCache(make_tiny(head_dim=32, kv_heads=4, heads=4), ratio=4, bits=(0,), slab_share=0.5, pre_rope=False)
    Source(cache).feed(600)
    cache.compress()
    block = stretches(cache)[0].values[0].block
    assert isinstance(block, TuckerResidual)
    assert block.factors is not None
    assert block.factors.core.shape[0] == 2
    assert block.factors.slab is not None


def test_offload_to_the_cpu_and_back_changes_nothing(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny)
    source = Source(cache)
    source.feed(300)
    with pytest.raises(CacheStateError, match="no compressed prefix"):
        cache.offload_prefix()
    cache.compress()
    before = [x.clone() for x in cache.compressible[0].dense()]
    assert cache.offload_prefix() is cache
    assert all(torch.equal(a, b) for a, b in zip(cache.compressible[0].dense(), before, strict=True))
    assert cache.to("cpu") is cache
    assert all(torch.equal(a, b) for a, b in zip(cache.compressible[0].dense(), before, strict=True))
    meta = copy.deepcopy(cache).to("meta")
    assert {t.device.type for t in meta.prefix.tensors()} == {"meta"}  # type: ignore[union-attr]


def test_layers_are_freed_one_group_after_the_other(make_tiny: MakeTiny) -> None:
    """While a group is coded, the dense tensors of the groups before it are gone already."""
    cache = jolt(make_tiny, layer_group=1)
    Source(cache).feed(300)
    dense = [weakref.ref(layer.keys) for layer in cache.compressible]
    encode, alive = cache._encode_cell, []

    def watched(cell: object, *args: object) -> object:
        alive.append(sum(ref() is not None for ref in dense))
        return encode(cell, *args)  # type: ignore[arg-type]

    cache._encode_cell = watched  # type: ignore[assignment,method-assign]
    cache.compress()
    assert alive == [2, 2, 1, 1]  # two layers, keys and values


def test_a_failure_while_coding_empties_the_cache(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny)
    Source(cache).feed(300)

    def full(*_: object) -> object:
        raise MemoryError

    cache._encode_cell = full  # type: ignore[assignment,method-assign]
    with pytest.raises(MemoryError):
        cache.compress()
    assert cache.get_seq_length() == 0
    assert cache.prefix is None


def test_layers_on_several_devices_are_refused(make_tiny: MakeTiny) -> None:
    cache = jolt(make_tiny)
    Source(cache).feed(300)
    cache.compressible[1].keys = cache.compressible[1].keys.to("meta")
    with pytest.raises(CacheStateError, match="several devices"):
        cache.compress()
