"""Training data: instruction rows and plain texts, read from files, put into words, and cut into token sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvslim.errors import ConfigError, TrainingDataError
from kvslim.files import read_utf8
from kvslim.recovery_config import RecoveryConfig

IGNORED = -100
"""Label of a token that is not learned, as torch's cross entropy has it."""

_TASK = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
_TASK_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
)


@dataclass(frozen=True)
class TrainingSet:
    """Token sequences to train on.

    Attributes:
        ids: one int64 vector per sequence, at least two tokens each, on the CPU.
        labels: the same, :data:`IGNORED` where a token is not learned.
        truncated: rows that were cut off.
        skipped: instruction rows left out because their output is empty.
        sha256: of all rows before they were packed or cut.
    """

    ids: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    truncated: int
    skipped: int
    sha256: str

    @property
    def tokens(self) -> int:
        """Tokens that are predicted in one pass."""
        return sum(map(_learned, self.labels))


def read_rows(paths: Iterable[Path]) -> list[Any]:
    """The rows of all files: a ``.jsonl`` file has one per line, a ``.json`` file a list, any other is one plain text.

    Raises:
        TrainingDataError: a file is missing, unreadable, empty or damaged; the message names it and the line.
    """
    return [row for path in paths for row in _rows_of(Path(path))]


def _rows_of(path: Path) -> list[Any]:
    try:
        text = read_utf8(path)
    except ConfigError as error:
        raise TrainingDataError(str(error)) from error
    if path.suffix == ".jsonl":
        rows = [
            _parsed(line, f"{path}, line {number}")
            for number, line in enumerate(text.split("\n"), 1)  # other line ends may stand inside a JSON string
            if line.strip()
        ]
    elif path.suffix == ".json":
        rows = _parsed(text, str(path))
        if not isinstance(rows, list):
            raise TrainingDataError(f"{path} holds a {type(rows).__name__}, not a list of rows.")
    else:
        rows = [text] if text.strip() else []
    if not rows:
        raise TrainingDataError(f"{path} has no rows.")
    for number, row in enumerate(rows, 1):
        _check(row, f"Row {number} of {path}")
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrainingDataError(f"{where} is no JSON: {error}.") from error


def _check(row: Any, where: str) -> None:
    """Refuse what is neither text nor instruction."""
    fields: dict[str, Any]
    if isinstance(row, str):
        fields = {"text": row}
    elif not isinstance(row, Mapping):
        raise TrainingDataError(f"{where} is a {type(row).__name__}, neither a text nor an instruction row.")
    elif "text" in row:
        fields = {"text": row["text"]}
    else:
        fields = {name: row.get(name) for name in ("instruction", "output")}
        if not isinstance(row.get("input") or "", str):
            raise TrainingDataError(f"{where}: input is a {type(row['input']).__name__}, not text.")
    for name, value in fields.items():
        if not isinstance(value, str) or not (value.strip() or name == "output"):
            raise TrainingDataError(
                f"{where} has no {name}. A row is a text, or has the field 'text', or 'instruction', 'output' and "
                f"perhaps 'input'."
            )


def as_prompt(row: Mapping[str, Any]) -> str:
    """An instruction row as the prompt of Alpaca, which its output answers."""
    given = row.get("input") or ""
    task, given = (_TASK_WITH_INPUT, f"### Input:\n{given}\n\n") if given.strip() else (_TASK, "")
    return f"{task}\n\n### Instruction:\n{row['instruction']}\n\n{given}### Response:\n"


