"""Streamed compression gives, bit for bit, what compression in memory gives, and refuses in words what it cannot do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvslim import palu
from kvslim.calibrating.fisher import calibrate_fisher
from kvslim.errors import (
    CalibrationError,
    ConfigError,
    KvslimError,
    ModelSourceError,
    NonFiniteError,
    UnsupportedModelError,
)
from kvslim.palu import PaluConfig
from kvslim.streaming.compressing import compress_checkpoint

WriteModel = Callable[..., Path]
CONFIG = PaluConfig(rate=0.4, group_size=1, ranks="uniform", decomposition="whitened")
WINDOWS = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(7))


def weights_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def described_in(folder: Path) -> dict[str, Any]:
    """config.json without what depends on how the weights are spread over files."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for name in ("files", "content_sha256", "config_sha256"):
        del config["kvslim"][name]
    return config


def in_memory(source: Path, out: Path, config: PaluConfig, dtype: torch.dtype, windows: Tensor | None = WINDOWS) -> Any:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    palu.save(palu.compress(model, None, config, windows), out)
    return model


def same_as_in_memory(source: Path, config: PaluConfig, dtype: torch.dtype, windows: Tensor | None = WINDOWS) -> None:
    wanted, out = source.parent / "wanted", source.parent / "out"
    model = in_memory(source, wanted, config, dtype, windows)
    report = compress_checkpoint(source, out, config, windows, dtype=dtype)
    ours, theirs = weights_of(out), weights_of(wanted)
    assert set(ours) == set(theirs)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert described_in(out) == described_in(wanted)
    assert (out / "generation_config.json").read_text() == (wanted / "generation_config.json").read_text()
    assert report == model.palu
    for load in (palu.load, AutoModelForCausalLM.from_pretrained):
        again = load(out)
        with torch.no_grad():
            assert torch.equal(again(WINDOWS).logits, load(wanted)(WINDOWS).logits)
        assert again.dtype == dtype
    assert sorted(path.name for path in source.parent.iterdir()) == ["model", "out", "wanted"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family(write_model: WriteModel, kind: str, dtype: torch.dtype) -> None:
    same_as_in_memory(write_model(kind), CONFIG, dtype)


@pytest.mark.parametrize(
    "config",
    [
        PaluConfig(rate=0.5, group_size=1, decomposition="svd", ranks="uniform"),
        PaluConfig(rate=0.3, bits=3, sinks=1, window=2, ranks="uniform", decomposition="whitened"),
        PaluConfig(rate=0.5, fusion="fold", ranks="uniform", decomposition="whitened"),
        PaluConfig(rate=0.0, ranks="uniform", decomposition="whitened"),
    ],
    ids=["svd", "codes", "fold", "full rank"],
)
@pytest.mark.parametrize("family", ["llama-tied", "gpt2-by-layer"])
def test_every_way(write_model: WriteModel, config: PaluConfig, family: str) -> None:
    needed = None if config.decomposition == "svd" else WINDOWS
    same_as_in_memory(write_model(family, max_shard_size="40KB"), config, torch.float32, needed)


def test_sharded_source_without_the_prefix_of_the_base_model(write_model: WriteModel, tmp_path: Path) -> None:
    source = write_model("gpt2-by-layer")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    places = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        short, file = name.removeprefix("transformer."), f"part-{number % 3}.safetensors"
        places[short] = file
        held = load_file(source / file) if (source / file).exists() else {}
        save_file({**held, short: tensor}, source / file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    same_as_in_memory(source, CONFIG, torch.float32)


def test_fisher_ranks_from_statistics_collected_elsewhere(write_model: WriteModel, tmp_path: Path) -> None:
    source, config = write_model(), PaluConfig(rate=0.4, group_size=1, ranks="fisher", decomposition="whitened")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    fisher = calibrate_fisher(model, WINDOWS)
    report = compress_checkpoint(source, tmp_path / "out", config, WINDOWS, fisher=fisher, dtype=torch.float32)
    palu.compress(model, None, config, WINDOWS)
    assert report == model.palu
    assert len(set(report.plan.key_ranks + report.plan.value_ranks)) > 1
    with torch.no_grad():
        assert torch.equal(palu.load(tmp_path / "out")(WINDOWS).logits, model(WINDOWS).logits)


def test_tokenizer_and_progress(write_model: WriteModel, tmp_path: Path) -> None:
    class Words:
        bos_token_id = 1

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [3 + ord(letter) % 100 for letter in text]}

        def save_pretrained(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    seen: list[tuple[str, int, int]] = []
    report = compress_checkpoint(
        write_model(), tmp_path / "out", CONFIG, "some words " * 30, Words(), window_length=20, calibration_windows=3,
        prepend_bos=True, progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert report.calibration_tokens == 60
    assert seen == [("layers", done, 3) for done in (1, 2, 3)]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert palu.load(tmp_path / "out").dtype == torch.float32  # the source's own


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(source: Path, error: type[KvslimError], words: str, config: PaluConfig = CONFIG, **options: Any) -> None:
    """Nothing is left behind either."""
    before = sorted(source.parent.rglob("*"))
    given = {"calibration": WINDOWS, "dtype": torch.float32, **options}
    with pytest.raises(error, match=words):
        compress_checkpoint(source, source.parent / "out", config, **given)
    assert sorted(source.parent.rglob("*")) == before


def test_what_needs_the_whole_model(write_model: WriteModel) -> None:
    source = write_model()
    for ranks in ("fisher", "fisher-rms", "spectral"):
        refused(
            source, ConfigError, f"ranks='{ranks}' need gradients", PaluConfig(ranks=ranks, decomposition="whitened")
        )
    refused(
        source, ConfigError, "'loss-aware' needs gradients", PaluConfig(decomposition="loss-aware", ranks="uniform")
    )
    refused(source, CalibrationError, "needs calibration text", calibration=None)
    refused(source, CalibrationError, r"must be in 0\.\.127", calibration=WINDOWS + 100)
    refused(source, ConfigError, "cannot be used here", device="nonsense")


def test_bad_sources(write_model: WriteModel, tmp_path: Path) -> None:
    source = write_model()
    refused(tmp_path / "model" / "nothing", ModelSourceError, "config.json is missing")
    weights = source / "model.safetensors"
    data, tensors = weights.read_bytes(), load_file(weights)
    weights.write_bytes(data[:-10])
    refused(source, ModelSourceError, "truncated or damaged")
    save_file({name: value for name, value in tensors.items() if "layers.2.mlp.up" not in name}, weights)
    refused(source, ModelSourceError, r"lack model\.layers\.2\.mlp\.up_proj\.weight")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name][:-1].clone()}, weights)
    refused(source, ModelSourceError, f"do not fit: {name} is ")
    save_file({**tensors, name: tensors[name].to(torch.int8)}, weights)
    refused_later(source, UnsupportedModelError, "not plain float weights")
    save_file({**tensors, name: torch.full_like(tensors[name], float("nan"))}, weights)
    refused_later(source, NonFiniteError, f"{name} in .* holds NaN")
    save_file({**tensors, name: tensors[name].half()}, weights)
    refused(source, UnsupportedModelError, "of F16 and F32 float types", dtype=None)
    weights.unlink()
    refused(source, ModelSourceError, r"no safetensors weights\.")
    (source / "pytorch_model.bin").write_bytes(b"x")
    refused(source, ModelSourceError, "only pickled ones")
    for content, words in (("{", "damaged"), ('{"weight_map": {"x": "../x.safetensors"}}', "no file beside it"),
                           ('{"weight_map": {"x": "x.safetensors"}}', "missing, truncated")):  # fmt: skip
        (source / "model.safetensors.index.json").write_text(content)
        refused(source, ModelSourceError, words)


