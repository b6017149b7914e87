"""Checkpoints of compressed models: a round trip bit for bit, and refusals in words for everything else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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
        ({"ranks": []}, "2 layers, its ranks are for 0"),
        ({"ranks": [[[5, 5], [5, 5]]] * 3}, "2 layers, its ranks are for 3"),
        ({"ranks": [float("inf")]}, "its ranks are no"),
        ({"ranks": [[[float("inf"), 5], [5, 5]]] * 2}, "its ranks are no"),
        ({"ranks": [[[5, 5]]] * 2}, "its ranks are no"),
        ({"ranks": [[5, 5]] * 2}, "its ranks are no"),
        ({"ranks": None}, "its ranks are no"),
        ({"version": float("inf")}, "damaged"),
        ({"version": -1}, "damaged"),
        ({"version": 1.5}, "damaged"),
        ({"version": True}, "damaged"),
        ({"format": "other"}, "is of format 'other'"),
        ({"about": {}}, "does not say what was done"),
        ({"about": None}, "does not say what was done"),
        ({"base_config": None}, "lacks the counts"),
    ],
)
def test_edited_description(saved: tuple[PreTrainedModel, Path], change: dict[str, object], words: str) -> None:
    about = saved[1] / "kvslim.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), **change}))
    with pytest.raises(CheckpointError, match=words):
        palu.load(saved[1])


def edit_config(directory: Path, change: dict[str, object]) -> None:
    about = directory / "kvslim.json"
    description = json.loads(about.read_text())
    description["base_config"].update(change)
    about.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"vocab_size": "a"},
        {"vocab_size": 7},
        {"num_key_value_heads": "a"},
        {"head_dim": -1},
        {"dtype": "no-such-type"},
        {"hidden_act": "no-such-function"},
        {"model_type": "qwen2"},
        {"model_type": ["llama"]},
        {"rope_parameters": 5},
    ],
)
def test_edited_configuration(saved: tuple[PreTrainedModel, Path], change: dict[str, object]) -> None:
    edit_config(saved[1], change)
    with pytest.raises(CheckpointError):
        palu.load(saved[1])


@pytest.mark.parametrize("layers", [1, 3, 10**9])
def test_another_number_of_layers_is_refused_before_anything_is_built(
    saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("something was built")

    for name in ("AutoConfig", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"kvslim.checkpointing.latent_model.{name}", build)
    edit_config(saved[1], {"num_hidden_layers": layers})
    with pytest.raises(CheckpointError, match=f"{layers} layers, its ranks are for 2"):
        palu.load(saved[1])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_moving_frequencies_are_refused(saved: tuple[PreTrainedModel, Path], kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    edit_config(saved[1], {"rope_parameters": {**rope, **factors}})
    with pytest.raises(CheckpointError, match="changes its frequencies"):
        palu.load(saved[1])


HOW_IT_IS_RUN = {
    "attn_implementation": "someone/kernel",
    "_attn_implementation": "someone/kernel",
    "_attn_implementation_internal": "someone/kernel",
    "experts_implementation": "someone/kernel",
    "_name_or_path": "someone/model",
    "_anything": 1,
    "auto_map": {"AutoModelForCausalLM": "code.py--Model"},
}


def test_how_the_model_is_run_is_not_read(saved: tuple[PreTrainedModel, Path]) -> None:
    edit_config(saved[1], HOW_IT_IS_RUN)
    again = palu.load(saved[1])
    assert again.config._attn_implementation == "sdpa"
    assert again.config._name_or_path == ""
    assert not hasattr(again.config, "_anything")
    assert not hasattr(again.config, "auto_map")


def test_how_the_model_is_run_is_not_written(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = palu.compress(make_tiny(), None, CONFIG)
    model.config._name_or_path = "/home/someone/model"
    model.config.attn_implementation_note = "x"
    model.config.auto_map = {"AutoModelForCausalLM": "code.py--Model"}
    palu.save(model, tmp_path / "slim")
    stored = json.loads((tmp_path / "slim" / "kvslim.json").read_text())["base_config"]
    assert not [name for name in stored if name.startswith(("_", "attn_implementation", "auto_map"))]


@pytest.mark.parametrize("content", ["{", "[]", '{"max_new_tokens": "a"}'])
def test_damaged_generation_config(saved: tuple[PreTrainedModel, Path], content: str) -> None:
    (saved[1] / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json is damaged"):
        palu.load(saved[1])


def test_weights_of_several_dtypes(saved: tuple[PreTrainedModel, Path], make_tiny: MakeTiny, tmp_path: Path) -> None:
    weights = saved[1] / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, weights, metadata={"format": "pt"})
    about = saved[1] / "kvslim.json"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    about.write_text(json.dumps({**json.loads(about.read_text()), "weights_sha256": digest}))
    with pytest.raises(CheckpointError, match=r"several dtypes: torch\.float16, torch\.float32"):
        palu.load(saved[1])

    model = palu.compress(make_tiny(), None, CONFIG)
    model.model.norm.half()
    with pytest.raises(UnsupportedModelError, match="several dtypes"):
        palu.save(model, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


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


@pytest.mark.parametrize("about", [{"config": {}}, {"config": {"rate": 2}, "plan": {}}, {"x": 1}])
def test_about_of_another_maker(saved: tuple[PreTrainedModel, Path], about: dict[str, object]) -> None:
    path = saved[1] / "kvslim.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "about": about}))
    with pytest.raises(CheckpointError, match="what was done"):
        palu.load(saved[1])
