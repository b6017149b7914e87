"""Calibration on several domains at once: windows from named sources, in shares, mixed evenly.

Statistics of one domain serve it best and others less: a direction of the inputs that the calibration text never shows
is free to be cut. Equal shares of several domains are the safe choice for a model that will be used on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvslim.calibrating.windows import cut, encode, windows_from_texts
from kvslim.config import is_number
from kvslim.errors import CalibrationError


def windows_of(
    tokenizer: Any,
    calibration: Any,
    length: int,
    count: int | None = None,
    prepend_bos: bool = False,
    at_most: int | None = None,
) -> Tensor:
    """Token windows from whatever calibration data may be.

    Args:
        tokenizer: a transformers tokenizer; ``None`` will do for token windows.
        calibration: a text; several texts; rows with a field ``text`` (a data set); a mapping of names to these, mixed
            in equal shares by :func:`mixed_windows`; or token windows, which are returned as they are.
        length: tokens per window, the first token included. This and what follows is not used for token windows.
        count: how many windows there must be; ``None`` takes as many as fit.
        prepend_bos: start each window with the tokenizer's ``bos_token_id``.
        at_most: with ``count=None``, stop at this many.

    Raises:
        CalibrationError: the data is of no such form or too short; of a mapping, the message names the source.
    """
    if isinstance(calibration, Tensor):
        return calibration
    if isinstance(calibration, Mapping):
        return mixed_windows(tokenizer, calibration, length, count, prepend_bos, at_most)
    return windows_from_texts(tokenizer, calibration, length, count, prepend_bos, at_most)


def mixed_windows(
    tokenizer: Any,
    sources: Mapping[str, Any],
    length: int,
    count: int | None = None,
    prepend_bos: bool = False,
    at_most: int | None = None,
    weights: Mapping[str, float] | None = None,
) -> Tensor:
    """Cut windows from every source, spread evenly over it, and interleave them; equal calls give equal windows.

    A window holds text of one source only.

    Args:
        tokenizer: a transformers tokenizer; special tokens are not added by it.
        sources: names and what is calibrated on: a text, several texts, or rows with a field ``text`` each.
        length: tokens per window, the first token included.
        count: windows of all sources together; ``None`` takes as many as fit, up to ``at_most``: the source that is
            shortest for its share sets the limit, so that the shares hold.
        prepend_bos: start each window with the tokenizer's ``bos_token_id``.
        at_most: with ``count=None``, stop at this many.
        weights: the share of each source, in any unit; equal shares if left out.

    Returns:
        ``(windows, length)`` int64 token ids on the CPU, the sources taking turns by their shares.

    Raises:
        CalibrationError: there are no sources, one is too short or unusable (the message names it), there are fewer
            windows than sources, or the weights do not fit the sources.
    """
    names = list(sources)
    if not names:
        raise CalibrationError("The calibration mix has no sources. Name at least one text.")
    parts = _parts(names, weights)
    encoded = [_encoded(tokenizer, name, sources[name], length, prepend_bos) for name in names]
    fits = [len(ids) // body for ids, body, _ in encoded]
    for name, fit, (ids, _, _) in zip(names, fits, encoded, strict=True):
        if fit < 1:
            raise CalibrationError(
                f"The calibration source {name!r} has {len(ids)} tokens, less than one window of {length}. Add text to "
                f"it, leave it out, or make windows shorter."
            )
    shares = _largest(parts, fits, at_most) if count is None else shares_of(parts, count)
    for name, share, fit in zip(names, shares, fits, strict=True):
        if share > fit:
            raise CalibrationError(
                f"The calibration source {name!r} holds {fit} windows of {length} tokens; its share of {sum(shares)} "
                f"is {share}. Add text to it, ask for fewer or shorter windows, or give it a smaller weight."
            )
    rows = [cut(ids, share, body, bos) for share, (ids, body, bos) in zip(shares, encoded, strict=True)]
    # Window i of n stands at (i + ½) / n of the way, so that every stretch holds all sources in their shares.
    turns = sorted(((2 * i + 1) / share, source, i) for source, share in enumerate(shares) for i in range(share))
    return torch.stack([rows[source][i] for _, source, i in turns])


def shares_of(parts: Sequence[float], count: int) -> list[int]:
    """Split ``count`` windows in proportion to ``parts``, by largest remainders, at least one for each.

    Raises:
        CalibrationError: there are fewer windows than parts.
    """
    if count < len(parts):
        raise CalibrationError(f"{count} windows cannot hold {len(parts)} sources. Ask for {len(parts)} or more.")
    exact = [part / sum(parts) * count for part in parts]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) != count:  # the source furthest below, or above, its exact share
        step = 1 if sum(shares) < count else -1
        free = [i for i, share in enumerate(shares) if step > 0 or share > 1]
        shares[max(free, key=lambda i: step * (exact[i] - shares[i]))] += step
    return shares


def _largest(parts: list[float], fits: list[int], at_most: int | None) -> list[int]:
    """The shares of the largest mix that no source is too short for."""
    least = len(parts)
    most = min(sum(fits), max(at_most or sum(fits), least))
    for count in range(most, least, -1):
        shares = shares_of(parts, count)
        if all(share <= fit for share, fit in zip(shares, fits, strict=True)):
            return shares
    return [1] * least


def _parts(names: list[str], weights: Mapping[str, float] | None) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    if set(weights) != set(names) or not all(is_number(weights[name]) and weights[name] > 0 for name in names):
        raise CalibrationError(
            f"weights gives every source a number above 0, and no others. Sources: {', '.join(map(repr, names))}; "
            f"weights: {dict(weights)}."
        )
    return [float(weights[name]) for name in names]


def _encoded(tokenizer: Any, name: str, source: Any, length: int, bos: bool) -> tuple[list[int], int, int | None]:
    if isinstance(source, Tensor | Mapping):
        raise CalibrationError(
            f"The calibration source {name!r} is a {type(source).__name__}. A source is a text, texts or rows; to mix "
            f"token windows, join them yourself: torch.cat([...])."
        )
    try:
        return encode(tokenizer, source, length, bos)
    except CalibrationError as error:
        raise CalibrationError(f"The calibration source {name!r}: {error}") from error
