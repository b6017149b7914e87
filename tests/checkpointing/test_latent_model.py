"""Checkpoints of compressed models: a round trip bit for bit, and refusals in words for everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, LlamaForCausalLM, PreTrainedModel

import kvslim
from kvslim import palu
from kvslim.checkpointing.latent_metadata import hash_of_config
from kvslim.errors import CheckpointError, ConfigError, ModelSourceError, UnsupportedModelError
from kvslim.files import sha256
from kvslim.palu import PaluConfig

MakeTiny = Callable[..., PreTrainedModel]
IDS = torch.randint(3, 128, (2, 21), generator=torch.Generator().manual_seed(0))
CONFIG = PaluConfig(rate=0.4, group_size=1, decomposition="svd")


@pytest.fixture
def saved(make_tiny: MakeTiny, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    model = palu.compress(make_tiny(), None, CONFIG)
    model.save_pretrained(tmp_path / "slim")
    return model, tmp_path / "slim"


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def write_config(directory: Path, config: dict[str, Any], *, forge: bool) -> None:
    """Write an edited configuration; ``forge`` makes its hash fit."""
    if forge:
        config["kvslim"]["config_sha256"] = hash_of_config(config)
    (directory / "config.json").write_text(json.dumps(config))


def forge_weights(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the weights, and their size and hashes in the configuration."""
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    config = config_of(directory)
    config["kvslim"]["files"] = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}}
    write_config(directory, config, forge=True)


