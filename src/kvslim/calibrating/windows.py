"""Token windows: the form in which every calibration takes its data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kvslim.errors import CalibrationError


def windows_from_texts(
    tokenizer: Any,
    texts: str | Iterable[str],
    length: int,
    count: int | None = None,
    prepend_bos: bool = False,
    at_most: int | None = None,
) -> Tensor:
    """Cut the texts' tokens, joined in order, into windows that do not overlap and are spread evenly over all of them.

    Args:
        tokenizer: a transformers tokenizer; special tokens are not added by it.
        texts: one text or several.
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
    parts = _checked(texts)
    if tokenizer is None:
        raise CalibrationError("Texts need the model's tokenizer. Pass it, or pass token windows instead of texts.")
    if length < 2:
        raise CalibrationError(f"A window needs at least 2 tokens, not {length}.")
    bos = tokenizer.bos_token_id if prepend_bos else None
    if prepend_bos and bos is None:
        raise CalibrationError("prepend_bos=True, but the tokenizer has no bos_token_id. Pass prepend_bos=False.")
    ids = [token for part in parts for token in tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]]
    body = length - (bos is not None)
    fits = len(ids) // body
    wanted = count if count is not None else min(fits, at_most or fits)
    if wanted < 1 or fits < wanted:
        needed = max(wanted, 1) * body
        raise CalibrationError(
            f"The calibration texts have {len(ids)} tokens; {max(wanted, 1)} windows of {length} need {needed}. "
            f"Add text, or lower the number of windows (at most {fits}) or their length."
        )
    starts = [i * (len(ids) - body) // max(wanted - 1, 1) for i in range(wanted)]
    rows = torch.tensor([ids[start : start + body] for start in starts], dtype=torch.long)
    return rows if bos is None else torch.nn.functional.pad(rows, (1, 0), value=int(bos))


def _checked(texts: Any) -> list[str]:
    """The texts one by one; anything else is refused in words."""
    parts = [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    for part in parts:
        if not isinstance(part, str):
            raise CalibrationError(
                f"Calibration is a text, several texts, or a tensor of token windows; this holds {type(part).__name__}."
            )
    return parts


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
