"""One evaluation from text to results: cut the windows, prepare Palu, measure, note everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvslim.config import JsonConfig
from kvslim.errors import ConfigError
from kvslim.evaluating.compare import Progress, compare, palu_variants, with_one_pass
from kvslim.evaluating.continuation import ContinuationConfig, Steps
from kvslim.evaluating.graded_methods import bind
from kvslim.evaluating.method_forms import Method
from kvslim.evaluating.methods import check_methods
from kvslim.evaluating.results import EvalResults, ModelFingerprint
from kvslim.evaluating.texts import TextSource, check_apart, python_topics
from kvslim.evaluating.windows import bos_token, evenly_spaced_windows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvslim.calibrating.graded_stats import GradedStats


@dataclass(frozen=True)
class EvalConfig(JsonConfig):
    """How much is measured.

    Attributes:
        tokens, score, steps: the protocol's, see :class:`~kvslim.evaluating.continuation.ContinuationConfig`.
        windows: test windows, spread evenly over the text.
        bos: start every window with the tokenizer's beginning-of-text token.
        one_pass: add the one-pass perplexity over the test windows, for the uncompressed model and Palu.
        calibration_windows: windows to calibrate Palu and graded caches on.
        calibration_length: tokens of each.
    """

    tokens: int = 2048
    score: int = 256
    steps: Steps = "block"
    windows: int = 12
    bos: bool = False
    one_pass: bool = False
    calibration_windows: int = 16
    calibration_length: int = 2048

    def __post_init__(self) -> None:
        self.continuation  # noqa: B018  # checks its own fields
        if min(self.windows, self.calibration_windows) < 1 or self.calibration_length < 2:
            raise ConfigError("Numbers of windows are at least 1, and the calibration length is at least 2.")

    @property
    def continuation(self) -> ContinuationConfig:
        return ContinuationConfig(self.tokens, self.score, self.steps)


def evaluate(
    model: PreTrainedModel,
    tokenizer: Any,
    name: str,
    methods: Sequence[Method],
    config: EvalConfig,
    *,
    text: TextSource | None = None,
    calibration: TextSource | None = None,
    stats: GradedStats | None = None,
    progress: Progress | None = None,
) -> EvalResults:
    """Measure ``methods`` on ``text``; the model is left as it was.

    Args:
        model: an uncompressed model in eval mode.
        tokenizer: its tokenizer.
        name: what to call the model in the results.
        methods: what to measure.
        config: how much.
        text: test text; ``None`` takes Python's reference topics.
        calibration: other text that Palu and graded caches are calibrated on.
        stats: statistics for graded caches that are there already; they are not compared with the test text.
        progress: called with what is done, steps done, steps in all.

    Raises:
        ConfigError: a text is too short, Palu lacks calibration text or would be calibrated on the test text, or
            there is no beginning-of-text token.
        UnsupportedModelError, BudgetError, NonFiniteError: of the model and the methods.
    """
    check_methods(methods, calibrated=calibration is not None or stats is not None)
    check_apart(text, calibration)
    bos = bos_token(tokenizer) if config.bos else None
    protocol = config.continuation
    text = text or python_topics(tokenizer, config.windows * protocol.window)[0]
    windows = evenly_spaced_windows(text.tokens(tokenizer), config.windows, protocol.window, bos)
    count, length = config.calibration_windows, config.calibration_length
    learned = evenly_spaced_windows(calibration.tokens(tokenizer), count, length, bos) if calibration else None
    variants = palu_variants(model, methods, learned, progress)
    methods = bind(model, methods, learned, progress, stats)
    measured = compare(model, methods, windows, protocol, variants=variants, progress=progress)
    if config.one_pass:
        measured = with_one_pass(model, measured, windows, variants)
    return EvalResults(
        model=ModelFingerprint.of(name, model),
        text=text.origin,
        calibration=_origin(calibration, stats, f"{count} windows of {length} tokens"),
        settings=config.to_dict(),
        methods=tuple(measured),
    )


def _origin(calibration: TextSource | None, stats: GradedStats | None, amount: str) -> str | None:
    """What the methods were calibrated on, in words."""
    parts = [f"{calibration.origin}: {amount}"] if calibration else []
    if stats is not None:
        parts.append(f"graded statistics of {stats.tables.tokens} tokens: {stats.origin or 'origin unknown'}")
    return "; ".join(parts) or None
