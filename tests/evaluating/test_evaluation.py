"""One evaluation, as called from Python."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from kvslim.errors import ConfigError
from kvslim.evaluating.evaluation import EvalConfig, evaluate
from kvslim.evaluating.methods import parse_methods
from kvslim.evaluating.texts import TextSource


def test_the_test_text_is_no_calibration_text(tiny_llama: PreTrainedModel) -> None:
    texts = {"text": TextSource("one text", "a.txt"), "calibration": TextSource("one  text\n", "b.txt")}
    with pytest.raises(ConfigError, match=r"b\.txt is the test text a\.txt"):
        evaluate(tiny_llama, None, "tiny", parse_methods("palu-30"), EvalConfig(), **texts)