def training_set(tokenizer: Any, rows: Iterable[Any], config: RecoveryConfig) -> TrainingSet:
    """Turn rows into token sequences as ``config`` says. Each row ends with the end-of-text token if there is one.

    Instruction rows with an empty output are left out and counted.

    Args:
        tokenizer: a transformers tokenizer.
        rows: texts, ``{"text"}``, or ``{"instruction", "input", "output"}``.
        config: template, packing, length, seed.

    Raises:
        TrainingDataError: there are no rows, one is malformed or too short, or the tokenizer lacks what is asked for.
    """
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise TrainingDataError(f"rows are a list of texts or instruction rows, not one {type(rows).__name__}.")
    if tokenizer is None:
        raise TrainingDataError("Recovery needs the model's tokenizer.")
    if config.prepend_bos and tokenizer.bos_token_id is None:
        raise TrainingDataError("prepend_bos=True, but the tokenizer has no bos_token_id. Pass prepend_bos=False.")
    if config.template == "chat" and not getattr(tokenizer, "chat_template", None):
        raise TrainingDataError("template='chat', but the tokenizer has no chat template. Use template='alpaca'.")
    encoded, skipped = [], 0
    for number, row in enumerate(rows, 1):
        _check(row, f"Row {number}")
        if _unanswered(row):
            skipped += 1
        else:
            encoded.append(_encode(tokenizer, row, config, number))
    if not encoded:
        raise TrainingDataError("There are no rows to train on.")
    digest = hashlib.sha256()
    for pair in encoded:
        digest.update(len(pair[0]).to_bytes(8, "little") + torch.stack(pair).numpy().tobytes())
    sequences, truncated = _pack(encoded, config) if config.pack else _cut(encoded, config.max_length)
    # A window in the middle of a long instruction may have nothing to learn.
    kept = [pair for pair in sequences if _learned(pair[1])]
    if not kept:
        raise TrainingDataError(f"No row has anything to learn within {config.max_length} tokens. Raise max_length.")
    ids, labels = zip(*kept, strict=True)
    return TrainingSet(ids, labels, truncated, skipped, digest.hexdigest())


def _unanswered(row: Any) -> bool:
    """Whether an instruction row has an empty output, as a few of every public collection have."""
    return isinstance(row, Mapping) and "text" not in row and not row["output"].strip()


def _encode(tokenizer: Any, row: Any, config: RecoveryConfig, number: int) -> tuple[Tensor, Tensor]:
    """Token ids of a row, and their labels."""
    prompt, response, ended = _words(tokenizer, row, config, number)
    first = [tokenizer.bos_token_id] if config.prepend_bos else []
    first += _tokens(tokenizer, prompt) if prompt else []
    rest = _tokens(tokenizer, response)
    if not ended and tokenizer.eos_token_id is not None:
        rest.append(tokenizer.eos_token_id)
    ids = torch.tensor(first + rest)
    if len(ids) < 2:
        raise TrainingDataError(f"Row {number} has fewer than two tokens, so there is nothing to predict. Remove it.")
    labels = ids.clone()
    if config.responses_only:
        labels[: len(first)] = IGNORED
    return ids, labels


def _words(tokenizer: Any, row: Any, config: RecoveryConfig, number: int) -> tuple[str, str, bool]:
    """Prompt, response, and whether the response brings its own end."""
    if isinstance(row, str):
        return "", row, False
    if "text" in row:
        return "", row["text"], False
    if config.template == "alpaca":
        return as_prompt(row), row["output"], False
    asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    prompt = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    if not whole.startswith(prompt):
        raise TrainingDataError(
            f"The chat template does not put the response of row {number} right behind its prompt. Use "
            f"template='alpaca'."
        )
    return prompt, whole[len(prompt) :], True


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _pack(rows: Sequence[tuple[Tensor, Tensor]], config: RecoveryConfig) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Join the rows in a random order and cut them into full sequences; the last one is shorter."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(config.seed)).tolist()
    ids, labels = (torch.cat([rows[index][part] for index in order]) for part in (0, 1))
    return list(zip(ids.split(config.max_length), labels.split(config.max_length), strict=True)), 0


def _cut(rows: Sequence[tuple[Tensor, Tensor]], length: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Each row up to ``length`` tokens, and how many were longer."""
    return [(ids[:length], labels[:length]) for ids, labels in rows], sum(len(ids) > length for ids, _ in rows)


def _learned(labels: Tensor) -> int:
    """Tokens predicted in a sequence: the first has nothing before it."""
    return int((labels[1:] != IGNORED).sum())