def refused_later(source: Path, error: type[KvslimError], words: str) -> None:
    """What shows in the middle of the work leaves a work folder."""
    with pytest.raises(error, match=words):
        compress_checkpoint(source, source.parent / "out", CONFIG, WINDOWS)
    assert not (source.parent / "out").exists()
    shutil.rmtree(source.parent / "out.partial")


def test_models_that_are_no_candidates(write_model: WriteModel, tmp_path: Path) -> None:
    source = write_model()
    compress_checkpoint(source, tmp_path / "out", CONFIG, WINDOWS)
    with pytest.raises(UnsupportedModelError, match="compressed already"):
        compress_checkpoint(tmp_path / "out", tmp_path / "twice", CONFIG, WINDOWS)
    shutil.rmtree(tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    for change, error, words in (
        ({"model_type": "nobody"}, UnsupportedModelError, "without code"),
        ({"model_type": "t5"}, UnsupportedModelError, "no family"),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, "quantized"),
        ({"tie_word_embeddings": True}, UnsupportedModelError, "stored with other values"),
        ({"num_hidden_layers": 4}, ModelSourceError, r"lack model\.layers\.3"),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        refused(source, error, words)
    (source / "config.json").write_text("[")
    refused(source, ModelSourceError, "damaged")


def test_places(write_model: WriteModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        compress_checkpoint(source, tmp_path / "taken", CONFIG, WINDOWS)
    with pytest.raises(ConfigError, match="holds other things"):
        compress_checkpoint(source, tmp_path / "out", CONFIG, WINDOWS, work_dir=tmp_path / "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    refused(source, ConfigError, r"needs 0\.\d+ GB of disk, and 0\.00 GB are free")


def test_full_disk_in_the_middle_then_room_again(
    write_model: WriteModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            compress_checkpoint(source, tmp_path / "out", CONFIG, WINDOWS, dtype=torch.float32)
    assert not (tmp_path / "out").exists()
    same_as_in_memory(source, CONFIG, torch.float32)
