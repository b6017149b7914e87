"""The main job in a few minutes on a CPU: a small real model, a long text, every method measured, one of them heard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvslim.attending.compat import cache_keyword
from kvslim.config import JsonConfig
from kvslim.errors import ConfigError
from kvslim.evaluating.compare import MethodResult, compare, palu_variants
from kvslim.evaluating.continuation import ContinuationConfig, prefill, share_prefill
from kvslim.evaluating.graded_methods import bind
from kvslim.evaluating.method_forms import CacheMethod
from kvslim.evaluating.methods import parse_methods
from kvslim.evaluating.plots import plot_quality
from kvslim.evaluating.results import EvalResults, ModelFingerprint
from kvslim.evaluating.texts import TextSource, python_topics, read_text
from kvslim.evaluating.windows import evenly_spaced_windows
from kvslim.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]

METHODS = "none,int8,int4,rot4,jolt-2x,jolt-3x,jolt-4x,graded-3x,graded-4x,palu-30,palu-50"
HEARD = "graded-4x"
"""The method whose continuation is shown beside the uncompressed one."""

_QUESTION = "Explain in one sentence what the text above is about."


@dataclass(frozen=True)
class DemoConfig(JsonConfig):
    """How much the demo does.

    Attributes:
        tokens: tokens in the cache that is compressed.
        score: tokens scored through it.
        calibration_windows: windows that Palu and graded caches are calibrated on, fewer if the text is short.
        calibration_length: tokens of each.
        new_tokens: length of the continuations.
    """

    tokens: int = 3840
    score: int = 256
    calibration_windows: int = 8
    calibration_length: int = 1024
    new_tokens: int = 32

    def __post_init__(self) -> None:
        ContinuationConfig(self.tokens, self.score)
        if min(self.calibration_windows, self.new_tokens) < 1 or self.calibration_length < 2:
            raise ConfigError("Calibration windows and new tokens are counts ≥ 1, the calibration length is ≥ 2.")


@dataclass(frozen=True)
class Continuation:
    """The same prompt continued from two caches, greedily.

    Attributes:
        method: of the compressed cache.
        prompt: what was asked, in words.
        uncompressed: text from the uncompressed cache.
        compressed: text from the compressed cache.
        same_tokens: how many tokens the two share from the start.
        new_tokens: how many the uncompressed one has.
        report: the first lines of the compressed cache's report after the last token.
    """

    method: str
    prompt: str
    uncompressed: str
    compressed: str
    same_tokens: int
    new_tokens: int
    report: str


@dataclass(frozen=True)
class DemoResult:
    """Everything that the demo shows."""

    results: EvalResults
    continuation: Continuation
    sentence: str

    @property
    def heard(self) -> MethodResult:
        """The figures of the method that the continuation was made with."""
        return next(one for one in self.results.methods if one.method == self.continuation.method)

    def to_json(self) -> str:
        """``results`` as :meth:`EvalResults.to_json` writes them, ``continuation`` and ``sentence``."""
        shown = {
            "results": json.loads(self.results.to_json()),
            "continuation": asdict(self.continuation),
            "sentence": self.sentence,
        }
        return json.dumps(shown, indent=2, ensure_ascii=False) + "\n"


def demo_texts(tokenizer: Any, config: DemoConfig, text: Path | None) -> tuple[TextSource, Tensor, Tensor]:
    """The text's origin, the test window ``(1, T + N + 1)`` and the calibration windows; they share no token.

    Raises:
        ConfigError: the text is missing or too short.
    """
    window = config.tokens + config.score + 1
    if text is None:
        test, other = python_topics(tokenizer, window)
        ids, rest = test.tokens(tokenizer), other.tokens(tokenizer)
    else:
        test = read_text(text)
        ids = test.tokens(tokenizer)
        needed = window + config.calibration_length
        if len(ids) < needed:
            raise ConfigError(
                f"{text} has {len(ids)} tokens, the demo needs {needed}: {config.tokens} for the cache, "
                f"{config.score} + 1 to score, {config.calibration_length} to calibrate on. Use a longer text or "
                "fewer --tokens."
            )
        rest = ids[window:]
    count = min(config.calibration_windows, len(rest) // config.calibration_length)
    if count < 1:
        raise ConfigError(
            f"Only {len(rest)} tokens are left to calibrate on, {config.calibration_length} are needed. Use a longer "
            "text or fewer --tokens."
        )
    calibration = evenly_spaced_windows(rest, count, config.calibration_length)
    return test, torch.tensor([ids[:window]]), calibration


def run_demo(
    model: PreTrainedModel,
    tokenizer: Any,
    name: str,
    config: DemoConfig,
    text: Path | None = None,
    progress: Progress | None = None,
) -> DemoResult:
    """Measure all methods on one window of text, and continue a prompt from two caches.

    Raises:
        ConfigError: the text is missing or too short.
        UnsupportedModelError: the model is of no supported family.
    """
    source, window, calibration = demo_texts(tokenizer, config, text)
    methods = parse_methods(METHODS)
    variants = palu_variants(model, methods, calibration, progress)
    methods = bind(model, methods, calibration, progress)
    heard = next(method for method in methods if method.name == HEARD)
    assert isinstance(heard, CacheMethod)  # a constant
    protocol = ContinuationConfig(config.tokens, config.score)
    measured = compare(model, methods, window, protocol, variants=variants, progress=progress)
    continuation = _continue(model, tokenizer, heard, window[0, : config.tokens], config.new_tokens, progress)
    rows, length = calibration.shape
    results = EvalResults(
        model=ModelFingerprint.of(name, model),
        text=source.origin,
        calibration=f"{rows} windows of {length} tokens from the rest of the same source",
        settings={**config.to_dict(), "windows": 1, "steps": protocol.steps},
        methods=tuple(measured),
    )
    return DemoResult(results, continuation, _sentence(measured, config, continuation))


def save_demo(result: DemoResult, out: Path) -> list[Path]:
    """Write ``demo.json`` and ``demo.png`` to the directory ``out``, made if missing; return their paths.

    Raises:
        ConfigError: they cannot be written.
    """
    paths = [out / "demo.json", out / "demo.png"]
    write_atomically(paths[0], result.to_json().encode())
    settings = result.results.settings
    title = f"{result.results.model.name}: {settings['tokens']} tokens cached, {settings['score']} scored"
    plot_quality(result.results.methods, paths[1], title)
    return paths


def _continue(
    model: PreTrainedModel,
    tokenizer: Any,
    method: CacheMethod,
    text: Tensor,
    new_tokens: int,
    progress: Progress | None,
) -> Continuation:
    """Ask about the text, or continue it if the model has no chat template; both caches share one prefill."""
    prompt, ids = _prompt(tokenizer, text)
    dense, compressed = DynamicCache(config=model.config), method.make_cache(model)
    stages = ("continuing a prompt: prefill", "continuing it uncompressed", f"continuing it from {method.name}")
    _tell(progress, stages, 0)
    with torch.no_grad():
        prefill(model, dense, ids[:, :-1].to(model.device))
        share_prefill(model, dense, compressed, ids[:, :-1])
    texts = []
    for step, cache in enumerate((dense, compressed)):
        _tell(progress, stages, step + 1)
        texts.append(_generate(model, cache, ids, new_tokens))
    _tell(progress, stages, 3)
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    words = [tokenizer.decode(one, skip_special_tokens=True).strip() for one in texts]
    report = "\n".join(str(compressed.report()).splitlines()[:3])
    return Continuation(method.name, prompt, words[0], words[1], same, len(texts[0]), report)


def _tell(progress: Progress | None, stages: tuple[str, ...], done: int) -> None:
    if progress is not None:
        progress(stages[min(done, len(stages) - 1)], done, len(stages))


def _prompt(tokenizer: Any, text: Tensor) -> tuple[str, Tensor]:
    if getattr(tokenizer, "chat_template", None) is None:
        return "the text itself, continued", text[None]
    content = f"{tokenizer.decode(text)}\n\n{_QUESTION}"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(rendered, add_special_tokens=False, verbose=False, return_tensors="pt")["input_ids"]
    return f"the {len(text)} tokens of text, then: {_QUESTION}", ids


def _generate(model: PreTrainedModel, cache: Cache, ids: Tensor, new_tokens: int) -> list[int]:
    ids = ids.to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **{cache_keyword(model): cache},
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def _sentence(measured: list[MethodResult], config: DemoConfig, continuation: Continuation) -> str:
    """What the reader has seen, in one sentence made from the numbers."""
    by_name = {one.method: one for one in measured}
    dense, heard = by_name["none"], by_name[HEARD]
    return (
        f"With {continuation.method} the cache of {config.tokens} tokens took {heard.nbytes / 1e6:.1f} MB instead of "
        f"{dense.nbytes / 1e6:.1f} MB in bf16 ({heard.ratio:.2f}x smaller, measured), the model's next-token "
        f"prediction stayed the same for {heard.agreement:.1%} of {config.score} tokens with a perplexity of "
        f"{heard.perplexity:.2f} against {dense.perplexity:.2f}, and its answer was the same for "
        f"{continuation.same_tokens} of {continuation.new_tokens} tokens."
    )
