from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvslim.errors import TrainingDataError
from kvslim.recovering.rows import IGNORED, as_prompt, read_rows, training_set
from kvslim.recovery_config import RecoveryConfig

ROW = {"instruction": "add", "input": "1 2", "output": "3"}


class Letters:
    """One token per character; 0 begins and 1 ends."""

    bos_token_id = 0
    eos_token_id: int | None = 1
    chat_template: str | None = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(
        self, talk: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        return "".join(f"<{one['role']}>{one['content']}." for one in talk) + "<assistant>" * add_generation_prompt


def words(ids: torch.Tensor) -> str:
    return "".join(chr(token) for token in ids.tolist() if token > 1)


def unpacked(**fields: Any) -> RecoveryConfig:
    return RecoveryConfig(**{"pack": False, **fields})


def test_an_instruction_becomes_the_alpaca_prompt() -> None:
    (ids,) = training_set(Letters(), [ROW], unpacked()).ids
    assert words(ids) == as_prompt(ROW) + "3"
    assert as_prompt(ROW).endswith("### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n")
    assert "Input" not in as_prompt({"instruction": "add", "input": ""})
    assert ids[-1] == 1
    assert as_prompt({"instruction": "add"}) == as_prompt({"instruction": "add", "input": None})


def test_only_responses_are_learned_if_asked() -> None:
    data = training_set(Letters(), [ROW, "plain"], unpacked(responses_only=True, prepend_bos=True))
    assert [words(labels[labels != IGNORED]) for labels in data.labels] == ["3", "plain"]
    assert data.tokens == len("3") + len("plain") + 2  # the ends; the beginning of the plain text is given
    assert all(ids[0] == 0 for ids in data.ids)


def test_the_chat_template_is_used_if_asked_and_there() -> None:
    tokenizer = Letters()
    with pytest.raises(TrainingDataError, match="no chat template"):
        training_set(tokenizer, [ROW], unpacked(template="chat"))
    tokenizer.chat_template = "there"
    data = training_set(tokenizer, [ROW], unpacked(template="chat", responses_only=True))
    assert words(data.ids[0]) == "<user>add\n\n1 2.<assistant>3."
    assert words(data.labels[0][data.labels[0] != IGNORED]) == "3."


def test_a_template_that_hides_the_response_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Letters()
    tokenizer.chat_template = "there"
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda talk, **_: f"{len(talk)} turns")
    with pytest.raises(TrainingDataError, match="right behind its prompt"):
        training_set(tokenizer, [ROW], unpacked(template="chat"))


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=8),
    length=st.integers(2, 12),
    seed=st.integers(0, 5),
)
def test_packing_keeps_every_token_once(texts: list[str], length: int, seed: int) -> None:
    rows = [f"{index}{text}" for index, text in enumerate(texts)]
    data = training_set(Letters(), rows, RecoveryConfig(max_length=length, seed=seed))
    assert all(len(ids) == length for ids in data.ids[:-1])
    joined = torch.cat(data.ids)
    whole = "".join("\1" if token == 1 else chr(token) for token in joined.tolist())
    left = sorted(row + "\1" for row in rows)
    dropped = sum(map(len, left)) - len(whole)
    assert dropped in (0, 1)  # a rest of a single token has nothing to predict
    assert sorted((whole + "\1" * dropped).replace("\1", "\1\0").split("\0")[:-1]) == left
    assert data.truncated == 0


def test_the_hash_is_of_the_rows_alone() -> None:
    one, other = (training_set(Letters(), ["abcdef", "gh"], RecoveryConfig(seed=seed, max_length=4)) for seed in (0, 3))
    assert one.sha256 == other.sha256
    assert one.sha256 == training_set(Letters(), ["abcdef", "gh"], unpacked()).sha256
    assert one.sha256 != training_set(Letters(), ["gh", "abcdef"], RecoveryConfig(max_length=4)).sha256


def test_long_rows_are_cut_and_counted() -> None:
    data = training_set(Letters(), ["abcdefgh", "ab"], unpacked(max_length=4))
    assert [words(ids) for ids in data.ids] == ["abcd", "ab"]
    assert data.truncated == 1


def test_rows_without_an_answer_are_left_out_and_counted() -> None:
    data = training_set(Letters(), [ROW, {**ROW, "output": " "}], unpacked())
    assert (len(data.ids), data.skipped) == (1, 1)
    with pytest.raises(TrainingDataError, match="no rows"):
        training_set(Letters(), [{**ROW, "output": ""}], unpacked())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows to train on"),
        ("a text", "not one str"),
        (ROW, "not one dict"),
        (7, "not one int"),
        (["fine", 7], "Row 2 is a int"),
        ([" "], "Row 1 has no text"),
        ([{"text": 5}], "Row 1 has no text"),
        ([{"instruction": "x"}], "Row 1 has no output"),
        ([{"output": "x"}], "Row 1 has no instruction"),
        ([{**ROW, "input": 3}], "input is a int"),
    ],
)
def test_malformed_rows(rows: Any, message: str) -> None:
    with pytest.raises(TrainingDataError, match=message):
        training_set(Letters(), rows, unpacked())


def test_rows_with_nothing_to_learn() -> None:
    tokenizer = Letters()
    with pytest.raises(TrainingDataError, match="Raise max_length"):
        training_set(tokenizer, [ROW], unpacked(responses_only=True, max_length=20))
    tokenizer.eos_token_id = None
    with pytest.raises(TrainingDataError, match="Row 2 has fewer than two tokens"):
        training_set(tokenizer, ["ab", "a"], unpacked())
    with pytest.raises(TrainingDataError, match="tokenizer"):
        training_set(None, ["ab"], unpacked())


def test_files(tmp_path: Path) -> None:
    lines, listed, plain = (tmp_path / name for name in ("rows.jsonl", "rows.json", "plain.txt"))
    lines.write_text(json.dumps(ROW) + "\n\n" + json.dumps({"text": "one\u2028line"}, ensure_ascii=False) + "\n")
    listed.write_text(json.dumps([ROW, "text"]))
    plain.write_text("two\nlines\n")
    assert read_rows([lines, listed, plain]) == [ROW, {"text": "one\u2028line"}, ROW, "text", "two\nlines\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', "line 2 is no JSON"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "Row 2 of .*a.jsonl is a list"),
        ("a.json", b'{"text": "x"}', "holds a dict, not a list"),
        ("a.json", b"[]", "no rows"),
        ("a.txt", b"\n", "no rows"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainingDataError, match=message):
        read_rows([tmp_path / name])
    with pytest.raises(TrainingDataError, match="cannot be read"):
        read_rows([tmp_path / "absent.jsonl"])
