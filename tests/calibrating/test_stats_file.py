"""Calibration statistics in a file: the same numbers back, and anything else refused in words."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from kvslim.calibrating import stats_file
from kvslim.calibrating.fisher import FisherStats
from kvslim.calibrating.grams import GramStats
from kvslim.calibrating.stats_file import read_about
from kvslim.errors import CheckpointError, ConfigError, ModelSourceError

GRAMS = GramStats(tuple(torch.randn(2, 5, 5, dtype=torch.float64)), 77)
TABLE = torch.rand(3, 2, 4, dtype=torch.float64)
FISHER = FisherStats(TABLE, TABLE + 1, 9, TABLE + 2, tuple(torch.randn(3, 2, 4, 4, dtype=torch.float64)), 640)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.parametrize("stats", [GRAMS, FISHER, replace(FISHER, output_grams=None), GramStats((), 0)])
def test_the_same_numbers_come_back(stats: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "stats.safetensors"
    stats.save(path, {"text": "wiki"})
    again = type(stats).load(path)
    for field in fields(stats):
        assert same(getattr(stats, field.name), getattr(again, field.name)), field.name
    assert read_about(path) == {"text": "wiki"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def rewritten(path: Path, change: Any) -> None:
    """Change the header of a file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def described(**changes: Any) -> Any:
    def change(header: dict[str, Any]) -> None:
        description = json.loads(header["__metadata__"]["description"])
        header["__metadata__"]["description"] = json.dumps({**description, **changes})

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["__metadata__"].update(version="2"), "format version 2; this kvslim reads up to 1"),
        (lambda header: header["__metadata__"].update(version="one"), "is damaged"),
        (lambda header: header["__metadata__"].update(format="pt"), "no calibration statistics"),
        (lambda header: header.pop("__metadata__"), "no calibration statistics"),
        (lambda header: header["__metadata__"].update(description="{"), "is damaged"),
        (lambda header: header["__metadata__"].pop("description"), "is damaged"),
        (described(fields={"tokens": 78, "grams": {"tensors": 2}}), "not those that were written"),
        (described(fields={"tokens": 77}), "is damaged"),
        (described(fields=[]), "is damaged"),
        (described(sha256="0" * 64), "not those that were written"),
        (described(kind="FisherStats"), "holds FisherStats, not GramStats"),
        (lambda header: header["grams.0"].update(shape=[5, 10**9]), "is damaged"),
        (lambda header: header["grams.0"].update(dtype="I64"), "is damaged"),
        (lambda header: header["grams.1"].update(data_offsets=[0, 200]), "is damaged"),
    ],
)
def test_edited_headers_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    GRAMS.save(path)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=message):
        GramStats.load(path)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"tokens": -1, "grams": {"tensors": 2}}, "not a count"),
        ({"tokens": True, "grams": {"tensors": 2}}, "not a count"),
        ({"tokens": 77, "grams": {"tensors": 10**12}}, "cannot be"),
        ({"tokens": 77, "grams": {"tensors": 1}}, "nobody asked for"),
        ({"tokens": 77, "grams": {}}, "is damaged"),
        ({"grams": {"tensors": 2}}, "is damaged"),
    ],
)
def test_what_no_writer_makes(
    plain: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stats.safetensors"
    monkeypatch.setattr(stats_file, "_hash", lambda tensors, fields: "any")  # a forger makes it fit
    GRAMS.save(path)
    rewritten(path, described(fields=plain))
    with pytest.raises(CheckpointError, match=message):
        GramStats.load(path)


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    with pytest.raises(ModelSourceError, match="cannot be read"):
        GramStats.load(path)
    with pytest.raises(ModelSourceError, match="cannot be read"):
        GramStats.load(tmp_path)
    save_file({"grams.0": torch.ones(2, 2)}, path)
    with pytest.raises(CheckpointError, match="no calibration statistics"):
        GramStats.load(path)
    FISHER.save(path)
    with pytest.raises(CheckpointError, match="holds FisherStats"):
        GramStats.load(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        GRAMS.save(path / "below.safetensors")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_damage_is_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "stats.safetensors"
    GRAMS.save(path)
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:place]
    else:
        damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    path.write_bytes(damaged)
    try:
        again = GramStats.load(path)
    except CheckpointError:
        return
    # What is left are bytes that say nothing: an unknown word of the header.
    assert same(again.grams, GRAMS.grams)
    assert again.tokens == GRAMS.tokens


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    GramStats((torch.full((2, 2), float("nan"), dtype=torch.float64),), 5).save(path)
    with pytest.raises(CheckpointError, match="not of finite"):
        GramStats.load(path)
