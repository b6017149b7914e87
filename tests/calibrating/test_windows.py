"""Token windows from texts."""

from __future__ import annotations

import pytest
import torch

from kvslim.calibrating.windows import check_windows, windows_from_texts
from kvslim.errors import CalibrationError


class Letters:
    """One token per character."""

    bos_token_id: int | None = 1

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [ord(letter) for letter in text]}


def test_windows_are_in_order_apart_and_spread_to_the_end() -> None:
    windows = windows_from_texts(Letters(), ["abcde", "fghij"], length=3, count=3)
    assert ["".join(map(chr, row)) for row in windows.tolist()] == ["abc", "def", "hij"]
    assert windows.dtype == torch.long


def test_beginning_token_takes_one_place() -> None:
    windows = windows_from_texts(Letters(), "abcdefgh", length=5, count=2, prepend_bos=True)
    assert windows.tolist() == [[1, *map(ord, "abcd")], [1, *map(ord, "efgh")]]


def test_as_many_as_fit() -> None:
    assert windows_from_texts(Letters(), "a" * 35, length=10).shape == (3, 10)
    assert windows_from_texts(Letters(), "a" * 35, length=10, at_most=2).shape == (2, 10)


def test_too_short_says_what_is_there_and_what_is_needed() -> None:
    with pytest.raises(CalibrationError, match=r"have 7 tokens; 2 windows of 4 need 8"):
        windows_from_texts(Letters(), "abcdefg", length=4, count=2)
    with pytest.raises(CalibrationError, match=r"have 0 tokens; 1 windows of 4 need 4"):
        windows_from_texts(Letters(), [], length=4)


def test_no_beginning_token() -> None:
    tokenizer = Letters()
    tokenizer.bos_token_id = None
    with pytest.raises(CalibrationError, match="no bos_token_id"):
        windows_from_texts(tokenizer, "abcdefg", length=4, prepend_bos=True)


@pytest.mark.parametrize("texts", ["", "abc", ["abc", "def"], []])
def test_texts_without_a_tokenizer(texts: object) -> None:
    with pytest.raises(CalibrationError, match="need the model's tokenizer"):
        windows_from_texts(None, texts, length=4)


@pytest.mark.parametrize("texts", [None, 7, [1, 2, 3], [b"abc"]])
@pytest.mark.parametrize("tokenizer", [None, Letters()])
def test_what_is_no_text(texts: object, tokenizer: object) -> None:
    with pytest.raises(CalibrationError, match="Calibration is a text"):
        windows_from_texts(tokenizer, texts, length=4)


@pytest.mark.parametrize(
    "bad", [torch.zeros(4, dtype=torch.long), torch.zeros(2, 4), torch.zeros(0, 4, dtype=torch.long)]
)
def test_windows_of_a_wrong_form(bad: torch.Tensor) -> None:
    with pytest.raises(CalibrationError, match="integers of shape"):
        check_windows(bad, 100)


def test_token_ids_beyond_the_vocabulary() -> None:
    with pytest.raises(CalibrationError, match=r"0\.\.99; the windows hold 3\.\.100"):
        check_windows(torch.tensor([[3, 100]]), 100)
