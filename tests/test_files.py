"""Files and directories: whole or not at all, refused in words, nothing left behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvslim.errors import ConfigError
from kvslim.files import (
    check_new_directory,
    check_writable,
    discard_unfinished,
    new_directory,
    replacing,
    write_atomically,
)

LONGEST = "n" * 250
"""A name that a file system still takes, with little room to add to it."""


def make(path: Path) -> None:
    with new_directory(path) as aside:
        (aside / "file").write_text("x")


def test_missing_directories_are_made_when_there_is_something_to_write(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "deep" / LONGEST
    check_writable(path)
    check_writable(tmp_path / "many", directory=True)
    assert not list(tmp_path.iterdir())
    write_atomically(path, b"x")
    assert path.read_bytes() == b"x"


def test_new_directory(tmp_path: Path) -> None:
    make(tmp_path / "sub" / LONGEST)
    assert [path.name for path in (tmp_path / "sub" / LONGEST).iterdir()] == ["file"]
    assert len(list((tmp_path / "sub").iterdir())) == 1


@pytest.mark.parametrize("place", ["file/new", "file/deep/new", "n" * 300, "taken", "link", "gone"])
def test_places_that_are_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    make(tmp_path / "taken")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for check in (check_new_directory, make):
        with pytest.raises(ConfigError, match=r"cannot be made|exists already"):
            check(tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_names_that_are_too_long(tmp_path: Path) -> None:
    for directory in (False, True):
        with pytest.raises(ConfigError, match="too long"):
            check_writable(tmp_path / ("n" * 300), directory=directory)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_atomically(tmp_path / ("n" * 300), b"x")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="a file system where nothing can be made")
def test_a_file_system_where_nothing_can_be_made() -> None:
    path = Path("/proc/kvslim/new")
    for check in (check_new_directory, make, check_writable, lambda place: write_atomically(place, b"x")):
        with pytest.raises(ConfigError, match="cannot be"):
            check(path)


@pytest.mark.parametrize(("owner", "name"), [(Path, "mkdir"), (tempfile, "mkdtemp")])
def test_a_directory_that_cannot_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(ConfigError, match="No space left"):
        make(tmp_path / "sub" / "new")
    assert not list(tmp_path.iterdir())


def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def half(path: Path) -> None:
        with new_directory(path) as aside:
            (aside / "half").write_text("x")
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        half(tmp_path / "sub" / "deep" / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "deep" / "file"
    for content in (b"old", b"newer"):
        with replacing(path, durable=durable) as file:
            file.write(content[:1])
            assert not path.exists() or path.read_bytes() == b"old"
            file.write(content[1:])
        assert path.read_bytes() == content
    with pytest.raises(TypeError), replacing(path, durable=durable) as file:
        file.write(b"half" + None)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"No space left.*Nothing was changed"), replacing(path) as file:
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"newer"
    assert [place.name for place in path.parent.iterdir()] == ["file"]


def test_what_killed_writers_left_is_discarded(tmp_path: Path) -> None:
    (tmp_path / ".kvslim-x").write_text("")
    (tmp_path / "kept").write_text("")
    discard_unfinished(tmp_path)
    assert [place.name for place in tmp_path.iterdir()] == ["kept"]
