"""Calibration data from files, and the mix of texts that every installation of kvslim carries."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvslim.calibrating.windows import texts_of
from kvslim.errors import CalibrationError, ConfigError
from kvslim.files import read_utf8

_BLANK_LINE = "\n\n"
_HEAD = 12_000
"""Characters taken from each file of the default mix, so that a few long ones do not make up all of it."""

_LIBRARIES = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "tokenizers",
    "huggingface-hub",
    "gguf",
    "filelock",
    "rich",
    "typer",
    "matplotlib",
)  # kvslim's own requirements, so they are there


@dataclass(frozen=True)
class Corpus:
    """A named source of calibration text.

    Attributes:
        name: for messages, and as the key in a mix.
        text: all of it.
        origin: where it came from, in words.
    """

    name: str
    text: str
    origin: str


def read_corpus(path: Path) -> Corpus:
    """Read a UTF-8 file, also one packed with xz (``.xz``).

    A ``.jsonl`` file has one row per line, a ``.json`` file a list of them; a row is a text, or has the field ``text``,
    or ``instruction``, ``output`` and perhaps ``input``. Rows are joined by blank lines. Any other file is one text.

    Raises:
        ConfigError: it is missing, unreadable, not UTF-8, damaged, empty, or has rows of another kind.
    """
    packed = path.suffix == ".xz"
    text = read_utf8(path, packed=packed)
    text = _rows(path, Path(path.stem).suffix if packed else path.suffix, text)
    if not text.strip():
        raise ConfigError(f"The text {path} is empty.")
    return Corpus(str(path), text, str(path))


def _rows(path: Path, kind: str, text: str) -> str:
    if kind not in (".jsonl", ".json"):
        return text
    try:
        # Only a line feed ends a row: other line ends may stand inside a JSON string.
        lines = [line for line in text.split("\n") if line.strip()]
        rows: Any = [json.loads(line) for line in lines] if kind == ".jsonl" else json.loads(text)
        if not isinstance(rows, list):
            raise CalibrationError(f"it holds a {type(rows).__name__}, not a list of rows")
        return _BLANK_LINE.join(texts_of(rows))
    except (ValueError, RecursionError) as error:  # a CalibrationError is a ValueError too
        where = "has a line that" if kind == ".jsonl" else "holds what"
        raise ConfigError(f'{path} {where} is not {{"text": "..."}} or an instruction row ({error}).') from error


def default_mix() -> list[Corpus]:
    """Three domains that are there without a network: reference prose, source code, and legal and project prose.

    Which versions of Python and of the libraries are installed decides what exactly they say; the origins name them.

    Raises:
        ConfigError: this Python lacks them.
    """
    return [_reference(), _source_code(), _library_texts()]


def origin_of(corpora: Sequence[Corpus]) -> str:
    """Where a mix came from, in words."""
    if len(corpora) == 1:
        return corpora[0].origin
    return "equal shares of " + "; ".join(corpus.origin for corpus in corpora)


def reference_topics() -> dict[str, str]:
    """The reference topics of Python's help system by name.

    Raises:
        ConfigError: this Python lacks them.
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError) as error:
        raise ConfigError("This Python lacks its reference topics (pydoc_data). Give a text file instead.") from error
    return topics


def _reference() -> Corpus:
    topics = reference_topics()
    text = _BLANK_LINE.join(topics[name] for name in sorted(topics))
    return Corpus("reference", text, "Python's reference topics (pydoc_data.topics)")


def _source_code() -> Corpus:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [file.read_text(encoding="utf-8", errors="replace")[:_HEAD] for file in files]
    if not parts:
        raise ConfigError("This Python comes without the source code of its library. Give a text file instead.")
    return Corpus("code", _BLANK_LINE.join(parts), f"source code of Python's library ({len(parts)} files)")


def _library_texts() -> Corpus:
    """What the libraries that kvslim needs say of themselves, and their licences, each text once."""
    parts: dict[str, None] = {}
    for name in _LIBRARIES:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # it is there, but under another name or without a record
            continue
        about: Any = found.metadata
        parts[str(about.get_payload() or about.get("Description") or "")[:_HEAD]] = None
        for file in found.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "NOTICE")) and file.suffix in ("", ".txt", ".md"):
                parts[_head(Path(str(file.locate())))] = None
    text = _BLANK_LINE.join(filter(str.strip, parts))
    if not text:
        raise ConfigError("The installed libraries bring no descriptions or licences. Give a text file instead.")
    return Corpus("licences", text, "descriptions and licences of its libraries")


def _head(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:_HEAD]
    except OSError:  # listed, but left out of the installation
        return ""
