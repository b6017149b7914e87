"""Text to evaluate on: files, and the reference topics that come with Python."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvslim.calibrating.corpora import Corpus, reference_topics
from kvslim.errors import ConfigError
from kvslim.files import read_utf8


@dataclass(frozen=True)
class TextSource:
    """A text and where it came from.

    Attributes:
        text: all of it.
        origin: in words, for tables and files.
    """

    text: str
    origin: str

    def tokens(self, tokenizer: Any) -> list[int]:
        """Its token ids, without special tokens."""
        ids: list[int] = tokenizer(self.text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def read_text(path: Path) -> TextSource:
    """Read a UTF-8 file; of a ``.jsonl`` file the field ``text`` of each line, with a blank line between them.

    Raises:
        ConfigError: it is missing, unreadable, not UTF-8, empty, or JSON of another kind.
    """
    text = read_utf8(path)
    if path.suffix == ".jsonl":
        text = _joined_lines(path, text)
    if not text.strip():
        raise ConfigError(f"The text {path} is empty.")
    return TextSource(text, str(path))


def _joined_lines(path: Path, text: str) -> str:
    try:
        parts = [json.loads(line)["text"] for line in text.split("\n") if line.strip()]
        return "\n\n".join(parts)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path} has a line that is not {{"text": "..."}} ({error!r}).') from error


def check_apart(test: TextSource | None, calibration: TextSource | Corpus | None) -> None:
    """Refuse to calibrate on the test text: the figures would look better than they are.

    Raises:
        ConfigError: both are the same text, from one file or from two.
    """
    if test is not None and calibration is not None and test.text.split() == calibration.text.split():
        raise ConfigError(
            f"The calibration text {calibration.origin} is the test text {test.origin}, so Palu would be measured on "
            "what it has seen. Calibrate on another text."
        )


def python_topics(tokenizer: Any, tokens: int) -> tuple[TextSource, TextSource]:
    """Split the reference topics of Python's help system into a text to test on and one to calibrate on.

    The topics (module ``pydoc_data.topics``) are taken in alphabetical order: the first ones, until there are
    ``tokens`` tokens, are the test text; the others, none of them shared, are for calibration.

    Raises:
        ConfigError: this Python lacks the topics, or they are too short.
    """
    topics = reference_topics()
    names = sorted(topics)
    count = test = 0
    while count < tokens:
        if test >= len(names) - 1:
            raise ConfigError(
                f"Python's reference topics have too few tokens: {count} found, {tokens} needed besides one topic to "
                "calibrate on. Ask for fewer tokens, or give a longer text with --text FILE."
            )
        count += len(TextSource(topics[names[test]] + "\n\n", "").tokens(tokenizer))
        test += 1
    return _join(topics, names[:test]), _join(topics, names[test:])


def all_python_topics() -> TextSource:
    """All of them, for calibration. Errors as :func:`python_topics`."""
    topics = reference_topics()
    return _join(topics, sorted(topics))


def _join(topics: dict[str, str], names: list[str]) -> TextSource:
    span = f"{names[0]!r} to {names[-1]!r}" if len(names) > 1 else repr(names[0])
    text = "\n\n".join(topics[name] for name in names)
    return TextSource(text, f"Python's reference topics (pydoc_data.topics), {span}")
