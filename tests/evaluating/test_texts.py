from __future__ import annotations

from pathlib import Path

import pytest

from kvslim.errors import ConfigError
from kvslim.evaluating.texts import read_text


def test_json_lines_become_one_text(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "one\\u2028still one", "title": "a"}\n\n{"text": "two"}\n', encoding="utf-8")
    assert read_text(path).text == "one\u2028still one\n\ntwo"
    plain = tmp_path / "plain.txt"
    plain.write_text('{"text": "as it is"}')
    assert read_text(plain).text == '{"text": "as it is"}'


@pytest.mark.parametrize("line", ["no json", '{"words": "x"}', '{"text": 5}', "[1]", '"text"'])
def test_other_json_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ConfigError, match="a line that is not"):
        read_text(path)
