"""JoLT as a whole: budgets hold on every shape, more bytes mean less error, bad settings are refused in words."""

import json
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from kvslim.allocating.lagrangian import allocate
from kvslim.attending.families import rope_of
from kvslim.caching.report import header_bytes
from kvslim.caching.tucker_choices import CellShape, feature_rank_grid, own_choices, token_rank_grid
from kvslim.decomposing.tucker import hosvd
from kvslim.errors import BudgetError, ConfigError, UnsupportedModelError
from kvslim.jolt import PAPER_BITS, JoltCache, JoltConfig

MakeTiny = Callable[..., PreTrainedModel]
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def filled(model: object, cache: JoltCache, tokens: int, rows: int = 1, seed: int = 0) -> JoltCache:
    """Fill a cache with keys and values whose token spectrum falls, as real ones do."""
    rng = torch.Generator().manual_seed(seed)
    shape = cache.shape
    for index in range(len(cache.layers)):
        pair = []
        for _ in range(2):
            basis = torch.randn(rows, shape.kv_heads, tokens, 6, generator=rng)
            noise = torch.randn(rows, shape.kv_heads, tokens, shape.head_dim, generator=rng)
            mix = torch.randn(rows, shape.kv_heads, 6, shape.head_dim, generator=rng)
            pair.append(basis @ mix + 0.3 * noise)
        cache.update(*pair, index)
    return cache


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 300),
    rows=st.integers(1, 2),
    ratio=st.floats(1.2, 8),
    sinks=st.integers(0, 6),
    window=st.integers(0, 20),
    group=st.integers(1, 3),
    pre_rope=st.booleans(),
)
def test_budget_holds_on_every_shape_or_is_refused(
    make_tiny: MakeTiny, tokens: int, rows: int, ratio: float, sinks: int, window: int, group: int, pre_rope: bool
) -> None:
    model = make_tiny(layers=2)
    cache = JoltCache(model, ratio=ratio, sinks=sinks, window=window, layer_group=group, pre_rope=pre_rope)
    filled(model, cache, tokens, rows)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a prompt too short for its ratio
            cache.compress()
    except BudgetError:
        assert cache.prefix is None
        return
    if cache.prefix is None:
        assert tokens <= sinks + window or tokens < 256
        assert "stays exact" in cache.note
        return
    budget = cache.shape.dense_bytes(tokens) * rows / ratio
    cells = 2 * -(-cache.shape.layers // group)
    assert cache.prefix_nbytes + rows * header_bytes(cells) <= budget + rows
    assert cache.report().ratio >= ratio * 0.999


def test_the_budget_is_used(make_tiny: MakeTiny) -> None:
    model = make_tiny(layers=4, head_dim=32)
    for ratio in (2, 3, 4):
        cache = filled(model, JoltCache(model, ratio=ratio, window=0), 1200)
        cache.compress()
        assert cache.prefix_nbytes >= 0.98 * cache.shape.dense_bytes(1200) / ratio


def test_more_bytes_less_error(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    errors = []
    for ratio in (2, 3, 4, 6):
        cache = filled(model, JoltCache(model, ratio=ratio, window=0), 800)
        cache.compress()
        errors.append(cache.report().key_error ** 2 + cache.report().value_error ** 2)
    assert errors == sorted(errors)
    assert errors[0] < 0.1 * errors[-1]


def test_one_budget_beats_equal_shares() -> None:
    """Cells of different difficulty: the joint Lagrangian must gain over giving every cell the same bytes."""
    rng = torch.Generator().manual_seed(4)
    shape = CellShape(2, 300, 32, core_slabs=2, item_bytes=2)
    easy = torch.randn(300, 3, generator=rng) @ torch.randn(3, 64, generator=rng) + 0.05 * torch.randn(
        300, 64, generator=rng
    )
    hard = torch.randn(300, 64, generator=rng)
    spectra = [hosvd(x.unflatten(1, (2, 32)).transpose(0, 1)) for x in (easy, hard)]
    choices = own_choices(spectra, shape, PAPER_BITS, "lloyd_max")
    budget = 2 * 2 * 2 * 300 * 32 // 4
    joint = allocate([c.costs for c in choices], [c.errors for c in choices], budget)
    shares = [allocate([c.costs], [c.errors], budget // 2) for c in choices]
    assert joint.error < 0.8 * sum(share.error for share in shares)


def test_budget_bytes_is_shared_by_length(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, :200] = 0
    cache = filled(model, JoltCache(model, budget_bytes=60_000, window=0, attention_mask=mask), 400, rows=2)
    cache.compress()
    assert 58_000 * 0.9 < cache.prefix_nbytes <= 60_000
    sizes = [sum(cell.nbytes for cell in cache.cells if cell.row == row) for row in range(2)]
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.15)


def test_pre_rope_takes_the_rotation_off_exactly(make_tiny: MakeTiny) -> None:
    """With everything kept, un-rotating and rotating back changes keys by rounding only."""
    model = make_tiny(head_dim=32)
    cache = filled(model, JoltCache(model, budget_bytes=10**9, window=0), 100)
    before = [layer.keys.clone() for layer in cache.compressible]
    cache.compress()
    for layer, keys in zip(cache.compressible, before, strict=True):
        assert (layer.dense()[0] - keys).norm() / keys.norm() < 1e-3


def test_constructing_changes_nothing_on_the_model(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    before = (json.dumps(model.config.to_dict(), default=str), type(model), [type(m) for m in model.modules()])
    JoltCache(model, ratio=3)
    assert before == (json.dumps(model.config.to_dict(), default=str), type(model), [type(m) for m in model.modules()])


def test_choices_cover_pure_quantization_and_pure_rank() -> None:
    x = torch.randn(2, 50, 8)
    (choices,) = own_choices([hosvd(x)], CellShape(2, 50, 8, 2, 2), PAPER_BITS, "lloyd_max")
    plans = [choices.plan(index) for index in range(len(choices.costs))]
    kinds = {(plan.token_rank > 0, plan.bits > 0) for plan in plans}
    assert kinds == {(False, True), (True, False), (True, True)}  # and never nothing
    assert len(choices.costs) == len(choices.errors)
    with pytest.raises(IndexError):
        choices.plan(len(plans))


@given(most=st.integers(0, 5000))
def test_token_rank_grid(most: int) -> None:
    grid = token_rank_grid(most)
    assert grid[0] == 0
    assert grid[-1] == most
    assert grid == sorted(set(grid))


@given(features=st.integers(1, 300))
def test_feature_rank_grid(features: int) -> None:
    grid = feature_rank_grid(features)
    assert grid[-1] == features
    assert all(1 <= rank <= features for rank in grid)


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({}, "exactly one of ratio"),
        ({"ratio": 3, "budget_bytes": 5}, "exactly one of ratio"),
        ({"ratio": 0.5}, "at least 1"),
        ({"ratio": float("nan")}, "at least 1"),
        ({"ratio": float("inf")}, "at least 1"),
        ({"ratio": 2, "bits": (0, 12)}, "0 to 8"),
        ({"budget_bytes": 0}, "positive"),
        ({"ratio": 2, "bits": (0, 9)}, "0 to 8"),
        ({"ratio": 2, "bits": ()}, "0 to 8"),
        ({"ratio": 2, "layer_group": 0}, "≥ 1"),
        ({"ratio": 2, "levels": "cubic"}, "lloyd_max, uniform"),
        ({"ratio": 2, "sinks": -1}, "≥ 0"),
        ({"ratio": 2, "sinks": 2.5}, "≥ 0"),
        ({"ratio": "3"}, "at least 1"),
        ({"ratio": True}, "at least 1"),
        ({"ratio": 2, "seal": 0}, "seal"),
        ({"ratio": 2, "drift": 0.5}, "drift"),
        ({"ratio": 2, "weights": (1.0, -1.0)}, "positive"),
        ({"ratio": 2, "weights": (1.0,)}, "need 4"),
        ({"ratio": 2, "allocation": "best"}, "joint, uniform, greedy"),
        ({"ratio": 2, "split": 1.0}, "split"),
        ({"ratio": 2, "backbone": 1}, "backbone"),
        ({"ratio": 2, "backbone": False, "bits": (0,)}, "nothing is stored"),
        ({"ratio": 2, "slab_share": 0}, "slab_share"),
        ({"ratio": 2, "bits": 3}, "several widths"),
        ({"ratio": 2, "pre_rope": "no"}, "true or false"),
        ({"ratio": 2, "seed": "a"}, "seed"),
        ({"ratio": 2, "windw": 5}, "no field 'windw'"),
    ],
)
def test_bad_settings(make_tiny: MakeTiny, setting: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        JoltCache(make_tiny(), **setting)


def test_config_round_trip() -> None:
    config = JoltConfig(ratio=3, bits=(8, 0, 4), layer_group=2)
    assert JoltConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_config_and_settings_together_are_refused(make_tiny: MakeTiny) -> None:
    with pytest.raises(ConfigError, match="not both"):
        JoltCache(make_tiny(), JoltConfig(ratio=2), window=3)


def test_budget_below_the_fixed_cost_says_what_it_takes(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    cache = filled(model, JoltCache(model, budget_bytes=900, sinks=4, window=4), 100)
    with pytest.raises(BudgetError, match="The least possible is") as refused:
        cache.compress()
    assert cache.prefix is None
    assert cache.get_seq_length() == 100
    least = int(re.search(r"least possible is (\d+) bytes", str(refused.value))[1])  # type: ignore[index]
    with pytest.raises(BudgetError, match="least"):
        filled(model, JoltCache(model, budget_bytes=least - 1, sinks=4, window=4), 100).compress()
    filled(model, JoltCache(model, budget_bytes=least, sinks=4, window=4), 100).compress()  # and it is enough


@pytest.mark.parametrize("tokens", [9, 13, 16, 25])
def test_a_prompt_too_short_for_its_ratio_stays_exact_with_a_warning(make_tiny: MakeTiny, tokens: int) -> None:
    model, ids = make_tiny(), torch.randint(2, 128, (1, tokens))
    cache, by_hand = JoltCache(model, ratio=3), filled(None, JoltCache(model, ratio=3), tokens)
    with pytest.warns(UserWarning, match="too few for a ratio of 3"):
        got = model.generate(ids, past_key_values=cache, **GREEDY)
    with pytest.warns(UserWarning, match="too few for a ratio of 3"):
        by_hand.compress()
    assert torch.equal(got, model.generate(ids, **GREEDY))
    for one in (cache, by_hand):
        assert one.prefix is None
        assert "stays exact" in str(one.report())


@pytest.mark.parametrize("tokens", [20, 40, 60, 100, 200, 300])
@pytest.mark.parametrize("ratio", [2, 3, 4])
def test_what_is_compressed_is_worth_having(make_tiny: MakeTiny, tokens: int, ratio: int) -> None:
    """No length at which a row is compressed into next to nothing."""
    cache = filled(None, JoltCache(make_tiny(head_dim=64, layers=4), ratio=ratio), tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        cache.compress()
    assert cache.report().key_error < 0.5
    assert cache.report().value_error < 0.5
    assert not any("ranks 0 x 64, residual 0" in cell.plan for cell in cache.cells)


def test_one_short_row_does_not_keep_the_batch_exact(make_tiny: MakeTiny) -> None:
    model = make_tiny()
    mask = torch.ones(2, 800, dtype=torch.long)
    mask[0, :780] = 0
    cache = filled(model, JoltCache(model, ratio=2, attention_mask=mask), 800, rows=2)
    exact = cache.compressible[1].values.clone()
    with pytest.warns(UserWarning, match="20 tokens are too few"):
        cache.compress()
    assert cache.prefix is not None
    assert [row.coded for row in cache.prefix.rows] == [0, 796]
    assert torch.equal(cache.compressible[1].dense()[1][0, :, 780:], exact[0, :, 780:])
    assert "row 0 stays exact" in cache.report().note


@pytest.mark.parametrize("settings", [{"budget_bytes": 100}, {"ratio": 500}, {"ratio": 3, "bits": (8,)}])
def test_an_impossible_budget_is_refused_at_every_step(make_tiny: MakeTiny, settings: dict[str, object]) -> None:
    model = make_tiny(head_dim=64)
    cache = filled(model, JoltCache(model, **settings), 400)
    for _ in range(2):
        with pytest.raises(BudgetError, match="bytes"), torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=cache)
        assert cache.prefix is None
        assert cache.get_seq_length() == 400


def test_pre_rope_is_what_is_encoded(make_tiny: MakeTiny) -> None:
    """Keys that are low-rank before rotation and not after: only the pre-RoPE cache can see it."""
    model, errors = make_tiny(head_dim=64), []
    for pre_rope in (True, False):
        cache = JoltCache(model, ratio=4, pre_rope=pre_rope)
        assert (cache.rope is not None) == pre_rope
        filled(model, cache, 600)
        rope = rope_of(model)
        for layer in cache.compressible:
            flat = torch.randn(1, 2, 600, 2) @ torch.randn(1, 2, 2, 64)
            layer.keys = rope.rotate(flat, torch.arange(600))
        cache.compress()
        errors.append(cache.report().key_error)
    assert errors[0] < 0.3 * errors[1]


def test_unsupported_model_is_named() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*llama"):
        JoltCache(model, ratio=2)
