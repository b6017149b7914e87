"""The script behind the Palu tables: which rows there are, and files that a cut run can go on from."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvslim.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "benchmarks"
ABOUT = {"model": "tiny", "commit": "c", "files": {"a": "1"}, "test_windows": 2, "calibration_windows": 2}
WINDOWS = torch.randint(3, 128, (2, 48), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("palu_rows", "palu_table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("palu_table")


def test_perplexity_is_that_of_the_models_own_loss(script: Any, tiny_llama: PreTrainedModel) -> None:
    with torch.no_grad():
        losses = [tiny_llama(input_ids=window[None], labels=window[None]).loss for window in WINDOWS]
    expected = math.exp(float(torch.stack(losses).mean()))
    assert script.perplexity(tiny_llama, WINDOWS, 1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("table", "kv_heads", "sizes"), [(1, 8, {8, 4, 1}), (1, 3, {3, 1}), (8, 8, {8, 4, 2, 1}),
                                                          (10, 8, {4}), (10, 3, {3})])  # fmt: skip
def test_tables_of_the_paper(script: Any, table: int, kv_heads: int, sizes: set[int]) -> None:
    rows = script.table_rows(table, kv_heads)
    assert {row.group_size for row in rows} == sizes
    assert {row.kept for row in rows} == ({0.5} if table == 8 else {0.7, 0.5, 0.3})
    assert len(set(rows)) == len(rows)
    assert all(row.config.rate == 1 - row.kept for row in rows)


def test_our_best_stands_beside_every_public_figure(script: Any) -> None:
    for kv_heads, windows in ((3, "all"), (3, "every10"), (8, "all")):
        rows = [row for row in importlib.import_module("palu_rows").public_rows(kv_heads, windows) if row.public]
        figures = {(row.group_size, row.kept, row.public) for row in rows if row.decomposition == "whitened"}
        ours = {(row.group_size, row.kept, row.public) for row in rows if row.ranks == "spectral"}
        assert figures == ours


def test_a_cut_run_goes_on(script: Any, tiny_llama: PreTrainedModel, tmp_path: Path, capsys: Any) -> None:
    rows = [script.Row(2, "uniform", 0.5), script.Row(2, "spectral", 0.5, "loss-aware", public=100.0)]
    path = tmp_path / "out" / "file.json"
    script.measure(tiny_llama, rows[:1], WINDOWS, WINDOWS, 1, script.Target(path, dict(ABOUT), resume=False))
    first = json.loads(path.read_text())["rows"]
    script.measure(tiny_llama, rows, WINDOWS, WINDOWS, 1, script.Target(path, dict(ABOUT), resume=True))
    result = json.loads(path.read_text())
    assert result["rows"][0] == first[0]
    assert [row["ranks"] for row in result["rows"]] == ["uniform", "spectral"]
    assert result["uncompressed"] == pytest.approx(script.perplexity(tiny_llama, WINDOWS, 1))
    assert [row["achieved"] for row in result["rows"]] == [0.5, 0.5]
    text = script.markdown(result)
    assert f"| 50% | uniform, whitened | {first[0]['perplexity']:.2f} |" in text
    assert "| 2 | spectral | loss-aware | 16 | 0.500 |" in text
    with pytest.raises(ConfigError, match="another commit"):
        script.Target(path, {**ABOUT, "commit": "d"}, resume=True)
    with pytest.raises(ConfigError, match="no ranks but uniform"):
        script.plot_file(result, tmp_path / "ranks.png")
    result["rows"][1]["public"] = None
    script.plot_file(result, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 5_000
