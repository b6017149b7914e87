"""Damaged, forged and interrupted session files: always refused in words, and the old file is never lost."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import kvslim
from kvslim.checkpointing.session_info import info
from kvslim.checkpointing.session_plan import PrefixPlan
from kvslim.errors import CacheStateError, CheckpointError, ConfigError, KvslimError
from kvslim.jolt import JoltCache

MakeTiny = Callable[..., PreTrainedModel]
FUZZ = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.fixture
def model(make_tiny: MakeTiny) -> PreTrainedModel:
    return make_tiny()


@pytest.fixture
def path(model: PreTrainedModel, sessions: SimpleNamespace, tmp_path: Path) -> Path:
    """A session with all there can be: two rows, an inherited basis, a tail, ids, weights and a price."""
    cache = JoltCache(model, ratio=3, bits=(0, 8), seal=None, window=4, weights=(1.0, 2.0, 1.0, 2.0))
    sessions.fill(cache, 600, rows=2)
    cache.compress()
    sessions.fill(cache, 128, rows=2, seed=1)
    cache.seal()
    sessions.fill(cache, 3, rows=2, seed=2)
    plans = " ".join(cell.plan for cell in cache.report().cells)
    assert "inherited" in plans
    assert "residual 8 bit" in plans
    cache.save(tmp_path / "s", torch.arange(2 * 740).reshape(2, 740))
    return tmp_path / "s"


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_a_truncated_file_is_refused(model: PreTrainedModel, path: Path) -> None:
    data = path.read_bytes()
    for cut in [*(len(data) * i // 16 for i in range(16)), 4, 8, 9, len(data) - 1]:
        path.write_bytes(data[:cut])
        for read in (lambda: kvslim.load_cache(path, model), lambda: info(path)):
            with pytest.raises(CheckpointError, match="is damaged"):
                read()
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="is damaged"):
        info(path)


@settings(max_examples=150, **FUZZ)
@given(where=st.floats(0, 1, exclude_max=True), early=st.booleans(), flip=st.integers(1, 255))
def test_every_edited_byte_is_refused(model: PreTrainedModel, path: Path, where: float, early: bool, flip: int) -> None:
    data = bytearray(path.read_bytes())
    place = int(where * (4000 if early else len(data)))  # early: JSON, plan and ids
    data[place] ^= flip
    edited = path.with_name("edited")
    edited.write_bytes(data)
    with pytest.raises(CheckpointError):  # whatever the byte means; no exceptions, not even spaces
        kvslim.load_cache(edited, model)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 100, b"\xff" * 100, b'{"a": 1}' * 40])
def test_files_that_are_no_sessions(model: PreTrainedModel, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s").write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        kvslim.load_cache(tmp_path / "s", model)


# ---- files with right hashes that no writer makes --------------------------------------------------------------------


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Any], bytearray], None]) -> None:
    """Change JSON, description and plan of a session, then put offsets and hashes right."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    metadata = entries["__metadata__"]
    about = json.loads(metadata["about"])
    plan = bytearray(body[: entries["plan"]["data_offsets"][1]])
    rest = body[len(plan) :]
    change(entries, about, plan)
    metadata["about"] = json.dumps(about)
    grown = len(plan) - entries["plan"]["data_offsets"][1]
    for name, entry in entries.items():
        if name != "__metadata__":
            entry["data_offsets"] = [
                at + (grown if (name, i) != ("plan", 0) else 0) for i, at in enumerate(entry["data_offsets"])
            ]
    entries["plan"]["shape"] = [len(plan)]
    head_bytes = len(plan) + entries["input_ids"]["data_offsets"][1] - entries["input_ids"]["data_offsets"][0]
    body = plan + rest
    metadata["data_sha256"], metadata["head_sha256"] = hashlib.sha256(body[head_bytes:]).hexdigest(), "0" * 64
    text = json.dumps(entries).encode()
    digest = hashlib.sha256(text + body[:head_bytes]).hexdigest()
    text = text.replace(b"0" * 64, digest.encode(), 1)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_the_forger_makes_files_that_load(model: PreTrainedModel, path: Path) -> None:
    forge(path, lambda *_: None)
    assert kvslim.load_cache(path, model).get_seq_length() == 731


def test_a_newer_format_is_named(model: PreTrainedModel, path: Path) -> None:
    forge(path, lambda entries, *_: entries["__metadata__"].update(kvslim_session="3"))
    with pytest.raises(CheckpointError, match=r"format version 3; .* Update kvslim"):
        kvslim.load_cache(path, model)


