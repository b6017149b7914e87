"""Token windows: the form in which every calibration takes its data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvslim.errors import CalibrationError


def windows_from_texts(
    tokenizer: Any,
    texts: str | Iterable[str | Mapping[str, Any]],
    length: int,
    count: int | None = None,
    prepend_bos: bool = False,
    at_most: int | None = None,
) -> Tensor:
    """Cut the texts' tokens, joined in order, into windows that do not overlap and are spread evenly over all of them.

    Args:
        tokenizer: a transformers tokenizer; special tokens are not added by it.
        texts: one text, several, or rows, see :func:`texts_of`.
        length: tokens per window, the first token included.
        count: how many windows there must be; ``None`` takes as many as fit.
        prepend_bos: start each window with the tokenizer's ``bos_token_id``.
        at_most: with ``count=None``, stop at this many.

    Returns:
        ``(windows, length)`` int64 token ids on the CPU.

    Raises:
        CalibrationError: there is no tokenizer, the texts are no texts or too short, or ``prepend_bos`` without a
            beginning token.
    """
    ids, body, bos = encode(tokenizer, texts, length, prepend_bos)
    fits = len(ids) // body
    wanted = count if count is not None else min(fits, at_most or fits)
    if wanted < 1 or fits < wanted:
        needed = max(wanted, 1) * body
        raise CalibrationError(
            f"The calibration texts have {len(ids)} tokens; {max(wanted, 1)} windows of {length} need {needed}. "
            f"Add text, or lower the number of windows (at most {fits}) or their length."
        )
    return cut(ids, wanted, body, bos)


def encode(tokenizer: Any, texts: Any, length: int, prepend_bos: bool = False) -> tuple[list[int], int, int | None]:
    """The tokens of the texts joined in order, how many of them a window of ``length`` holds, and what it starts with.

    Raises:
        CalibrationError: as :func:`windows_from_texts`, except for texts that are too short.
    """
    parts = texts_of(texts)
    if tokenizer is None:
        raise CalibrationError("Texts need the model's tokenizer. Pass it, or pass token windows instead of texts.")
    if length < 2:
        raise CalibrationError(f"A window needs at least 2 tokens, not {length}.")
    bos = tokenizer.bos_token_id if prepend_bos else None
    if prepend_bos and bos is None:
        raise CalibrationError("prepend_bos=True, but the tokenizer has no bos_token_id. Pass prepend_bos=False.")
    ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]]
    return ids, length - (bos is not None), None if bos is None else int(bos)


def cut(ids: Sequence[int], count: int, body: int, bos: int | None) -> Tensor:
    """``count`` windows of ``body`` tokens spread evenly over ``ids``, each behind ``bos`` if there is one."""
    starts = [i * (len(ids) - body) // max(count - 1, 1) for i in range(count)]
    rows = torch.tensor([ids[start : start + body] for start in starts], dtype=torch.long)
    return rows if bos is None else torch.nn.functional.pad(rows, (1, 0), value=bos)


def texts_of(source: Any) -> list[str]:
    """The texts of a source one by one: a text, several, or rows; anything else is refused in words.

    A row is a mapping with the field ``text``, or ``instruction`` and ``output`` and perhaps ``input``, whose fields
    are joined by blank lines. All of an iterable is read, so an endless stream has to be cut off before.

    Raises:
        CalibrationError: something is neither text nor such a row.
    """
    parts = [source] if isinstance(source, str) or not isinstance(source, Iterable) else list(source)
    return [part if isinstance(part, str) else _row_text(part) for part in parts]


def _row_text(row: Any) -> str:
    if not isinstance(row, Mapping):
        raise CalibrationError(
            f"Calibration is a text, several texts or rows, a mapping of names to these, or a tensor of token windows; "
            f"this holds {type(row).__name__}."
        )
    names = ("text",) if "text" in row else ("instruction", "input", "output")
    fields = [row.get(name) for name in names]
    if "text" not in row and len(fields) == 3 and not fields[1]:
        del fields[1]
    if not all(isinstance(field, str) for field in fields):
        raise CalibrationError(
            f"A calibration row has the field 'text', or 'instruction', 'output' and perhaps 'input', each a string; "
            f"this one has {', '.join(map(str, row)) or 'none'}. Name the texts yourself: [row['...'] for row in rows]."
        )
    return "\n\n".join(map(str, fields))


def check_windows(windows: Tensor, vocab_size: int) -> Tensor:
    """Return ``windows`` as ``(windows, length)`` int64.

    Raises:
        CalibrationError: wrong shape or type, too short, or a token id that the model does not have.
    """
    if windows.ndim != 2 or windows.is_floating_point() or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise CalibrationError(
            f"Token windows must be integers of shape (windows, length >= 2), not {windows.dtype} of shape "
            f"{tuple(windows.shape)}."
        )
    windows = windows.long()
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or high >= vocab_size:
        raise CalibrationError(f"Token ids must be in 0..{vocab_size - 1}; the windows hold {low}..{high}.")
    return windows


def windows_hash(windows: Tensor) -> str:
    """SHA-256 of token windows: their shape as two int64, then all ids as int64, little-endian."""
    digest = hashlib.sha256()
    for part in (torch.tensor(windows.shape), windows.long().cpu().contiguous()):
        digest.update(part.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
