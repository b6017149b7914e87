"""A streamed compression killed at any moment goes on with the same call and ends with the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvslim import palu
from kvslim.errors import CheckpointError, ConfigError
from kvslim.palu import PaluConfig
from kvslim.streaming.compressing import compress_checkpoint
from kvslim.streaming.work import open_work

WriteModel = Callable[..., Path]
CONFIG = PaluConfig(rate=0.4, group_size=1, ranks="uniform", decomposition="whitened")
WINDOWS = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(7))

RUNS = '''
"""Compress in forks of this process. Each dies by SIGKILL at one of the calls by which files are made, or does not."""
import os, signal, sys
from pathlib import Path
import torch
from kvslim.palu import PaluConfig
from kvslim.streaming.compressing import compress_checkpoint

source, folder, stride = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
windows = torch.randint(3, 128, (4, 40), generator=torch.Generator().manual_seed(7))

def compress(out):
    config = PaluConfig(rate=0.4, group_size=1, ranks="uniform", decomposition="whitened")
    compress_checkpoint(source, out, config, windows, dtype=torch.float32)

def run(out, fatal=None):
    """Die at the call with number ``fatal``; report how the process ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    calls = 0
    def deadly(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in ("replace", "unlink", "mkdir", "rmdir", "write_text"):
        setattr(Path, name, deadly(getattr(Path, name)))
    os.fsync = deadly(os.fsync)
    try:
        compress(out)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

fatal, status = 1 - stride, signal.SIGKILL
while status == signal.SIGKILL:
    fatal += stride
    out = folder / f"killed-{fatal}"
    work = out.with_name(out.name + ".partial")
    status = run(out, fatal)
    finished = out.exists() and not list(work.glob("*"))
    if status == signal.SIGKILL and not finished and run(out):
        sys.exit(f"The run killed at call {fatal} did not go on")
    if work.exists():
        work.rmdir()  # nothing is in it
if status:
    sys.exit("A run that was not killed failed")
out = folder / "again-and-again"  # each run gets a little further than the one before
fatal = 0
while run(out, 16):
    fatal += 1
    if fatal > 50:
        sys.exit("It never ends")
print(fatal)  # how often it was killed
'''


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_killed_at_every_step(write_model: WriteModel, tmp_path: Path, stride: int) -> None:
    source, folder = write_model(), tmp_path / "results"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", RUNS, source, folder, str(stride)],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 3
    compress_checkpoint(source, tmp_path / "unbroken", CONFIG, WINDOWS, dtype=torch.float32)
    wanted, found = contents(tmp_path / "unbroken"), list(folder.iterdir())
    assert len(found) > 50 // stride
    assert [path.name for path in found if contents(path) != wanted] == []
    assert palu.load(folder / "again-and-again").dtype == torch.float32


class Broken(BaseException):
    """Stands for a key press."""


def broken(source: Path, out: Path, at: int = 2, config: PaluConfig = CONFIG) -> Path:
    """A work folder in which this many layers are done."""

    def stop(_: str, done: int, __: int) -> None:
        if done == at:
            raise Broken

    with pytest.raises(Broken):
        compress_checkpoint(source, out, config, WINDOWS, progress=stop)
    return out.with_name(out.name + ".partial")


def test_only_the_rest_is_done(write_model: WriteModel, tmp_path: Path) -> None:
    work = broken(write_model(), tmp_path / "out")
    assert {path.name for path in work.iterdir()} == {"manifest.json", "lock", "hidden-2.bin", "checkpoint"}
    steps: list[int] = []
    compress_checkpoint(
        tmp_path / "model", tmp_path / "out", CONFIG, WINDOWS, progress=lambda _, done, __: steps.append(done)
    )
    assert steps == [3]
    assert not work.exists()


def test_other_inputs_are_refused(write_model: WriteModel, tmp_path: Path) -> None:
    source, out = write_model(), tmp_path / "out"
    work = broken(source, out)
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    with pytest.raises(ConfigError, match="another calibration"):
        compress_checkpoint(source, out, CONFIG, WINDOWS.flip(0))
    with pytest.raises(ConfigError, match="another config"):
        compress_checkpoint(
            source, out, PaluConfig(rate=0.3, group_size=1, ranks="uniform", decomposition="whitened"), WINDOWS
        )
    with pytest.raises(ConfigError, match="another dtype"):
        compress_checkpoint(source, out, CONFIG, WINDOWS, dtype=torch.bfloat16)
    weights = source / "model.safetensors"
    shutil.copy(weights, tmp_path / "copy")
    data = weights.read_bytes()
    weights.write_bytes(data)  # the same values at another time
    with pytest.raises(ConfigError, match="another model"):
        compress_checkpoint(source, out, CONFIG, WINDOWS)
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*")} == before
    compress_checkpoint(source, out, CONFIG, WINDOWS, restart=True)
    assert palu.load(out).palu.config == CONFIG
    assert not work.exists()


@pytest.mark.parametrize("damage", ["manifest", "hidden", "shard", "lacking"])
def test_a_damaged_work_folder(write_model: WriteModel, tmp_path: Path, damage: str) -> None:
    source, out = write_model(), tmp_path / "out"
    work = broken(source, out)
    shard = next((work / "checkpoint").glob("model-00001-*"))
    path = {"manifest": work / "manifest.json", "hidden": work / "hidden-2.bin"}.get(damage, shard)
    path.write_bytes(path.read_bytes()[:-7])
    if damage == "lacking":
        path.unlink()
    with pytest.raises(CheckpointError, match=r"Begin again with restart \(--restart\)"):
        compress_checkpoint(source, out, CONFIG, WINDOWS)
    compress_checkpoint(source, out, CONFIG, WINDOWS, restart=True)
    assert palu.load(out).palu.config == CONFIG


def test_what_nobody_vouches_for_is_replaced(write_model: WriteModel, tmp_path: Path) -> None:
    source, out = write_model(), tmp_path / "out"
    work = broken(source, out)
    for name in ("hidden-3.bin", "checkpoint/model-00003-of-00004.safetensors", "checkpoint/config.json"):
        (work / name).write_text("half")
    compress_checkpoint(source, out, CONFIG, WINDOWS)
    compress_checkpoint(source, tmp_path / "unbroken", CONFIG, WINDOWS)
    assert contents(out) == contents(tmp_path / "unbroken")


def test_a_folder_in_use(write_model: WriteModel, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    source, out = write_model(), tmp_path / "out"
    work = broken(source, out)
    inputs = json.loads((work / "manifest.json").read_text())["inputs"]
    with open_work(work, inputs, restart=False), pytest.raises(ConfigError, match="Another run is going on"):
        compress_checkpoint(source, out, CONFIG, WINDOWS)
    compress_checkpoint(source, out, CONFIG, WINDOWS)


def test_a_place_that_is_taken_meanwhile(write_model: WriteModel, tmp_path: Path) -> None:
    source, out = write_model(), tmp_path / "out"
    work = broken(source, out, at=3)
    out.mkdir()
    (out / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        compress_checkpoint(source, out, CONFIG, WINDOWS)
    assert (out / "file").read_text() == "mine"
    (out / "file").unlink()
    compress_checkpoint(source, out, CONFIG, WINDOWS)
    assert palu.load(out).palu.config == CONFIG
    assert not work.exists()
