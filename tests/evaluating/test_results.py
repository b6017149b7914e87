from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from transformers import PreTrainedModel

from kvslim.errors import ConfigError
from kvslim.evaluating.compare import MethodResult, compare
from kvslim.evaluating.continuation import ContinuationConfig
from kvslim.evaluating.methods import parse_methods
from kvslim.evaluating.plots import plot_quality, plot_ranks
from kvslim.evaluating.results import EvalResults, ModelFingerprint
from kvslim.files import check_writable, write_atomically
from kvslim.palu import PaluPlan

CONFIG = ContinuationConfig(tokens=64, score=16)


@pytest.fixture
def results(tiny_llama: PreTrainedModel) -> EvalResults:
    windows = torch.randint(2, 128, (1, CONFIG.window), generator=torch.Generator().manual_seed(0))
    measured = compare(tiny_llama, parse_methods("none,int4,int2,jolt-2x:sinks=0:window=0"), windows, CONFIG)
    fingerprint = ModelFingerprint.of("tiny", tiny_llama)
    return EvalResults(fingerprint, "random tokens", None, CONFIG.to_dict(), tuple(measured))


def test_json_round_trip(results: EvalResults, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results.save(path)
    assert EvalResults.from_json(path.read_text()) == results
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert set(data["environment"]["versions"]) == {"python", "torch", "transformers", "kvslim"}
    assert data["model"]["parameters"] > 0
    assert data["methods"][3]["settings"]["ratio"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]  # nothing temporary is left


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d | {"schema": 99}, "schema 99"),
        (lambda d: {k: v for k, v in d.items() if k != "methods"}, "no results"),
        (lambda d: d | {"surprise": 1}, "no results"),
    ],
)
def test_other_json_is_refused(results: EvalResults, change, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EvalResults.from_json(json.dumps(change(json.loads(results.to_json()))))
    with pytest.raises(ConfigError, match="no results"):
        EvalResults.from_json("{")


def test_fingerprint_tells_models_apart(make_tiny) -> None:
    one, same, other = (ModelFingerprint.of("m", make_tiny(layers=n)) for n in (2, 2, 3))
    assert one == same
    assert one.config_sha256 != other.config_sha256


def test_table_shows_each_method_and_figure(results: EvalResults) -> None:
    console = Console(width=140, record=True)
    console.print(results.table())
    text = console.export_text()
    for one in results.methods:
        (row,) = (line for line in text.splitlines() if line.split()[:1] == [one.method])
        assert f"{one.ratio:.2f}x" in row
        assert f"{one.kl:.5f}" in row
    assert "one-pass" not in text
    extended = dataclasses.replace(results.methods[0], one_pass_perplexity=12.345)
    console.print(dataclasses.replace(results, methods=(extended, *results.methods[1:])).table())
    assert "12.3" in console.export_text()


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(file / "sub", directory=True)
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(file / "results.json")
    with pytest.raises(ConfigError, match="is a directory"):
        check_writable(tmp_path)
    check_writable(tmp_path / "new" / "results.json")
    assert not (tmp_path / "new").exists()


def test_plot(results: EvalResults, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    plot_quality(results.methods, path, "title")
    image = Image.open(path).convert("RGB")
    assert image.width > 600
    colours = {colour for _, colour in image.getcolors(1 << 20) or []}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours  # one colour for each of the two families
    with pytest.raises(ConfigError, match="nothing to plot"):
        plot_quality(results.methods[:1], path, "title")


def test_plot_of_ranks_shows_the_kept_shares(tmp_path: Path) -> None:
    plan = PaluPlan(key_ranks=((8, 8), (16, 16)), value_ranks=((32, 32), (32, 32)), group_size=1, full_rank=32)
    path = tmp_path / "ranks.png"
    plot_ranks({"one": plan, "two": plan}, path, "title")
    image = Image.open(path).convert("RGB")
    counts = {colour: count for count, colour in image.getcolors(1 << 20) or []}
    keys, values = counts[0x00, 0x72, 0xB2], counts[0xD5, 0x5E, 0x00]
    assert 0.3 < keys / values < 0.45  # a quarter and a half of the channels against all of them
    with pytest.raises(ConfigError, match="no ranks to plot"):
        plot_ranks({}, path, "title")


def test_result_fields_are_json(results: EvalResults) -> None:
    for one in results.methods:
        assert isinstance(one, MethodResult)
        json.dumps(dataclasses.asdict(one), allow_nan=False)
