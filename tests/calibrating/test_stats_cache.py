"""Statistics kept in a folder: found again for the same inputs only."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.calibrating import stats_cache
from kvslim.calibrating.grams import GramStats
from kvslim.calibrating.stats_cache import StatsCache, model_hash
from kvslim.calibrating.stats_file import read_about
from kvslim.errors import UnsupportedModelError
from kvslim.palu import PaluConfig

WINDOWS = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(7))
BEST = PaluConfig(rate=0.5, ranks="spectral", decomposition="loss-aware")
PLAIN = {"ranks": "uniform", "decomposition": "whitened"}


class Counting:
    """Counts the calibrations that really run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        for name in ("calibrate_grams", "calibrate_fisher"):
            monkeypatch.setattr(palu, name, self._counted(name, getattr(palu, name)))

    def _counted(self, name: str, run: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(name)
            return run(*args, **kwargs)

        return counted


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def test_a_second_call_reads_what_the_first_kept(
    tiny_llama: PreTrainedModel, counting: Counting, tmp_path: Path
) -> None:
    twin = copy.deepcopy(tiny_llama)
    first = palu.compress(tiny_llama, None, BEST, WINDOWS, stats_cache=tmp_path)
    assert counting.ran == ["calibrate_grams", "calibrate_fisher"]
    again = palu.compress(twin, None, BEST, WINDOWS.int(), stats_cache=tmp_path)
    assert len(counting.ran) == 2
    assert again.palu == first.palu
    assert torch.equal(again(WINDOWS).logits, first(WINDOWS).logits)
    assert len(list(tmp_path.iterdir())) == 2
    assert {read_about(path)["kind"] for path in tmp_path.iterdir()} == {"GramStats", "FisherStats"}


def test_other_inputs_are_other_entries(tiny_llama: PreTrainedModel, counting: Counting, tmp_path: Path) -> None:
    def calibrations(model: PreTrainedModel, windows: torch.Tensor, config: PaluConfig = BEST) -> int:
        counting.ran.clear()
        palu.calibrate(model, config, windows, cache=tmp_path)
        return len(counting.ran)

    assert calibrations(tiny_llama, WINDOWS) == 2
    assert calibrations(tiny_llama, WINDOWS) == 0
    assert calibrations(tiny_llama, WINDOWS, PaluConfig(rate=0.1, **PLAIN)) == 0
    assert (
        calibrations(tiny_llama, WINDOWS, PaluConfig(ranks="fisher", decomposition="whitened")) == 1
    )  # without the output Gram matrices
    assert calibrations(tiny_llama, WINDOWS.flip(0)) == 2
    assert calibrations(tiny_llama, WINDOWS.reshape(8, 20)) == 2
    for change in (change_a_weight, change_the_head, change_the_rotation, change_the_configuration):
        other = copy.deepcopy(tiny_llama)
        change(other)
        assert calibrations(other, WINDOWS) == 2, change.__name__
    assert calibrations(copy.deepcopy(tiny_llama).double(), WINDOWS) == 2
    assert calibrations(tiny_llama.eval(), WINDOWS) == 0


def change_a_weight(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-6


def change_the_head(model: PreTrainedModel) -> None:
    model.lm_head.weight.data[-1, -1] += 1e-6


def change_the_rotation(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq[0] += 1e-6


def change_the_configuration(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-5


def test_where_a_model_came_from_does_not_matter(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    tiny_llama.save_pretrained(tmp_path)
    again = type(tiny_llama).from_pretrained(tmp_path)
    assert again.config.name_or_path != tiny_llama.config.name_or_path
    assert model_hash(again) == model_hash(tiny_llama)


def test_a_damaged_entry_is_made_again(
    tiny_llama: PreTrainedModel, counting: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PaluConfig(rate=0.5, **PLAIN)
    grams, _ = palu.calibrate(tiny_llama, config, WINDOWS, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (whole[:-5], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="kvslim"):
            again, _ = palu.calibrate(tiny_llama, config, WINDOWS, cache=tmp_path)
        assert "are made again" in caplog.text
        assert torch.equal(again.grams[1], grams.grams[1])
        assert path.read_bytes() == whole
    assert len(counting.ran) == 4


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tiny_llama: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with caplog.at_level(logging.WARNING, logger="kvslim"):
        grams, _ = palu.calibrate(tiny_llama, PaluConfig(), WINDOWS, cache=taken / "below")
    assert grams is not None
    assert "were not kept" in caplog.text


def test_what_was_unused_for_longest_goes_first(
    tiny_llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = StatsCache(tmp_path, tiny_llama)
    stats = GramStats((torch.ones(10, 10, dtype=torch.float64),), 1)

    def keep(number: int) -> set[Path]:
        before = set(tmp_path.iterdir())
        cache.get(GramStats, WINDOWS, {"number": number}, lambda: stats)
        return set(tmp_path.iterdir()) - before

    (first,), (second,) = keep(1), keep(2)
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert keep(1) == set()  # used, so it is the newer one now
    monkeypatch.setattr(stats_cache, "BYTES_AT_MOST", 2 * first.stat().st_size + 9)
    (third,) = keep(3)
    assert set(tmp_path.iterdir()) == {first, third}


def test_weights_that_are_not_there(tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="not in memory"):
        StatsCache(tmp_path, tiny_llama.to("meta"))


def test_nothing_is_hashed_or_kept_where_nothing_is_collected(
    tiny_llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_cache, "model_hash", lambda _: pytest.fail("hashed"))
    palu.compress(
        tiny_llama,
        None,
        PaluConfig(**PLAIN, sequential=True),
        WINDOWS,
        stats_cache=tmp_path,
    )
    assert not list(tmp_path.iterdir())
