from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from kvslim import models
from kvslim.errors import ConfigError, ModelSourceError, UnsupportedModelError

# --- names ------------------------------------------------------------------------------------------------------------


def test_default_resolves_to_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvslim.models.loading.default", lambda progress: Path("/there"))
    assert models.resolve("default") == "/there"


def test_directory_resolves_to_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path)) == str(tmp_path)


def test_directory_without_config_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"config\.json is missing"):
        models.resolve(str(tmp_path))


def test_file_asks_for_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelSourceError, match="Give the directory"):
        models.resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["gpt2", "org/model", "Org-1/model_2.0"])
def test_hub_ids_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)  # where no directory has such a name
    assert models.resolve(name) == name


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "./missing", "/missing/model", "a/b/c", "../missing", "a--b", "x.git"]
)
def test_other_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError, match="neither an existing directory nor a possible hub id"):
        models.resolve(name)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, make_tiny: Callable[..., Any]) -> Path:
    make_tiny().save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(128)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(tmp_path)
    return tmp_path


def test_load_returns_model_and_tokenizer(saved: Path) -> None:
    model, tokenizer = models.load(str(saved), dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert model.config._attn_implementation == "eager"
    assert len(tokenizer) == 128


def test_load_refuses_incomplete_weights(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelSourceError, match=r"lack 1 tensors.*layers\.1\.self_attn\.k_proj"):
        models.load(str(saved))


def test_load_refuses_pickled_weights(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    torch.save(tensors, saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ModelSourceError, match="no safetensors weights"):
        models.load(str(saved))


def test_load_refuses_truncated_weights(saved: Path) -> None:
    content = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelSourceError, match="damaged"):
        models.load(str(saved))


def test_load_refuses_missing_tokenizer(saved: Path) -> None:
    (saved / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match="tokenizer"):
        models.load(str(saved))


@pytest.mark.parametrize("changes", [{"model_type": "unheard-of"}, {"model_type": None}, {"model_type": "vit"}])
def test_load_refuses_unknown_kinds(saved: Path, changes: dict[str, Any]) -> None:
    config = json.loads((saved / "config.json").read_text()) | changes
    (saved / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(UnsupportedModelError, match=saved.name):
        models.load(str(saved))


def test_load_never_runs_code_of_a_repository(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config |= {"model_type": "own-kind", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "own.py").write_text(f"open({str(saved / 'ran')!r}, 'w').close()\nclass OwnConfig: pass\n")
    with pytest.raises(UnsupportedModelError, match="never runs"):
        models.load(str(saved))
    assert not (saved / "ran").exists()


@pytest.mark.parametrize("device", ["no-such-device", "cuda:77"])
def test_load_checks_the_device_first(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        models.load("org/never-looked-up", device=device)


def hub_error(kind: type[Any]) -> Any:
    """The hub's errors want an answer of its HTTP client, which differs between its releases."""
    return kind("text", response=SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (LocalEntryNotFoundError("not cached"), "hub cannot be reached"),
        (ConnectionError("no route"), "hub cannot be reached"),
        (hub_error(RepositoryNotFoundError), "Check the spelling"),
        (hub_error(GatedRepoError), "Accept its terms"),
        (OSError("something else"), "something else"),
    ],
)
def test_hub_errors_come_in_words(monkeypatch: pytest.MonkeyPatch, cause: Exception, said: str) -> None:
    def fail(*args: object, **options: object) -> NoReturn:
        raise OSError(str(cause)) from cause

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(ModelSourceError, match=said):
        models.load("org/model")
