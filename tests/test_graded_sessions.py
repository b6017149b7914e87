"""Sessions of graded caches: back bit for bit, bound to their statistics, and within the byte budget on disk."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import struct
import warnings
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import kvslim
from comparing import differences
from kvslim.caching.report import header_bytes, stretch_header_bytes
from kvslim.caching.snapshot import take
from kvslim.checkpointing.session_graded import GradedRecord, GradedRecords, width_bytes
from kvslim.errors import BudgetError, CacheStateError, CheckpointError, ConfigError
from kvslim.graded import GradedCache, GradedConfig, GradedStats
from kvslim.quantizing.channels import WIDTHS, layout_of
from tiny import build

FUZZ: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
KINDS = ["llama-gqa", "gemma3", "qwen3", "llama-mqa"]


@once
def made(kind: str, seed: int = 0, **changes: Any) -> tuple[PreTrainedModel, GradedStats]:
    """A tiny model and statistics of it; another seed gives other statistics of the same model."""
    model = build(kind, **changes)
    windows = torch.randint(0, 128, (24, 64), generator=torch.Generator().manual_seed(seed))
    return model, kvslim.calibrate(model, None, windows)


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def scores(model: Any, ids: torch.Tensor, cache: GradedCache) -> torch.Tensor:
    """Logits of more tokens, which are then cached."""
    logits: torch.Tensor = model(input_ids=ids, past_key_values=cache).logits
    return logits


def filled(
    kind: str, tokens: int = 300, rows: int = 1, mask: torch.Tensor | None = None, spikes: bool = False, **options: Any
) -> Any:
    """A compressed cache, with its model and statistics; ``spikes`` are three tokens that lie outside all levels."""
    model, stats = made(kind)
    cache = GradedCache(model, stats, attention_mask=mask, **{"ratio": 3, **options})
    scores(model, prompt(tokens, rows), cache)
    for layer in cache.compressible if spikes else ():
        for dense in (layer.keys, layer.values):
            dense[:, :, 60:240:70] *= 40
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a row too short for its ratio
        cache.compress()
    return model, stats, cache


def assert_same(one: Any, two: Any) -> None:
    """The same content, report and drift, and what attention is given."""
    states = [dataclasses.replace(take(cache), reports=()) for cache in (one, two)]
    assert not list(differences(*states))
    reports = [dataclasses.replace(cache.report(), tail_nbytes=0) for cache in (one, two)]
    assert reports[0] == reports[1]
    assert (one.config, one.drift()) == (two.config, two.drift())
    for mine, theirs in zip(one.compressible, two.compressible, strict=True):
        assert all(map(torch.equal, mine.dense(), theirs.dense()))


def resumed(cache: Any, path: Path, model: PreTrainedModel, stats: GradedStats) -> Any:
    """Save and load; checks that both are the same on the way."""
    cache.save(path)
    again = kvslim.load_cache(path, model, stats=stats)
    assert type(again) is GradedCache
    assert_same(cache, again)
    return again


# ---- back bit for bit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["quality", "speed"])
def test_a_cache_comes_back_bit_for_bit(tmp_path: Path, kind: str, preset: str) -> None:
    model, stats, cache = filled(kind, 280, rows=2, spikes=True, preset=preset, outliers=0.02, sinks=0, window=5)
    assert any("3 exact" in cell.plan for cell in cache.cells)
    scores(model, prompt(3, 2, seed=1), cache)
    again = resumed(cache, tmp_path / "s", model, stats)
    more = prompt(4, 2, seed=2)
    assert torch.equal(scores(model, more, cache), scores(model, more, again))
    assert_same(cache, again)


def test_bfloat16_and_statistics_from_a_file(tmp_path: Path) -> None:
    model = build("llama-gqa").to(torch.bfloat16)
    stats = kvslim.calibrate(model, None, prompt(64, 24))
    stats.save(tmp_path / "stats")
    cache = GradedCache(model, stats, ratio=3)
    out = model.generate(prompt(300), past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.save(tmp_path / "s", out)
    loaded = GradedStats.load(tmp_path / "stats")
    assert loaded.digest == stats.digest
    session = kvslim.load_session(tmp_path / "s", model, stats=loaded)
    assert session.input_ids is not None
    assert torch.equal(session.input_ids, out)
    ends = [model.generate(out, past_key_values=c, max_new_tokens=20, do_sample=False) for c in (cache, session.cache)]
    assert torch.equal(*ends)


def test_left_padding_and_a_row_that_stays_exact(tmp_path: Path) -> None:
    mask = torch.ones(3, 300, dtype=torch.int64)
    mask[0, :41], mask[1, :297] = 0, 0
    model, stats, cache = filled("qwen3", 300, rows=3, mask=mask)
    assert "row 1 stays exact" in cache.note
    again = resumed(cache, tmp_path / "s", model, stats)
    session = kvslim.load_session(tmp_path / "s", model, stats=stats)
    assert torch.equal(session.attention_mask, mask)
    full = torch.nn.functional.pad(mask, (0, 1), value=1)
    ids = torch.cat((prompt(300, 3), prompt(1, 3, seed=4)), dim=1)
    how: dict[str, Any] = {"attention_mask": full, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(*(model.generate(ids, past_key_values=one, **how) for one in (cache, again)))


def test_beams_sealed_stretches_and_crops(tmp_path: Path) -> None:
    model, stats, cache = filled("llama-gqa", 300, spikes=True, seal=None, ratio=2, outliers=0.02)
    alone = cache.serialized_nbytes
    cache.batch_repeat_interleave(3)
    assert cache.serialized_nbytes == alone  # beams share their storage on disk too
    scores(model, prompt(160, 3, seed=5), cache)
    cache.seal()  # beams that have parted, on one first stretch
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    assert len({cell.start for cell in cache.cells}) == 2
    again = resumed(cache, tmp_path / "s", model, stats)
    for one in (cache, again):  # the next stretch is planned alike
        scores(model, prompt(160, 3, seed=6), one)
        one.seal()
    assert_same(cache, again)
    for tokens in (30, 130, 100, 200):  # into a sealed stretch, all of it, the other one, into the prefill
        cache.crop(-tokens)
        assert_same(cache, resumed(cache, tmp_path / "s", model, stats))
    assert len({cell.start for cell in cache.cells}) == 1
    assert all("2 exact" in cell.plan for cell in cache.cells)


@pytest.mark.parametrize("tokens", [5, 300])  # inside the window of 6, and beyond
def test_sliding_window_layers_and_a_prompt_too_short(tmp_path: Path, tokens: int) -> None:
    model, stats, cache = filled("gemma3", tokens, ratio=2)
    assert (cache.prefix is None) == (tokens == 5)
    again = resumed(cache, tmp_path / "s", model, stats)
    more = prompt(9, seed=7)
    assert torch.equal(scores(model, more, cache), scores(model, more, again))


def test_a_prefill_that_is_not_compressed_yet(tmp_path: Path) -> None:
    model, stats = made("llama-gqa")
    cache = GradedCache(model, stats, ratio=3, preset="speed")
    scores(model, prompt(300), cache)
    again = resumed(cache, tmp_path / "s", model, stats)
    for one in (cache, again):
        scores(model, prompt(1), one)
        assert one.prefix is not None
    assert_same(cache, again)


def test_drift_comes_back(tmp_path: Path) -> None:
    model, stats, cache = filled("llama-gqa")
    assert 0.5 < cache.drift() < 2
    cache.cells = [dataclasses.replace(cell, cost=9 * cell.cost) for cell in cache.cells]
    assert "times what the calibration text predicts (most: " in cache.report().note
    resumed(cache, tmp_path / "s", model, stats)


def test_equal_caches_make_equal_files_which_say_what_they_hold(tmp_path: Path) -> None:
    model, stats, cache = filled("llama-gqa", rows=2)
    cache.save(tmp_path / "one", prompt(300, 2))
    session = kvslim.load_session(tmp_path / "one", model, stats=stats)
    session.cache.save(tmp_path / "two", session.input_ids)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    about, report = kvslim.session_info(tmp_path / "one"), cache.report()
    assert (about.format_version, about.method, about.stats) == (2, "graded", stats.digest)
    assert about.total_bytes == (tmp_path / "one").stat().st_size
    assert 0 < about.total_bytes - about.id_bytes - about.tail_bytes - cache.serialized_nbytes < 100
    assert (about.prefix_tokens, about.coded_tokens, about.dense_bytes) == (600, 592, report.dense_nbytes)
    assert about.arena_bytes == cache.prefix_nbytes
    assert about.key_error == pytest.approx(report.key_error)
    assert about.config == json.loads(json.dumps(cache.config.to_dict()))
    for words in ("rank ", f"statistics {stats.digest[:12]}"):
        assert words in str(about)


# ---- bound to the statistics -----------------------------------------------------------------------------------------


def test_other_statistics_or_none_are_refused(tmp_path: Path) -> None:
    model, stats, cache = filled("llama-gqa")
    cache.save(tmp_path / "s")
    _, others = made("llama-gqa", seed=1)
    assert others.digest != stats.digest
    with pytest.raises(CacheStateError, match=r"Pass stats=GradedStats\.load"):
        kvslim.load_cache(tmp_path / "s", model)
    with pytest.raises(CacheStateError, match=r"other calibration statistics .*or prefill again"):
        kvslim.load_cache(tmp_path / "s", model, stats=others)
    with pytest.raises(ConfigError, match="stats is a GradedStats"):
        kvslim.load_cache(tmp_path / "s", model, stats="stats")  # type: ignore[arg-type]
    with pytest.raises(CacheStateError, match="another model"):
        kvslim.load_cache(tmp_path / "s", made("llama-mqa")[0], stats=stats)


def test_one_changed_number_changes_the_digest() -> None:
    _, stats = made("llama-gqa")
    for name in ("keys_directions", "values_mean", "rotated_curves"):
        tables = {f.name: getattr(stats.tables, f.name) for f in dataclasses.fields(stats.tables)}
        first = tables[name][0].clone()
        first.view(-1)[3] += 0.5
        changed = dataclasses.replace(stats.tables, **{name: (first, *tables[name][1:])})
        assert dataclasses.replace(stats, tables=changed).digest != stats.digest
    assert dataclasses.replace(stats, origin="elsewhere").digest == stats.digest


def test_a_cache_that_is_not_coded_as_its_settings_say(tmp_path: Path) -> None:
    _, _, cache = filled("llama-gqa")
    cache.config, before = GradedConfig(ratio=3, run=16), cache.config
    with pytest.raises(CacheStateError, match="not coded as its settings"):
        cache.save(tmp_path / "s")
    cache.config, cache.bases = before, {key: copy.copy(basis) for key, basis in cache.bases.items()}
    with pytest.raises(CacheStateError, match="not coded as its settings"):
        cache.save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_the_store_keeps_graded_sessions_apart(tmp_path: Path) -> None:
    model, stats, cache = filled("llama-gqa", 300)
    _, others = made("llama-gqa", seed=1)
    store, ids = kvslim.SessionStore(tmp_path, 1 << 30), prompt(300)
    name = store.put(cache, ids)
    assert store.find(prompt(310), model) is None
    assert store.find(prompt(310), model, stats=others) is None
    assert store.find(ids, model, kvslim.JoltConfig(ratio=3), stats=stats) is None
    found = store.find(ids, model, cache.config, stats=stats)
    assert found is not None
    assert (found.tokens, type(found.cache)) == (299, GradedCache)
    cache.crop(-1)
    cache._rolled_back = False
    assert_same(cache, found.cache)
    other = GradedCache(model, others, ratio=3)
    scores(model, ids, other)
    other.compress()
    assert store.put(other, ids) != name
    jolt = kvslim.JoltCache(model, ratio=2)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=jolt)
    jolt.compress()
    store.put(jolt, ids)
    assert len(store.entries()) == 3
    assert isinstance(store.find(ids, model).cache, kvslim.JoltCache)  # type: ignore[union-attr]


# ---- within the budget -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["quality", "speed"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_what_is_written_is_within_the_budget(tmp_path: Path, preset: str, kv_heads: int) -> None:
    model, stats = made("llama-gqa", num_key_value_heads=kv_heads)
    refused, written = 0, 0
    for tokens in (257, 300, 1000, 2048):
        dense = GradedCache(model, stats, ratio=1, preset=preset)
        scores(model, prompt(tokens), dense)
        for ratio in (1.0, 2.0, 3.3, 4.0, 8.0, 16.0):
            cache: Any = GradedCache(model, stats, ratio=ratio, preset=preset)
            for layer, full in zip(cache.compressible, dense.compressible, strict=True):
                layer.update(full.keys, full.values)
            try:
                cache.compress()
            except BudgetError:
                refused += 1
                continue
            written += 1
            assert cache.serialized_nbytes <= cache.shape.dense_bytes(tokens) / ratio, (tokens, ratio)
        cache = dense
        cache.compress()
        cache.save(tmp_path / "s")
        assert (tmp_path / "s").stat().st_size - cache.serialized_nbytes == cache.tail_nbytes == 0
    assert written >= 15
    assert refused or kv_heads > 1


def test_what_is_set_aside_covers_the_description(tmp_path: Path) -> None:
    """The longest that a description gets, for 1 and 8 layers, and sealed stretches behind it."""
    rope = {
        "rope_type": "yarn", "rope_theta": 1234567.123456, "factor": 39.99999,
        "original_max_position_embeddings": 32768, "beta_fast": 32.123456, "beta_slow": 1.1234567,
        "mscale": 0.707106781, "mscale_all_dim": 1.123456789,
        "attention_factor": 1.13456789012, "partial_rotary_factor": 0.12345678901, "truncate": False,
    }  # fmt: skip
    for layers in (1, 8):
        model = build("llama-gqa", layers=layers, hidden_size=16, head_dim=12, intermediate_size=16)
        stats = kvslim.calibrate(model, None, prompt(64, 8))
        long = GradedConfig(
            ratio=1.2345678901234567, sinks=16, outliers=0.0012345678901234567, pre_rope=False, budget_bytes=None
        )
        cache: Any = GradedCache(model, stats, long)
        scores(model, prompt(400), cache)
        cache.compress()
        model.config.rope_parameters = dict(rope)
        cache.note = "later tokens stay exact: 123456 later tokens have 123456789 bytes; 123456789 are the least. " * 2
        per_cell = width_bytes(24, 8)
        words = {"get_vocab": lambda: {"a": 0}}
        cache.save(tmp_path / "s", tokenizer=type("Words", (), {k: staticmethod(v) for k, v in words.items()})())
        spent = (tmp_path / "s").stat().st_size - cache.prefix_nbytes
        assert spent <= header_bytes(2 * layers) + 2 * layers * per_cell
        before = cache.serialized_nbytes - cache.prefix_nbytes
        for seed in range(3):
            scores(model, prompt(200, seed=seed), cache)
            cache.seal()
            after = cache.serialized_nbytes - cache.prefix_nbytes
            assert after - before <= stretch_header_bytes(2 * layers) + 2 * layers * per_cell + 8  # padding
            before = after


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, _, cache = filled("llama-gqa", 260, rows=2, spikes=True, outliers=0.02, window=3)
    path = tmp_path_factory.mktemp("graded") / "s"
    cache.save(path, prompt(260, 2))
    assert any("exact" in cell.plan for cell in cache.cells)
    return path


def test_a_truncated_file_is_refused(saved: Path, tmp_path: Path) -> None:
    model, stats = made("llama-gqa")
    data = saved.read_bytes()
    for cut in [*(len(data) * i // 8 for i in range(8)), 8, len(data) - 1]:
        (tmp_path / "cut").write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match="is damaged"):
            kvslim.load_cache(tmp_path / "cut", model, stats=stats)


@settings(max_examples=40, **FUZZ)
@given(where=st.floats(0, 1, exclude_max=True), early=st.booleans(), flip=st.integers(1, 255))
def test_every_edited_byte_is_refused(saved: Path, where: float, early: bool, flip: int) -> None:
    model, stats = made("llama-gqa")
    data = bytearray(saved.read_bytes())
    data[int(where * (2000 if early else len(data)))] ^= flip
    edited = saved.with_name("edited")
    edited.write_bytes(data)
    with pytest.raises(CheckpointError):
        kvslim.load_cache(edited, model, stats=stats)


def forge(path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any], bytearray], None]) -> None:
    """Change description, plan and the rest of a session without changing lengths, then put the hashes right."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    metadata = entries["__metadata__"]
    about = json.loads(metadata["about"])
    change(metadata, about, body)
    metadata["about"] = json.dumps(about)
    head = entries["input_ids"]["data_offsets"][1]
    metadata["data_sha256"], metadata["head_sha256"] = hashlib.sha256(body[head:]).hexdigest(), "0" * 64
    text = json.dumps(entries).encode()
    digest = hashlib.sha256(text + body[:head]).hexdigest()
    out.write_bytes(struct.pack("<Q", len(text)) + text.replace(b"0" * 64, digest.encode(), 1) + body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m, a, b: a.update(method="jolt"), "its method is 'jolt'"),
        (lambda m, a, b: a.update(method=[]), "its method is"),
        (lambda m, a, b: a.update(stats=None), "does not name its calibration"),
        (lambda m, a, b: a.update(stats="A" * 64), "does not name its calibration"),
        (lambda m, a, b: a.update(weights=1), "weights or a price"),
        (lambda m, a, b: a.update(price=2), "weights or a price"),
        (lambda m, a, b: a["config"].update(run=0), "no run"),
        (lambda m, a, b: a["config"].update(run=2**40), "(?s)damaged|settings"),
        (lambda m, a, b: a["config"].update(run=16), "damaged"),
        (lambda m, a, b: a["config"].update(widths=[0]), "settings of the session"),
        (lambda m, a, b: m.update(kvslim_session="1"), "lacks or adds method, stats"),
        (lambda m, a, b: m.update(kvslim_session="3"), "Update kvslim"),
        (lambda m, a, b: a.pop("stats"), "lacks or adds stats"),
    ],
)
def test_forged_descriptions(saved: Path, tmp_path: Path, change: Any, words: str) -> None:
    model, stats = made("llama-gqa")
    forge(saved, tmp_path / "s", change)
    with pytest.raises(CheckpointError, match=words):
        kvslim.load_cache(tmp_path / "s", model, stats=stats)


