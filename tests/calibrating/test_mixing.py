"""Mixes of calibration sources: shares, order, and what is too short."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from kvslim import palu
from kvslim.calibrating.mixing import mixed_windows, shares_of, windows_of
from kvslim.calibrating.windows import windows_from_texts
from kvslim.errors import CalibrationError


class Letters:
    """One token per character."""

    bos_token_id: int | None = 1

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def letters(windows: torch.Tensor) -> list[str]:
    return ["".join(map(chr, row)) for row in windows.tolist()]


def test_sources_take_turns_in_equal_shares() -> None:
    sources = {"one": "abcdefgh", "two": ["ABCD", "EFGHIJKL"]}
    assert letters(mixed_windows(Letters(), sources, 2, count=6)) == ["ab", "AB", "de", "FG", "gh", "KL"]
    assert letters(windows_of(Letters(), sources, 4)) == ["abcd", "ABCD", "efgh", "IJKL"]  # the shorter one limits
    assert letters(mixed_windows(Letters(), sources, 4, at_most=2)) == ["abcd", "ABCD"]
    assert mixed_windows(Letters(), sources, 3, count=2, prepend_bos=True)[:, 0].tolist() == [1, 1]


def test_weights_are_shares() -> None:
    sources = {"one": "a" * 40, "two": "B" * 40}
    mixed = letters(mixed_windows(Letters(), sources, 2, count=8, weights={"one": 3, "two": 1}))
    assert mixed == ["aa", "aa", "BB", "aa", "aa", "aa", "BB", "aa"]
    shorter = {**sources, "two": "BB"}  # its one window is a quarter of up to six, rounded
    assert letters(mixed_windows(Letters(), shorter, 2, weights={"one": 3, "two": 1})).count("aa") == 5
    for wrong in ({"one": 1}, {"one": 1, "two": 0}, {"one": 1, "two": 1, "three": 1}, {"one": 1, "two": float("nan")}):
        with pytest.raises(CalibrationError, match="every source a number above 0"):
            mixed_windows(Letters(), sources, 2, weights=wrong)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 300))
def test_shares_add_up_and_are_near_their_part(parts: list[float], more: int) -> None:
    count = len(parts) + more
    shares = shares_of(parts, count)
    assert sum(shares) == count
    assert min(shares) >= 1
    exact = [part / sum(parts) * count for part in parts]
    if min(exact) >= 1:
        assert all(abs(share - part) < 1 + 1e-9 for share, part in zip(shares, exact, strict=True))


def test_a_source_that_is_too_short_is_named() -> None:
    sources = {"prose": "a" * 40, "code": "BBB"}
    with pytest.raises(CalibrationError, match=r"'code' has 3 tokens, less than one window of 4"):
        mixed_windows(Letters(), sources, 4)
    with pytest.raises(CalibrationError, match=r"'code' holds 1 windows of 3 tokens; its share of 4 is 2"):
        mixed_windows(Letters(), sources, 3, count=4)
    with pytest.raises(CalibrationError, match="1 windows cannot hold 2 sources"):
        mixed_windows(Letters(), sources, 3, count=1)
    with pytest.raises(CalibrationError, match="no sources"):
        mixed_windows(Letters(), {}, 3)
    with pytest.raises(CalibrationError, match=r"source 'code': .*this holds int"):
        mixed_windows(Letters(), {"prose": "a" * 40, "code": [3]}, 3)
    with pytest.raises(CalibrationError, match=r"source 'ids' is a Tensor"):
        mixed_windows(Letters(), {"ids": torch.ones(2, 3)}, 3)


def test_rows_of_a_data_set() -> None:
    rows = [{"text": "abcd", "url": 1}, {"instruction": "e", "input": "", "output": "h"}]
    assert letters(windows_from_texts(Letters(), iter(rows), 4)) == ["abcd", "e\n\nh"]
    rows = [{"instruction": "a", "input": "b", "output": "c"}]
    assert letters(windows_of(Letters(), {"chat": iter(rows)}, 7)) == ["a\n\nb\n\nc"]
    for wrong in (
        {"words": "abcd"},
        {"text": None},
        {"instruction": "a"},
        {"instruction": "a", "input": 5, "output": ""},
    ):
        with pytest.raises(CalibrationError, match=r"row has the field 'text'.*this one has"):
            windows_from_texts(Letters(), [wrong], 4)


def test_every_form_reaches_compression(tiny_llama: PreTrainedModel) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 8
    config = palu.PaluConfig(rate=0.5)

    def kept(calibration: Any, **options: Any) -> torch.Tensor:
        slim = palu.compress(copy.deepcopy(tiny_llama), Letters(), config, calibration, window_length=50, **options)
        return slim.model.layers[1].self_attn.k_latent.down.weight

    own = kept(text)
    for same in ([text], iter([{"text": text}]), {"only": [text]}, windows_from_texts(Letters(), text, 50)):
        assert torch.equal(kept(same), own)
    assert not torch.equal(kept({"one": text, "two": text[::-1]}), own)
    with pytest.raises(CalibrationError, match="352 tokens; 1 windows of 400 need 400"):
        palu.compress(tiny_llama, Letters(), config, text, window_length=400)
