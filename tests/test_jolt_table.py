"""The script behind the JoLT tables: a method is measured once, files are always whole, tables show what is there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvslim.evaluating.compare import compare
from kvslim.evaluating.continuation import ContinuationConfig
from kvslim.evaluating.methods import parse_methods
from kvslim.evaluating.results import EvalResults
from kvslim.evaluating.windows import evenly_spaced_windows

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "jolt_table.py"
RATIOS_FILE = "jolt-ratios-tiny-320.json"


class Numbers:
    """A tokenizer for texts of numbers."""

    bos_token_id = 1

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel) -> ModuleType:
    """The script as a module, with a tiny model for every name and few ratios."""
    spec = importlib.util.spec_from_file_location("jolt_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "jolt_table", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.models, "load", lambda *_, **__: (tiny_llama, Numbers()))
    monkeypatch.setattr(module, "RATIOS", (2, 4))
    monkeypatch.setattr(module, "ABLATION_RATIOS", (2, 3))
    monkeypatch.setattr(module, "SETTINGS", {"joint": "", "ranks alone": ":bits=0", "greedy": ":greedy"})
    return module


@pytest.fixture
def call(script: ModuleType, tmp_path: Path) -> Any:
    """Run the script on 900 numbers, T = 320 (and a T that exceeds the context), N = 16, one window."""
    ids = torch.randint(2, 128, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(map(str, ids)))

    def run(*more: object) -> None:
        options = ("--model", "some/tiny", "--text", tmp_path / "text.txt", "--tokens", 320, 5000, "--score", 16)
        script.main([str(one) for one in (*options, "--windows", 1, "--out", tmp_path / "out", *more)])

    return run


def stored(tmp_path: Path, name: str = RATIOS_FILE) -> EvalResults:
    return EvalResults.from_json((tmp_path / "out" / name).read_text())


def test_figures_are_those_of_the_protocol(call: Any, tmp_path: Path, tiny_llama: PreTrainedModel) -> None:
    call("--sections", "ratios", "--bos")
    ids = Numbers()((tmp_path / "text.txt").read_text())["input_ids"]
    windows = evenly_spaced_windows(ids, 1, 337, 1)
    names = "none,jolt-2x:paper,jolt-4x:paper,jolt-2x,jolt-4x"
    expected = compare(tiny_llama, parse_methods(names), windows, ContinuationConfig(320, 16))
    for one, found in zip(expected, stored(tmp_path).methods, strict=True):
        assert found.method == one.method
        assert found.kl == pytest.approx(one.kl, rel=1e-6)
        assert (found.nbytes, found.key_share) == (one.nbytes, one.key_share)
        assert (one.key_share is None) == (one.method == "none")


def test_an_interrupted_run_is_taken_up_again(
    script: ModuleType, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, names = script.measure, list[str]()

    def measure(model: Any, method: Any, *rest: Any) -> Any:
        if len(names) == 2:
            raise KeyboardInterrupt
        names.append(method.name)
        return real(model, method, *rest)

    monkeypatch.setattr(script, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        call("--sections", "ratios")
    assert [one.method for one in stored(tmp_path).methods] == names == ["none", "jolt-2x:paper"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [RATIOS_FILE]
    names.insert(0, "")  # so that the count is never met again
    call("--sections", "ratios")
    assert names[3:] == ["jolt-4x:paper", "jolt-2x", "jolt-4x"]
    assert [one.method for one in stored(tmp_path).methods] == names[1:]
    (earlier,) = stored(tmp_path).settings["earlier"]
    assert earlier["methods"] == ["none", "jolt-2x:paper"]
    capsys.readouterr()
    before = (tmp_path / "out" / RATIOS_FILE).read_bytes()
    call("--sections", "ratios")
    assert "0 methods to measure" in capsys.readouterr().out
    assert (tmp_path / "out" / RATIOS_FILE).read_bytes() == before


def test_a_new_row_is_measured_alone_and_put_in_its_place(script: ModuleType, call: Any, tmp_path: Path) -> None:
    file = "jolt-ablation-tiny-320.json"
    call("--sections", "ablation")
    old = {one.method: one for one in stored(tmp_path, file).methods}
    script.SETTINGS = {"joint": "", "uniform": ":uniform", "ranks alone": ":bits=0"}
    call("--sections", "ablation")
    new = stored(tmp_path, file)
    assert [one.method for one in new.methods][:4] == ["none", "jolt-2x", "jolt-2x:uniform", "jolt-2x:bits=0"]
    assert {one.method for one in new.methods} == set(old) | {"jolt-2x:uniform", "jolt-3x:uniform"}
    assert all(one == old[one.method] for one in new.methods if one.method in old)


def test_a_setting_that_came_later_does_not_undo_a_figure(call: Any, tmp_path: Path, script: ModuleType) -> None:
    call("--sections", "ratios")
    path = tmp_path / "out" / RATIOS_FILE
    data = json.loads(path.read_text())
    del data["methods"][3]["settings"]["drift"]
    data["methods"][4]["settings"]["window"] = 7
    path.write_text(json.dumps(data))
    results = stored(tmp_path)
    assert script.is_measured("jolt-2x", results)
    assert not script.is_measured("jolt-4x", results)


def test_tables(call: Any, tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    call("--sections", "ratios", "ablation", "baselines")
    assert "5000 tokens are left out" in capsys.readouterr().out
    script.main(["--print", str(tmp_path / "out"), "--plot", str(tmp_path / "plot.png")])
    shown = capsys.readouterr().out
    by_name = {one.method: one for one in stored(tmp_path).methods}
    for name in ("jolt-2x:paper", "jolt-4x"):
        one = by_name[name]
        assert f"| {name} | {one.ratio:.2f} | {one.perplexity:.2f} | {one.kl:.5f} | {one.agreement:.3f} |" in shown
        assert f"| {one.key_share:.0%} |" in shown
    ablation = {one.method: one for one in stored(tmp_path, "jolt-ablation-tiny-320.json").methods}
    two, three = (ablation[f"jolt-{ratio}x:bits=0"] for ratio in (2, 3))
    errors = f"{three.key_error:.4f} / {three.value_error:.4f}"
    assert f"| ranks alone | {two.kl:.5f} | {three.kl:.5f} | {errors} |" in shown
    assert "| int4 |" in shown
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_routes_are_set_beside_exact_spectra(
    call: Any, tmp_path: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    call("--sections", "routes")
    script.print_tables(tmp_path / "out")
    rows = {one.method: one for one in stored(tmp_path, "jolt-routes-tiny-320.json").methods}
    gap = rows["jolt-3x:paper:randomized"].perplexity - rows["jolt-3x:paper:exact"].perplexity
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "| jolt-3x:paper:randomized |" in one)
    assert f"| {gap:+.4f} |" in line


def test_what_a_budget_refuses_is_kept_and_shown(
    script: ModuleType, call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.SETTINGS = {"joint": "", "only 8 bits": ":bits=8:no-backbone"}
    call("--sections", "ablation")
    refused = stored(tmp_path, "jolt-ablation-tiny-320.json").settings["refused"]
    assert list(refused) == ["jolt-2x:bits=8:no-backbone", "jolt-3x:bits=8:no-backbone"]
    capsys.readouterr()
    script.print_tables(tmp_path / "out")
    shown = capsys.readouterr().out
    assert f"jolt-3x:bits=8:no-backbone was refused: {refused['jolt-3x:bits=8:no-backbone']}" in shown
    assert "only 8 bits |" not in shown


@pytest.mark.parametrize(("change", "words"), [("text", "text_sha256"), ("windows", "windows"), ("model", "model")])
def test_other_figures_do_not_get_into_a_file(call: Any, tmp_path: Path, change: str, words: str) -> None:
    call("--sections", "baselines")
    path = tmp_path / "out" / "jolt-baselines-tiny-320.json"
    if change == "text":
        text = tmp_path / "text.txt"
        text.write_text(text.read_text() + " 5")
    if change == "model":
        path.write_text(path.read_text().replace('"parameters": ', '"parameters": 1'))
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=f"is of another .*{words}"):
        call("--sections", "baselines", *(("--windows", 2) if change == "windows" else ()))
    assert path.read_bytes() == before


def test_the_tables_have_what_they_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("jolt_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ratios = {m.name: m.settings for m in parse_methods(",".join(module.section_methods("ratios")))}
    assert [ratios[f"jolt-{ratio}x"]["ratio"] for ratio in (1, 2, 3, 4, 5, 6, 8)] == [1, 2, 3, 4, 5, 6, 8]
    assert ratios["jolt-3x:paper"]["bits"] == [0, 2, 4, 8]
    assert ratios["jolt-3x"]["bits"] == [0, 2, 3, 4, 5, 6, 8]
    ablated = [m.settings for m in parse_methods(",".join(module.section_methods("ablation"))) if m.name != "none"]
    assert {one["allocation"] for one in ablated} == {"joint", "uniform", "greedy"}
    assert {one["backbone"] for one in ablated} == {True, False}
    assert {one["split"] for one in ablated} == {None, 0.5}
    assert [0] in [one["bits"] for one in ablated]
    assert {(one["layer_group"], one["slab_share"]) for one in ablated} >= {(1, 0.67), (2, 0.67), (2, 0.34)}
    routes = [m.settings for m in parse_methods(",".join(module.section_methods("routes"))) if m.name != "none"]
    assert {one["spectra"] for one in routes} == {"exact", "gram", "randomized"}
