"""The script behind the JoLT tables: cells are measured once, kept whole, and shown as they are."""

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
from kvslim.evaluating.windows import evenly_spaced_windows

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "jolt_table.py"


class Numbers:
    """A tokenizer for texts of numbers."""

    bos_token_id = 1

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def load_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("jolt_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "jolt_table", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tiny_llama: PreTrainedModel) -> ModuleType:
    """The script as a module, with a tiny model for every name and small groups."""
    module = load_script(monkeypatch)
    monkeypatch.setattr(module.models, "load", lambda *_, **__: (tiny_llama, Numbers()))
    groups = {
        "presets": ["none", "jolt-2x:exact:paper", "jolt-2x:exact"],
        "spectra": ["jolt-2x:exact", "jolt-2x:gram"],
        "ablations": ["jolt-2x:exact", "jolt-2x:exact:rank-only", "jolt-5x:exact:no-backbone"],
        "baselines": ["none", "int4", "rot4"],
    }
    monkeypatch.setattr(module, "GROUPS", groups)
    return module


@pytest.fixture
def call(script: ModuleType, tmp_path: Path) -> Any:
    """Run the script on 900 numbers, T = 320 (and a T that exceeds the context), N = 16, one window."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 128, (900,), generator=generator).tolist()
    (tmp_path / "text.txt").write_text(" ".join(map(str, ids)))

    def run(*more: object) -> None:
        options = ("--model", "some/tiny", "--text", tmp_path / "text.txt", "--tokens", 320, 5000, "--score", 16)
        script.main([str(one) for one in (*options, "--windows", 1, "--out", tmp_path / "out", *more)])

    return run


def stored(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "out" / "jolt_table-tiny-320.json").read_text())


def test_an_interrupted_run_is_taken_up_again(
    script: ModuleType, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, names = script.measure, []

    def measure(model: Any, method: Any, *rest: Any) -> Any:
        if len(names) == 3:
            raise KeyboardInterrupt
        names.append(method.name)
        return real(model, method, *rest)

    monkeypatch.setattr(script, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert [cell["method"] for cell in stored(tmp_path)["cells"].values()] == names
    names.insert(0, "")  # so that the count is never met again
    call()
    assert names[4:] == ["jolt-2x:gram", "jolt-2x:exact:rank-only", "jolt-5x:exact:no-backbone", "int4", "rot4"]
    capsys.readouterr()
    call()
    assert "0 cells to measure" in capsys.readouterr().out
    data = stored(tmp_path)
    assert len(names) - 1 == len(data["cells"]) == 8
    assert len(data["runs"]) == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["jolt_table-tiny-320.json"]


def test_figures_are_those_of_the_protocol(call: Any, tmp_path: Path, tiny_llama: PreTrainedModel) -> None:
    call("--groups", "presets", "--bos")
    ids = Numbers()((tmp_path / "text.txt").read_text())["input_ids"]
    windows = evenly_spaced_windows(ids, 1, 337, 1)
    names = "none,jolt-2x:exact:paper,jolt-2x:exact"
    for one in compare(tiny_llama, parse_methods(names), windows, ContinuationConfig(320, 16)):
        (found,) = (c["result"] for c in stored(tmp_path)["cells"].values() if c["method"] == one.method)
        assert found["kl"] == pytest.approx(one.kl, rel=1e-6)
        assert found["nbytes"] == one.nbytes
        assert found["key_share"] == one.key_share
        assert (one.key_share is None) == (one.method == "none")


def test_tables(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call()
    shown = capsys.readouterr().out
    assert "T = 5000 is left out" in shown
    by_name = {cell["method"]: cell for cell in stored(tmp_path)["cells"].values()}
    paper = by_name["jolt-2x:exact:paper"]["result"]
    assert f"| paper 2× | {paper['ratio']:.2f} | {paper['perplexity']:.3f} | {paper['kl']:.5f} |" in shown
    assert f"{paper['key_share']:.0%}" in shown
    exact, gram = (by_name[f"jolt-2x:{route}"]["result"]["perplexity"] for route in ("exact", "gram"))
    assert f"| {gram:.4f} ({gram - exact:+.4f})," in shown
    assert "| quantization only |  |  |  | " in shown
    assert "| greedy |" not in shown  # not measured, so not shown


def test_what_a_budget_refuses_is_shown_as_refused(
    script: ModuleType, call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.GROUPS["presets"] = ["jolt-3x:exact:paper"]
    script.GROUPS["ablations"] = ["jolt-2x:exact:bits=8:no-backbone", "jolt-3x:exact:bits=8:no-backbone"]
    script.ABLATIONS["only 8 bits"] = ":exact:bits=8:no-backbone"
    call("--groups", "presets", "ablations")
    refused = [cell for cell in stored(tmp_path)["cells"].values() if "refused" in cell]
    assert [cell["method"] for cell in refused][-1] == "jolt-3x:exact:bits=8:no-backbone"
    assert "budget" in refused[0]["refused"]
    assert "refused |" in capsys.readouterr().out


def test_show_and_plot_need_no_model(
    script: ModuleType, call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call()
    made = capsys.readouterr().out.partition("###")[2]
    monkeypatch.setattr(script.models, "load", None)
    file = tmp_path / "out" / "jolt_table-tiny-320.json"
    script.main(["--show", str(file), str(file), "--plot", str(tmp_path / "plot.png")])
    assert capsys.readouterr().out.partition("###")[2].startswith(made.rstrip())
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds no JoLT tables"):
        script.main(["--show", str(tmp_path / "other.json")])


@pytest.mark.parametrize(("change", "words"), [("text", "of another text"), ("windows", "of another protocol")])
def test_other_figures_do_not_get_into_a_file(call: Any, tmp_path: Path, change: str, words: str) -> None:
    call("--groups", "baselines")
    if change == "text":
        text = tmp_path / "text.txt"
        text.write_text(text.read_text() + " 5")
    with pytest.raises(SystemExit, match=words):
        call("--groups", "baselines", *(("--windows", 2) if change == "windows" else ()))


def test_minutes_stop_between_cells(call: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("--minutes", 1e-9)
    assert "stopped by --minutes, 8 cells are left" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_groups_hold_what_the_tables_show(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_script(monkeypatch)
    methods = {name: parse_methods(name)[0] for group in module.GROUPS.values() for name in group}
    assert len(methods) == 1 + 2 * 7 + 2 * 4 + 10 * 4 + 9
    settings = [methods[f"jolt-{ratio}x:exact"].settings for ratio in (1, 2, 3, 4, 5, 6, 8)]
    assert [one["ratio"] for one in settings] == [1, 2, 3, 4, 5, 6, 8]
    assert all(one["bits"] == [0, 2, 3, 4, 5, 6, 8] for one in settings)
    assert methods["jolt-3x:exact:paper"].settings["bits"] == [0, 2, 4, 8]
