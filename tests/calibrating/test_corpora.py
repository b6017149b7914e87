"""Calibration data from files, and the default mix."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from kvslim.calibrating.corpora import default_mix, origin_of, read_corpus
from kvslim.errors import ConfigError

ROWS = [{"text": "one\u2028still"}, "two", {"instruction": "do", "input": "it", "output": "done"}]
JOINED = "one\u2028still\n\ntwo\n\ndo\n\nit\n\ndone"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", JOINED),
        ("a.jsonl", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)),
        ("a.json", json.dumps(ROWS)),
    ],
)
def test_texts_and_rows_also_packed(tmp_path: Path, name: str, content: str) -> None:
    plain, packed = tmp_path / name, tmp_path / f"{name}.xz"
    plain.write_text(content, encoding="utf-8")
    packed.write_bytes(lzma.compress(content.encode()))
    assert read_corpus(plain).text == read_corpus(packed).text == JOINED
    assert read_corpus(packed).origin == str(packed)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"words": 1}', "has a line that is not"),
        ("a.jsonl", b"no json", "has a line that is not"),
        ("a.json", b'{"text": "x"}', "a dict, not a list of rows"),
        ("a.json", b"[" * 100_000, "is not"),
        ("a.txt", b" \n", "is empty"),
        ("a.json", b"[]", "is empty"),
        ("a.txt", b"\xff", "not UTF-8"),
        ("a.txt.xz", b"plain", "no complete xz"),
        ("a.txt.xz", lzma.compress(b"text" * 99)[:-20], "no complete xz"),
    ],
)
def test_what_is_no_text(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_corpus(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_corpus(tmp_path / "missing.txt")


def test_the_default_mix_has_three_domains_of_enough_text() -> None:
    mix = default_mix()
    assert [corpus.name for corpus in mix] == ["reference", "code", "licences"]
    assert all(len(corpus.text) > 100_000 for corpus in mix)
    assert default_mix() == mix
    assert "def " in mix[1].text
    assert "WARRANTY" in mix[2].text
    assert origin_of(mix).startswith("equal shares of Python's reference topics")
    assert origin_of(mix[:1]) == mix[0].origin