def test_outliers_beyond_their_tokens_are_refused(saved: Path, tmp_path: Path) -> None:
    model, stats = made("llama-gqa")
    pattern = struct.pack("<3i", 60 - 4, 130 - 4, 200 - 4)  # behind the sinks

    def change(_: dict[str, Any], __: dict[str, Any], body: bytearray) -> None:
        place = bytes(body).index(pattern)
        body[place : place + 4] = struct.pack("<i", -5)

    forge(saved, tmp_path / "s", change)
    with pytest.raises(CheckpointError, match="rising places"):
        kvslim.load_cache(tmp_path / "s", model, stats=stats)


@settings(max_examples=60, **FUZZ)
@given(edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
def test_odd_bytes_in_the_plan(saved: Path, edits: list[tuple[float, int]]) -> None:
    model, stats = made("llama-gqa")
    length = kvslim.session_info(saved).description_bytes

    def change(_: dict[str, Any], __: dict[str, Any], body: bytearray) -> None:
        for where, value in edits:
            body[int(where * min(700, length))] = value

    forged = saved.with_name("forged")
    forge(saved, forged, change)
    try:
        kvslim.session_info(forged)
        cache = kvslim.load_cache(forged, model, stats=stats)
    except CheckpointError:
        return
    for layer in cache.compressible:  # then it describes another valid cache
        keys, _ = layer.dense()
        assert keys.shape == (2, 2, cache.get_seq_length(), 12)


@given(
    widths=st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=9),
    run=st.integers(1, 9),
    short=st.integers(0, 8),
    outliers=st.integers(0, 2**32 - 1),
    wide=st.booleans(),
    measured=st.tuples(*[st.floats(0, 1e100)] * 4),
)
def test_a_record_comes_back(
    widths: list[int], run: int, short: int, outliers: int, wide: bool, measured: tuple[float, ...]
) -> None:
    layout = layout_of(widths, run, len(widths) * run - min(short, run - 1))
    record = GradedRecord(layout, outliers, wide, *measured)
    kind = GradedRecords(layout.channels, run)
    data = record.to_bytes()
    assert len(data) == kind.size == 37 + -(-len(widths) // 2)
    assert kind.read(data) == record


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, 2, "unknown form"),
        (12, 0xFF, "no number"),
        (37, 0x09, "width"),
        (38, 0x10, "width"),
    ],
)
def test_records_that_no_writer_makes(at: int, value: int, words: str) -> None:
    data = bytearray(GradedRecord(layout_of([8, 4, 0], 8, 24), error=1.0).to_bytes())
    data[at] = value
    if at == 12:
        data[11] = 0xF0  # with it, minus infinity
    with pytest.raises(CheckpointError, match=words):
        GradedRecords(24, 8).read(bytes(data))
