"""The budget of a cache holds for what its session takes on disk, whatever the shape."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import kvslim
from kvslim.caching.report import header_bytes, stretch_header_bytes
from kvslim.checkpointing.session_info import info
from kvslim.errors import BudgetError
from kvslim.jolt import JoltCache
from kvslim.jolt_config import Price

MakeTiny = Callable[..., PreTrainedModel]
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


class Words:
    """A tokenizer as far as a session looks at one."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def file_prefix_bytes(cache: JoltCache, path: Path, ids: bool = True) -> int:
    """Bytes of the compressed prefix in a file: all that is not token ids, exact tail or sliding-window layers."""
    tokens = torch.zeros(cache.compressible[0].batch_size, cache.get_seq_length(), dtype=torch.int64)
    cache.save(path, tokens if ids else None, Words() if ids else None)  # type: ignore[arg-type]
    about = info(path)
    assert about.total_bytes == path.stat().st_size
    return about.total_bytes - about.id_bytes - about.tail_bytes - about.sliding_bytes


def row_budgets(cache: JoltCache, lengths: list[int], ratio: float) -> float:
    """What the rows of a prefill may take: their share by the ratio, or if they stay exact their own size."""
    shape, budget = cache.shape, 0.0
    assert cache.prefix is not None
    for row, length in zip(cache.prefix.rows, lengths, strict=True):
        dense = shape.dense_bytes(length)
        itemsize = cache.compressible[0].keys.element_size()
        budget += dense / ratio if row.coded else dense * itemsize / 2 + header_bytes(0)
    return budget