def refused_everywhere(directory: Path, words: str) -> None:
    """Both ways to load say the same."""
    for load in (palu.load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(CheckpointError, match=words):
            load(directory)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_for_bit(make_tiny: MakeTiny, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    # loading keeps the rotary frequencies in float32, .to() would not
    make_tiny(family).save_pretrained(tmp_path / "plain")
    model = palu.compress(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype), None, CONFIG)
    palu.save(model, tmp_path / "slim")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for load in (palu.load, AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        again = load(tmp_path / "slim")
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert torch.equal(again.generate(IDS, **options), model.generate(IDS, **options))
        assert again.palu == model.palu
        assert again.dtype == dtype
        assert not again.training
        assert type(again) is type(model)
        assert not any(parameter.is_meta for parameter in [*again.parameters(), *again.buffers()])


def test_what_is_loaded_can_be_saved_again_and_is_the_same(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    again = palu.load(saved[1])
    palu.save(again, tmp_path / "twice")
    first, second = (config_of(place)["kvslim"] for place in (saved[1], tmp_path / "twice"))
    assert first["content_sha256"] == second["content_sha256"]
    assert torch.equal(palu.load(tmp_path / "twice")(IDS).logits, saved[0](IDS).logits)


def test_several_weight_files(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    place = tmp_path / "shards"
    saved[0].save_pretrained(place, max_shard_size=40_000)
    files = config_of(place)["kvslim"]["files"]
    assert len(files) > 3
    assert "model.safetensors.index.json" in files
    assert torch.equal(palu.load(place)(IDS).logits, saved[0](IDS).logits)
    (place / "model.safetensors").write_bytes((saved[1] / "model.safetensors").read_bytes())
    refused_everywhere(place, "does not list the weight files")  # transformers would read this one instead
    (place / "model.safetensors").unlink()
    next(name for name in place.glob("model-00002*")).unlink()
    refused_everywhere(place, "missing or truncated")


def test_tied_weights_are_stored_once(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = make_tiny()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    palu.compress(model, None, CONFIG)
    palu.save(model, tmp_path / "slim")
    assert "lm_head.weight" not in load_file(tmp_path / "slim" / "model.safetensors")
    again = palu.load(tmp_path / "slim")
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_options_of_from_pretrained(saved: tuple[PreTrainedModel, Path]) -> None:
    again, info = AutoModelForCausalLM.from_pretrained(
        saved[1], dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    assert again.dtype == torch.bfloat16
    assert again.config._attn_implementation == "eager"
    assert not info["missing_keys"]
    for option, value in (("ignore_mismatched_sizes", True), ("use_kernels", True), ("state_dict", {"x": IDS})):
        with pytest.raises(ConfigError, match=option):
            AutoModelForCausalLM.from_pretrained(saved[1], **{option: value})
    with pytest.raises(UnsupportedModelError, match="would be random"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved[1]))


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damaged_weights(saved: tuple[PreTrainedModel, Path], damage: str) -> None:
    weights = saved[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data[: len(data) // 2] if damage == "truncate" else data)
    if damage == "delete":
        weights.unlink()
    refused_everywhere(saved[1], "hash differs" if damage == "flip" else "missing or truncated")
    if damage == "flip":
        AutoModelForCausalLM.from_pretrained(saved[1], check_hash=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 99}, "Update kvslim"),
        ({"version": 1}, "Compress the model again"),
        ({"version": "x"}, "damaged"),
        ({"version": float("inf")}, "damaged"),
        ({"version": -1}, "damaged"),
        ({"version": 1.5}, "damaged"),
        ({"version": True}, "damaged"),
        ({"format": "other"}, "format version"),
        ({"ranks": [[[5, 5], [5, 5]]] * 2}, "its ranks are not those of its report"),
        ({"ranks": [[[500, 5], [5, 5]]] * 2}, "do not fit 2 heads"),
        ({"ranks": [[[9, 9, 9], [9, 9]]] * 2}, "do not fit 2 heads"),
        ({"ranks": []}, "lacks ranks"),
        ({"ranks": [[[5, 5], [5, 5]]]}, "forms are none of each layer"),
        ({"ranks": [[[5, 5], [5, 5]]], "forms": [["rebuild", "fold"]]}, "2 layers, its ranks are for 1"),
        ({"ranks": [float("inf")]}, "its ranks are no"),
        ({"ranks": [[[float("inf"), 5], [5, 5]]] * 2}, "its ranks are no"),
        ({"ranks": [[[5, 5]]] * 2}, "its ranks are no"),
        ({"ranks": [[5, 5]] * 2}, "its ranks are no"),
        ({"ranks": None}, "lacks ranks"),
        ({"forms": [["rebuild", "rebuild"]] * 2}, "do not fit|lack"),
        ({"forms": [["rebuild", "magic"]] * 2}, "Forms are rebuild, apply, fold"),
        ({"report": {}}, "lacks report"),
        ({"report": {"config": {"rate": 2}, "plan": {}}}, "what was done"),
        ({"report": {"x": 1}}, "what was done"),
        ({"files": {"../model.safetensors": {"bytes": 1, "sha256": ""}}}, "plain files"),
        ({"files": {"kvslim_palu.py": {"bytes": 1, "sha256": ""}}}, "plain files"),
        ({"files": {"other.safetensors": {"bytes": 1, "sha256": ""}}}, "missing or truncated"),
    ],
)
def test_forged_description(saved: tuple[PreTrainedModel, Path], change: dict[str, Any], words: str) -> None:
    config = config_of(saved[1])
    config["kvslim"].update(change)
    write_config(saved[1], config, forge=True)
    refused_everywhere(saved[1], words)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"vocab_size": "a"},
        {"vocab_size": 7},
        {"num_key_value_heads": "a"},
        {"head_dim": -1},
        {"hidden_act": "no-such-function"},
        {"rope_parameters": 5},
    ],
)
def test_forged_configuration(saved: tuple[PreTrainedModel, Path], change: dict[str, Any]) -> None:
    config = config_of(saved[1])
    config.update(change)
    write_config(saved[1], config, forge=True)
    refused_everywhere(saved[1], ".")


@pytest.mark.parametrize("name", ["hidden_size", "head_dim", "intermediate_size", "vocab_size"])
def test_forged_sizes_are_refused_before_memory_is_taken(saved: tuple[PreTrainedModel, Path], name: str) -> None:
    """No machine has the memory, so the error would be another one."""
    write_config(saved[1], {**config_of(saved[1]), name: 10**12}, forge=True)
    refused_everywhere(saved[1], r"config\.json and the weights do not fit: model\.\S+ is ")


@pytest.mark.parametrize("codes", [{"bits": 5}, {"bits": "4"}, {"bits": 4, "sinks": -1}, {"bits": 16, "window": 3}])
def test_a_forged_description_of_codes(saved: tuple[PreTrainedModel, Path], codes: dict[str, Any]) -> None:
    config = config_of(saved[1])
    config["kvslim"]["report"]["config"] |= codes
    write_config(saved[1], config, forge=True)
    with pytest.raises(CheckpointError):
        palu.load(saved[1])


def test_a_forged_rotation_larger_than_all_weights(tmp_path: Path) -> None:
    """Frequencies are no weights, so no stored shape speaks against them."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(GPTNeoXConfig(vocab_size=64, **sizes))
    palu.save(palu.compress(model, None, CONFIG), tmp_path / "slim")
    config = config_of(tmp_path / "slim")
    config["rope_parameters"]["partial_rotary_factor"] = 1e9
    write_config(tmp_path / "slim", config, forge=True)
    refused_everywhere(tmp_path / "slim", "larger than any weight")


def test_an_edited_configuration_is_noticed_by_its_hash(saved: tuple[PreTrainedModel, Path]) -> None:
    config = config_of(saved[1])
    config["rms_norm_eps"] = 0.5
    write_config(saved[1], config, forge=False)
    refused_everywhere(saved[1], "was edited")


@pytest.mark.parametrize("layers", [1, 3, 10**9])
def test_another_number_of_layers_is_refused_before_anything_is_built(
    saved: tuple[PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    def build(*_: object, **__: object) -> None:
        raise AssertionError("something was built")

    config = config_of(saved[1])
    config["num_hidden_layers"] = layers
    write_config(saved[1], config, forge=True)
    monkeypatch.setattr("transformers.LlamaConfig.__post_init__", build)
    refused_everywhere(saved[1], f"{layers} layers, its ranks are for 2")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_moving_frequencies_are_refused(saved: tuple[PreTrainedModel, Path], kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 2048}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    config = config_of(saved[1])
    config["rope_parameters"] = {**rope, **factors}
    write_config(saved[1], config, forge=True)
    refused_everywhere(saved[1], "changes its frequencies")


def test_another_family(saved: tuple[PreTrainedModel, Path]) -> None:
    config = config_of(saved[1])
    config["model_type"] = "kvslim_palu_qwen2"  # its projections have a bias
    write_config(saved[1], config, forge=True)
    refused_everywhere(saved[1], "weights lack")
    for kind in ("kvslim_palu_nobody", ["llama"]):
        write_config(saved[1], {**config, "model_type": kind}, forge=True)
        with pytest.raises((CheckpointError, ModelSourceError)):
            palu.load(saved[1])


HOW_IT_IS_RUN: dict[str, Any] = {
    "attn_implementation": "someone/kernel",
    "_attn_implementation": "someone/kernel",
    "_attn_implementation_internal": "someone/kernel",
    "experts_implementation": "someone/kernel",
    "_name_or_path": "someone/model",
    "_anything": 1,
    "auto_map": {"AutoModelForCausalLM": "code--code.Model", "AutoConfig": "code--code.Config"},
    "transformers_weights": "other.safetensors",
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


def test_how_the_model_is_run_is_not_read(saved: tuple[PreTrainedModel, Path]) -> None:
    write_config(saved[1], {**config_of(saved[1]), **HOW_IT_IS_RUN}, forge=True)
    again = AutoModelForCausalLM.from_pretrained(saved[1])
    assert again.config._attn_implementation == "sdpa"
    assert not [name for name in HOW_IT_IS_RUN if name[0] != "_" and hasattr(again.config, name)]
    assert not hasattr(again.config, "_anything")


def test_how_the_model_is_run_and_where_it_lay_is_not_written(make_tiny: MakeTiny, tmp_path: Path) -> None:
    model = palu.compress(make_tiny(), None, CONFIG)
    model.config._name_or_path = "/home/someone/model"
    model.config.attn_implementation_note = "x"
    palu.save(model, tmp_path / "slim")
    stored = config_of(tmp_path / "slim")
    assert not [name for name in stored if name.startswith(("_", "attn_implementation"))]
    assert stored["kvslim"]["base_model"] is None
    assert not [path for path in (tmp_path / "slim").iterdir() if b"someone" in path.read_bytes()]


@pytest.mark.parametrize("content", ["{", "[]", '{"max_new_tokens": "a"}'])
def test_damaged_generation_config(saved: tuple[PreTrainedModel, Path], content: str) -> None:
    (saved[1] / "generation_config.json").write_text(content)
    refused_everywhere(saved[1], r"generation_config\.json is damaged")


def test_weights_of_several_dtypes(saved: tuple[PreTrainedModel, Path], make_tiny: MakeTiny, tmp_path: Path) -> None:
    tensors = load_file(saved[1] / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    forge_weights(saved[1], tensors)
    refused_everywhere(saved[1], "several dtypes: F16, F32")

    model = palu.compress(make_tiny(), None, CONFIG)
    model.model.norm.half()
    with pytest.raises(UnsupportedModelError, match="several dtypes"):
        palu.save(model, tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


@pytest.mark.parametrize("change", ["lack", "extra", "shape"])
def test_forged_weights(saved: tuple[PreTrainedModel, Path], change: str) -> None:
    tensors = load_file(saved[1] / "model.safetensors")
    name = "model.layers.1.self_attn.k_latent.down.weight"
    kept = tensors.pop(name)
    if change == "extra":
        tensors |= {name: kept, "extra.weight": IDS.float()}
    if change == "shape":
        tensors[name] = kept[:-1].clone()
    forge_weights(saved[1], tensors)
    refused_everywhere(saved[1], "do not fit" if change == "shape" else change)


def test_unreadable_or_missing(saved: tuple[PreTrainedModel, Path], make_tiny: MakeTiny, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="no kvslim checkpoint"):
        palu.load(tmp_path)
    make_tiny().save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelSourceError, match="model type is 'llama'"):
        palu.load(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="no kvslim-palu format version"):
        type(saved[0]).from_pretrained(tmp_path / "plain")
    for content in ("{", "[]", "[" * 100_000):
        (saved[1] / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match="damaged"):
            palu.load(saved[1])
    (saved[1] / "kvslim.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"old format version 1\. Compress the model again"):
        palu.load(saved[1])


def test_a_taken_place_is_refused_and_a_failure_leaves_nothing(
    saved: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_tiny: MakeTiny
) -> None:
    for save in (lambda: palu.save(*saved), lambda: saved[0].save_pretrained(saved[1])):
        with pytest.raises(ConfigError, match="exists already"):
            save()
    with pytest.raises(UnsupportedModelError, match="not compressed"):
        palu.save(make_tiny(), tmp_path / "plain")
    with pytest.raises(ConfigError, match="no option variant"):
        saved[0].save_pretrained(tmp_path / "other", variant="fp16")
    saved[0].save_pretrained(tmp_path / "other", is_main_process=False)

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("latent_model.save_file", "latent_metadata.model_card"):
        monkeypatch.setattr(f"kvslim.checkpointing.{step}", full_disk)
        with pytest.raises(ConfigError, match="No space"):
            palu.save(saved[0], tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slim"]


def test_only_the_familys_causal_model_is_saved(make_tiny: MakeTiny, tmp_path: Path) -> None:
    class Mine(LlamaForCausalLM):
        pass

    model = make_tiny()
    model.__class__ = Mine
    palu.compress(model, None, CONFIG)
    with pytest.raises(UnsupportedModelError, match="PaluMine cannot be saved, only a PaluLlamaForCausalLM"):
        model.save_pretrained(tmp_path / "mine")


def test_a_loaded_model_is_compressed_for_good(saved: tuple[PreTrainedModel, Path]) -> None:
    again = palu.load(saved[1])
    with pytest.raises(UnsupportedModelError, match="compressed already"):
        kvslim.compress(again, None, CONFIG)
    with pytest.raises(UnsupportedModelError):
        palu.snapshot(again)
    assert palu.new_cache(again).layout == saved[0].palu_layout


def test_from_the_cache_of_the_hub(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    home, commit = tmp_path / "hub" / "models--someone--slim", "0123456789" * 4
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    shutil.copytree(saved[1], home / "snapshots" / commit)
    options = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    again = AutoModelForCausalLM.from_pretrained("someone/slim", **options)
    assert torch.equal(again(IDS).logits, saved[0](IDS).logits)
    weights = home / "snapshots" / commit / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="hash differs"):
        AutoModelForCausalLM.from_pretrained("someone/slim", **options)
