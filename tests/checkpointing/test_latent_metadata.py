"""What a checkpoint says of itself: provenance, quality, model card."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvslim
from kvslim import palu
from kvslim.calibrating.windows import windows_hash
from kvslim.errors import ConfigError
from kvslim.palu import PaluConfig

MakeTiny = Callable[..., PreTrainedModel]
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(0))


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def test_provenance_and_quality_are_kept(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = make_tiny()
    model.config._name_or_path = "someone/base-model"
    palu.compress(model, None, PaluConfig(rate=0.4, ranks="fisher"), IDS)
    quality = {"perplexity": 12.5, "text": "a | b"}
    palu.save(model, tmp_path / "slim", quality=quality)
    about = config_of(tmp_path / "slim")["kvslim"]
    assert about["base_model"] == "someone/base-model"
    assert about["quality"] == quality
    assert about["kvslim_version"] == kvslim.__version__
    assert about["report"]["calibration_sha256"] == windows_hash(IDS)
    assert about["report"]["calibration_tokens"] == IDS.numel()
    again = palu.load(tmp_path / "slim")
    palu.save(again, tmp_path / "same")
    assert config_of(tmp_path / "same")["kvslim"]["quality"] == quality
    assert config_of(tmp_path / "same")["kvslim"]["base_model"] == "someone/base-model"
    with torch.no_grad():
        again.lm_head.weight.mul_(2)
    palu.save(again, tmp_path / "changed")
    assert config_of(tmp_path / "changed")["kvslim"]["quality"] is None  # it was not measured on these weights


def test_the_model_card_states_what_the_cache_holds(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = make_tiny()
    model.config._name_or_path = "someone/base-model"
    palu.compress(model, None, PaluConfig(rate=0.4, group_size=1), IDS)
    palu.save(model, tmp_path / "slim", quality={"perplexity": 12.5})
    card = (tmp_path / "slim" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kvslim\n")
    assert "base_model: someone/base-model" in card
    channels, dense = model.palu.plan.channels, 2 * 2 * 2 * 16 * 2
    assert f"| cache, bytes per token (16-bit) | {2 * channels + 4} | {dense} |" in card  # and a position of 4 bytes
    assert f"| {model.palu.parameters:,} | {model.palu.dense_parameters:,} |" in card
    keys, values = (" ".join(map(str, ranks[1])) for ranks in (model.palu.plan.key_ranks, model.palu.plan.value_ranks))
    assert f"| 1 | {keys} | {values} | {' | '.join(model.palu.forms[1])} |" in card
    assert "| perplexity | 12.5 |" in card
    assert windows_hash(IDS) in card


@pytest.mark.parametrize("quality", [3.5, {"perplexity": torch.ones(1)}, {1: 2}, {"perplexity": float("nan")}])
def test_a_quality_that_json_cannot_hold(make_tiny: MakeTiny, tmp_path: Path, quality: Any) -> None:
    model = palu.compress(make_tiny(), None, PaluConfig(decomposition="svd"))
    with pytest.raises(ConfigError, match="names and JSON values"):
        palu.save(model, tmp_path / "slim", quality=quality)
    assert not (tmp_path / "slim").exists()


def test_the_hash_of_windows_is_of_their_shape_and_ids() -> None:
    assert windows_hash(IDS) == windows_hash(IDS.int()) == windows_hash(IDS.clone())
    assert len({windows_hash(part) for part in (IDS, IDS.view(3, 14), IDS + 1, IDS[:1])}) == 4


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_others_may_read_it(make_tiny: MakeTiny, tmp_path: Path) -> None:
    palu.save(palu.compress(make_tiny(), None, PaluConfig(decomposition="svd")), tmp_path / "slim")
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in [tmp_path / "slim", *(tmp_path / "slim").iterdir()])