@dataclass(frozen=True)
class Case:
    """A cache to be saved: lengths of its rows, of the stretches sealed later, its settings, and what is cropped."""

    lengths: list[int]
    later: list[int]
    ratio: float
    settings: dict[str, Any]
    weighted: bool
    dtype: torch.dtype
    head_dim: int
    crop: int

    def cache(self, model: PreTrainedModel) -> JoltCache:
        columns = max(self.lengths)
        mask = torch.stack([torch.arange(columns) >= columns - length for length in self.lengths])
        weights = (1.0,) * (2 * -(-3 // self.settings["layer_group"])) if self.weighted else None
        return JoltCache(model, ratio=self.ratio, attention_mask=mask, weights=weights, seal=None, **self.settings)


settings_of_caches = st.fixed_dictionaries(
    {
        "bits": st.lists(st.sampled_from([0, 2, 3, 4, 5, 6, 8, 16]), min_size=1, max_size=4, unique=True).map(tuple),
        "layer_group": st.integers(1, 3),
        "sinks": st.integers(0, 6),
        "window": st.integers(0, 20),
        "pre_rope": st.booleans(),
        "slab_share": st.sampled_from([1.0, 0.5]),
    }
)
cases = st.builds(
    Case,
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=3),
    later=st.lists(st.integers(20, 130), max_size=2),
    ratio=st.floats(1, 8),
    settings=settings_of_caches,
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    head_dim=st.sampled_from([8, 20]),
    crop=st.integers(0, 400),
)


@settings(max_examples=25, **COMMON)
@given(case=cases)
def test_what_is_written_is_within_the_budget(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path, case: Case
) -> None:
    model, rows, path = (
        make_tiny(layers=3, heads=2, head_dim=case.head_dim).to(case.dtype),
        len(case.lengths),
        tmp_path / "s",
    )
    cache = sessions.fill(case.cache(model), max(case.lengths), rows=rows, dtype=case.dtype)
    with suppress(BudgetError):
        sessions.compress(cache)
    if cache.prefix is None:
        cache.save(path)
        sessions.assert_same(cache, kvslim.load_cache(path, model))
        return
    budget = row_budgets(cache, case.lengths, case.ratio)
    assert file_prefix_bytes(cache, path) <= budget
    assert file_prefix_bytes(cache, path, ids=False) == cache.serialized_nbytes
    for seed, tokens in enumerate(case.later, start=1):
        sessions.fill(cache, tokens, rows=rows, seed=seed, dtype=case.dtype)
        behind = cache.tail_tokens
        with suppress(BudgetError):
            cache.seal()
            budget += rows * cache.shape.dense_bytes(behind) / case.ratio
        assert file_prefix_bytes(cache, path) <= budget
        again = kvslim.load_cache(path, model)
        assert (again.prefix_nbytes, again.serialized_nbytes) == (cache.prefix_nbytes, cache.serialized_nbytes)
    if 0 < case.crop < cache.get_seq_length():
        cache.crop(-case.crop)
        cache.save(path)
        sessions.assert_same(cache, kvslim.load_cache(path, model))
        if cache.prefix is not None:
            assert file_prefix_bytes(cache, path) <= budget


def test_the_description_fits_what_is_set_aside_for_it(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    """The longest that a description gets: yarn, a note, weights and a price for each of 126 layers."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1234567.123456, "factor": 39.99999,
        "original_max_position_embeddings": 32768, "beta_fast": 32.123456, "beta_slow": 1.1234567,
        "mscale": 0.707106781, "mscale_all_dim": 1.123456789,
        "attention_factor": 1.13456789012, "partial_rotary_factor": 0.12345678901, "truncate": False,
    }  # fmt: skip
    for layers in (1, 126):
        deep = make_tiny(layers=layers, heads=1, kv_heads=1, head_dim=8)
        deep.config.rope_parameters = dict(rope)
        weights = tuple(0.1 + 1 / (1 + i) for i in range(2 * layers))
        cache = JoltCache(
            deep, ratio=1.2345678901234567, sinks=16, weights=weights, split=0.123456789012345678,
            slab_share=0.1234567890123456, seed=2**63, pre_rope=False, drift=12345.678901234567,
        )  # fmt: skip
        sessions.fill(cache, 400)
        cache.compress()
        cache.price = Price(0.1, tuple(1 / (3 + i) for i in range(layers)))
        cache.note = "later tokens stay exact: 123456 later tokens have 123456789 bytes; 123456789 are the least. " * 2
        cells = 2 * layers
        assert file_prefix_bytes(cache, tmp_path / "s") - cache.prefix_nbytes <= header_bytes(cells)
        again = kvslim.load_cache(tmp_path / "s", deep)
        assert (again.price, again.config) == (cache.price, cache.config)


def test_a_sealed_stretch_fits_what_is_set_aside_for_it(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path
) -> None:
    model = make_tiny(layers=2)
    cache = sessions.fill(JoltCache(model, ratio=3, seal=None), 400)
    cache.compress()
    last = file_prefix_bytes(cache, tmp_path / "s") - cache.prefix_nbytes
    for seed in range(1, 12):
        sessions.fill(cache, 60, seed=seed)
        cache.seal()
        now = file_prefix_bytes(cache, tmp_path / "s") - cache.prefix_nbytes
        assert now - last <= stretch_header_bytes(4) + 8  # padding; the first header has room for it
        assert now <= header_bytes(4) + seed * stretch_header_bytes(4)
        last = now


def test_many_rows_on_one_prompt_cost_nothing(make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path) -> None:
    model = make_tiny()
    cache: Any = sessions.fill(JoltCache(model, ratio=3), 400, rows=2)
    cache.compress()
    budget = 2 * cache.shape.dense_bytes(400) / 3
    wide = copy.deepcopy(cache)
    wide.batch_repeat_interleave(150)
    assert file_prefix_bytes(wide, tmp_path / "s") <= budget
    sessions.assert_same(wide, kvslim.load_cache(tmp_path / "s", model))
    one = dataclasses.replace(wide.prefix, rows=wide.prefix.rows[:150])
    assert len({id(row) for row in one.rows}) == 1
    wide.batch_select_indices(torch.arange(150))
    assert file_prefix_bytes(wide, tmp_path / "s") <= budget / 2


@pytest.mark.parametrize("budget", [30_000, 60_001])
def test_a_budget_in_bytes_is_taken_at_its_word(
    make_tiny: MakeTiny, sessions: SimpleNamespace, tmp_path: Path, budget: int
) -> None:
    model = make_tiny()
    cache = sessions.fill(JoltCache(model, budget_bytes=budget), 300, rows=2)
    cache.compress()
    assert 0.8 * budget < file_prefix_bytes(cache, tmp_path / "s") <= budget