ODD: list[Any] = [None, True, -1, 0, 1, 3, 2**40, 1e400, float("nan"), 0.5, "", "x", [], [1], [[]], {}, {"a": 1}]


def fields_of(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in nested tables."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*trail, name)
            yield from fields_of(item, (*trail, name))


@settings(max_examples=150, **FUZZ)
@given(data=st.data())
def test_odd_values_in_the_description(model: PreTrainedModel, path: Path, data: st.DataObject) -> None:
    original = path.read_bytes()

    def change(entries: dict[str, Any], about: dict[str, Any], _: bytearray) -> None:
        table, names = data.draw(st.sampled_from([(about, list(fields_of(about))), (entries["tail"], [("shape",)])]))
        *trail, last = data.draw(st.sampled_from(names))
        for name in trail:
            table = table[name]
        if data.draw(st.booleans()):
            table[last] = data.draw(st.sampled_from(ODD))
        else:
            del table[last]

    try:
        forge(path, change)
        refused_or_usable(path, model)
    finally:
        path.write_bytes(original)


@settings(max_examples=200, **FUZZ)
@given(
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 40),
)
def test_odd_bytes_in_the_plan(model: PreTrainedModel, path: Path, edits: list[tuple[float, int]], cut: int) -> None:
    original = path.read_bytes()

    def change(_: dict[str, Any], __: dict[str, Any], plan: bytearray) -> None:
        for where, value in edits:
            plan[int(where * len(plan))] = value
        del plan[len(plan) - 8 * (cut // 8) :]

    try:
        forge(path, change)
        refused_or_usable(path, model)
    finally:
        path.write_bytes(original)


def refused_or_usable(path: Path, model: PreTrainedModel) -> None:
    """A forged file may describe another valid cache; then it must be one, or be refused with a typed error."""
    try:
        info(path)
        cache = kvslim.load_cache(path, model)
    except (CheckpointError, CacheStateError):
        return
    for layer in cache.compressible:
        keys, values = layer.dense()
        assert keys.shape == values.shape == (2, 2, cache.get_seq_length(), 16)
    str(cache.report())


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400), cells=st.integers(1, 4))
def test_no_bytes_make_the_plan_reader_crash(data: bytes, cells: int) -> None:
    try:
        plan, rest = PrefixPlan.from_bytes(data, cells)
    except CheckpointError:
        return
    assert plan.to_bytes() + rest == data


# ---- interrupted writes ----------------------------------------------------------------------------------------------

WRITE = """
import os, resource, signal, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from kvslim.checkpointing import session_file
from kvslim.errors import ConfigError
from kvslim.jolt import JoltCache

config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(config)
cache = JoltCache(model, ratio=3)
for layer in range(2):
    cache.update(*torch.randn(2, 1, 2, 2000, 16), layer)
cache.compress()
if sys.argv[2] == "kill":
    whole, calls = session_file.raw, []
    def raw(tensor):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(tensor)
    session_file.raw = raw
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    cache.save(sys.argv[1])
except ConfigError as error:
    print(error)
"""


def write_in_another_process(path: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WRITE, str(path), how]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_process_killed_in_the_middle_leaves_the_old_file(model: PreTrainedModel, path: Path) -> None:
    before = path.read_bytes()
    done = write_in_another_process(path, "kill")
    assert done.returncode == -9, done.stderr
    assert len(list(path.parent.iterdir())) == 2  # it was in the middle: the temporary file is there
    assert path.read_bytes() == before
    assert kvslim.load_cache(path, model).get_seq_length() == 731


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit")
def test_a_full_disk_is_named_and_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    done = write_in_another_process(path, "full")
    assert done.returncode == 0, done.stderr
    assert "cannot be written: File too large" in done.stdout
    assert [place.name for place in path.parent.iterdir()] == ["s"]
    assert path.read_bytes() == before


def test_an_error_in_the_middle_leaves_the_old_file(
    model: PreTrainedModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, cache = path.read_bytes(), kvslim.load_cache(path, model)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvslim.files.os.fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device\. Nothing was changed"):
        cache.save(path)
    assert path.read_bytes() == before
    assert [place.name for place in path.parent.iterdir()] == ["s"]


def test_every_refusal_is_an_error_of_kvslim(model: PreTrainedModel, path: Path) -> None:
    with pytest.raises(KvslimError, match="cannot be written"):
        kvslim.load_cache(path, model).save(path.parent)  # a directory
