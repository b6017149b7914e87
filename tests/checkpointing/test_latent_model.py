"""Checkpoints of compressed models: a round trip bit for bit, and refusals in words for everything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvslim import palu
from kvslim.errors import CheckpointError, ConfigError, ModelSourceError, UnsupportedModelError
from kvslim.palu import PaluConfig

MakeTiny = Callable[..., PreTrainedModel]
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(0))
CONFIG = PaluConfig(rate=0.4, group_size=1, decomposition="svd")


@pytest.fixture
def saved(make_tiny: MakeTiny, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = palu.compress(make_tiny(), None, CONFIG)
    palu.save(model, tmp_path / "slim")
    return model, tmp_path / "slim"


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_for_bit(make_tiny: MakeTiny, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    make_tiny(family).save_pretrained(
        tmp_path / "plain"
    )  # loading keeps the rotary frequencies in float32, .to() would not
    model = palu.compress(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype), None, CONFIG)
    palu.save(model, tmp_path / "slim")
    again = palu.load(tmp_path / "slim")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(IDS, **options), model.generate(IDS, **options))
    assert again.palu == model.palu
    assert type(again) is type(model)
    assert not any(parameter.is_meta for parameter in [*again.parameters(), *again.buffers()])


def test_tied_weights_are_stored_once(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = make_tiny()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    palu.compress(model, None, CONFIG)
    palu.save(model, tmp_path / "slim")
    again = palu.load(tmp_path / "slim")
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_transformers_alone_refuses_it(saved: tuple[PreTrainedModel, Path]) -> None:
    """Loading as a plain model must be an error, never random key and value projections."""
    with pytest.raises(ValueError, match="kvslim-palu"):
        AutoModelForCausalLM.from_pretrained(saved[1])
    with pytest.raises(UnsupportedModelError, match=r"palu\.save"):
        saved[0].save_pretrained(saved[1].parent / "other")


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_damaged_weights(saved: tuple[PreTrainedModel, Path], damage: str) -> None:
    weights = saved[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
    weights.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
    with pytest.raises(CheckpointError, match="hash differs"):
        palu.load(saved[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "Update kvslim"),
        ({"version": "x"}, "damaged"),
        ({"ranks": [[[5, 5], [5, 5]]] * 2}, "does not describe its own weights"),
        ({"ranks": [[[500, 5], [5, 5]]] * 2}, "do not fit"),
        ({"ranks": []}, "does not describe"),
    ],
)
def test_edited_description(saved: tuple[PreTrainedModel, Path], change: dict[str, object], words: str) -> None:
    about = saved[1] / "kvslim.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), **change}))
    with pytest.raises(CheckpointError, match=words):
        palu.load(saved[1])


def test_unreadable_or_missing(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="no kvslim checkpoint"):
        palu.load(tmp_path)
    (saved[1] / "kvslim.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        palu.load(saved[1])
    (saved[1] / "kvslim.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged"):
        palu.load(saved[1])


def test_a_taken_place_is_refused_and_a_failure_leaves_nothing(
    saved: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny
) -> None:
    with pytest.raises(ConfigError, match="exists already"):
        palu.save(saved[0], saved[1])
    with pytest.raises(UnsupportedModelError, match="not compressed"):
        palu.save(make_tiny(), tmp_path / "plain")

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvslim.checkpointing.latent_model.save_file", full_disk)
    with pytest.raises(ConfigError, match="No space"):
        palu.save(saved[0], tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slim"]
