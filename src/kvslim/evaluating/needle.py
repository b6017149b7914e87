"""Needle retrieval through the compressed cache: one sentence with a number, hidden in a long text, is asked for.

The form is that of RULER's single needle (Hsieh et al. 2024): haystack, depth, question, and the start of the answer
given. The haystack is prefilled and compressed *before* the question is fed, so that both the question and the answer
read the compressed cache and nothing else.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvslim.attending.compat import cache_keyword
from kvslim.attending.families import text_config
from kvslim.caching.compressed import CompressedCache
from kvslim.config import JsonConfig, is_count, is_list
from kvslim.errors import ConfigError
from kvslim.evaluating.continuation import cache_bytes, fill_and_compress, prefill, share_prefill
from kvslim.evaluating.method_forms import CacheMethod, Method
from kvslim.evaluating.texts import TextSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str, int, int], None]

_PLACES = (
    "Accra", "Bergen", "Cusco", "Dakar", "Esbjerg", "Fresno", "Galway", "Hanoi", "Izmir", "Jaipur", "Kyoto", "Lisbon",
    "Malaga", "Nairobi", "Osaka", "Porto", "Quito", "Riga", "Salta", "Turin",
)  # fmt: skip
_INTRO = "A magic number is hidden in the following text. Memorize it; you will be asked for it afterwards."
_NEEDLE = "The magic number of {place} is {number}."
_QUESTION = "What is the magic number of {place} that the text above mentions?"
_ANSWER = "The magic number of {place} that the text mentions is"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class NeedleConfig(JsonConfig):
    """Which needles are asked for.

    Attributes:
        lengths: tokens of haystack, needle and what the chat template puts in front, at most; the compressed part.
        depths: places per length, from the first sentence boundary to the last, evenly by tokens.
        seeds: needles per length and depth, each with its own haystack, place name and number.
        max_new_tokens: length of an answer, at most.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: int = 5
    seeds: int = 2
    max_new_tokens: int = 16

    def __post_init__(self) -> None:
        if not is_list(self.lengths) or not self.lengths or not all(is_count(length) for length in self.lengths):
            raise ConfigError(f"lengths are numbers of tokens ≥ 1, such as (1024, 2048), not {self.lengths!r}.")
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))
        if not (is_count(self.depths) and is_count(self.seeds) and is_count(self.max_new_tokens)):
            raise ConfigError(
                f"depths, seeds and max_new_tokens are numbers ≥ 1, not {self.depths!r}, {self.seeds!r} and "
                f"{self.max_new_tokens!r}."
            )

    @property
    def places(self) -> tuple[float, ...]:
        """The depths as fractions: 0 is the beginning, 1 the end; one alone is in the middle."""
        return tuple(i / (self.depths - 1) for i in range(self.depths)) if self.depths > 1 else (0.5,)


@dataclass(frozen=True)
class NeedlePrompt:
    """One haystack with its needle.

    Attributes:
        length: asked for, tokens.
        depth: asked for, fraction.
        seed: which of the seeds.
        number: what has to be found, digits.
        context: ``(1, t)`` int64 token ids that are prefilled and compressed, ``t ≤ length``.
        question: ``(1, q)`` int64 token ids that follow, up to where the number has to come.
    """

    length: int
    depth: float
    seed: int
    number: str
    context: Tensor
    question: Tensor


@dataclass(frozen=True)
class NeedleTrial:
    """One needle asked for through one cache.

    Attributes:
        length, depth, seed, number: of the prompt.
        tokens: of the compressed part.
        answer: what the model wrote.
        found: whether the first number in the answer is the needle's, digit by digit.
        ratio: measured, bf16 bytes over bytes of the compressed prefix; 1 for the uncompressed cache.
    """

    length: int
    depth: float
    seed: int
    number: str
    tokens: int
    answer: str
    found: bool
    ratio: float


class Haystack:
    """The sentences of a text, with their lengths in tokens.

    Raises:
        ConfigError: the text has fewer than two sentences.
    """

    def __init__(self, text: TextSource, tokenizer: Any) -> None:
        self.origin = text.origin
        self.tokenizer = tokenizer
        self.sentences = [" ".join(part.split()) for part in _SENTENCE_END.split(text.text) if part.split()]
        if len(self.sentences) < 2:
            raise ConfigError(f"The haystack {text.origin} has no sentences. Give a text in prose.")
        coded = tokenizer([f" {s}" for s in self.sentences], add_special_tokens=False, verbose=False)["input_ids"]
        self.tokens = [len(ids) for ids in coded]

    def prompt(self, length: int, depth: float, seed: int) -> NeedlePrompt:
        """A prompt whose compressed part has at most ``length`` tokens, and nearly as many.

        Equal arguments give equal prompts.

        Raises:
            ConfigError: the text is too short for this length, or the length for the prompt.
        """
        rng = random.Random(f"{length} {depth:.6f} {seed}")
        place, number = rng.choice(_PLACES), str(rng.randrange(10**6, 10**7))
        empty, _ = self._coded([], depth, place, number)
        room = length - empty.shape[1]
        if room < 1:
            raise ConfigError(
                f"{length} tokens hold no haystack: the needle and its frame alone take {empty.shape[1]}. Use longer "
                "lengths."
            )
        chosen = self._stretch(rng, room, length)
        context, question = self._coded(chosen, depth, place, number)
        while (excess := context.shape[1] - length) > 0:
            chosen[-1:] = _shortened(*chosen[-1], excess)
            context, question = self._coded(chosen, depth, place, number)
        return NeedlePrompt(length, depth, seed, number, context, question)

    def _stretch(self, rng: random.Random, room: int, length: int) -> list[tuple[str, int]]:
        """Sentences in a row that fill ``room`` tokens, with their tokens; from a random one on, around the end."""
        if sum(self.tokens) < room:
            raise ConfigError(
                f"The haystack {self.origin} has {sum(self.tokens)} tokens, a prompt of {length} needs {room}. Use a "
                "longer text or shorter lengths."
            )
        start, chosen = rng.randrange(len(self.sentences)), list[tuple[str, int]]()
        while room > 0:
            index = (start + len(chosen)) % len(self.sentences)
            chosen.append((self.sentences[index], self.tokens[index]))
            room -= self.tokens[index]
        return chosen

    def _coded(self, chosen: Sequence[tuple[str, int]], depth: float, place: str, number: str) -> tuple[Tensor, Tensor]:
        sentences = [sentence for sentence, _ in chosen]
        sentences.insert(_boundary([n for _, n in chosen], depth), _NEEDLE.format(place=place, number=number))
        frame = f"{_INTRO}\n\n{' '.join(sentences)}"
        return self._rendered(frame, f"\n\n{_QUESTION.format(place=place)}", _ANSWER.format(place=place))

    def _rendered(self, frame: str, question: str, answer: str) -> tuple[Tensor, Tensor]:
        """Token ids in front of the question, and from it on. The two are tokenized apart, as they are fed apart."""
        chat = getattr(self.tokenizer, "chat_template", None) is not None
        text = f"{frame}{question}\n{answer}"
        if chat:
            message = [{"role": "user", "content": f"{frame}{question}"}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True) + answer
        cut = text.rindex(question)

        def coded(part: str, special: bool) -> Tensor:
            found = self.tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"]
            return torch.tensor([found], dtype=torch.long)

        return coded(text[:cut], not chat), coded(text[cut:], False)


def _shortened(sentence: str, tokens: int, excess: int) -> list[tuple[str, int]]:
    """The sentence without so many of its last words as have ``excess`` tokens, roughly; nothing if none is left."""
    words = sentence.split(" ")
    kept = min(len(words) - 1, round(len(words) * (1 - excess / max(tokens, 1))))
    return [(" ".join(words[:kept]), tokens * kept // len(words))] if kept > 0 else []


def _boundary(tokens: Sequence[int], depth: float) -> int:
    """The sentence boundary nearest to ``depth`` by tokens: the number of sentences in front of it."""
    ends = list(itertools.accumulate(tokens, initial=0))
    return min(range(len(ends)), key=lambda at: abs(ends[at] - depth * ends[-1]))


def first_number(answer: str) -> str | None:
    """The digits of the first number in ``answer``; commas between digits are not part of it."""
    found = re.search(r"\d[\d,]*", answer)
    return None if found is None else found[0].replace(",", "")


@torch.no_grad()
def answer_from(model: PreTrainedModel, tokenizer: Any, cache: Cache, prompt: NeedlePrompt, new_tokens: int) -> str:
    """Feed the question to the model on top of ``cache``, which holds the context, and decode greedily."""
    ids = torch.cat((prompt.context, prompt.question), dim=1).to(model.device)
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **{cache_keyword(model): cache},
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    answer: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answer


@torch.no_grad()
def ask(
    model: PreTrainedModel, tokenizer: Any, method: CacheMethod, prompt: NeedlePrompt, dense: DynamicCache, limit: int
) -> NeedleTrial:
    """Ask for one needle through ``method``'s cache.

    Args:
        model: in eval mode.
        tokenizer: its tokenizer.
        method: how the context is kept.
        prompt: haystack and question.
        dense: the uncompressed prefill of ``prompt.context``; left as it is.
        limit: new tokens, at most.

    Raises:
        ConfigError: the context is too short to be compressed, so that the uncompressed cache would be asked.
        BudgetError, NonFiniteError: of the method.
    """
    cache = method.make_cache(model)
    if isinstance(cache, CompressedCache):
        fill_and_compress(model, cache, dense, prompt.context)
        ratio = cache.report().ratio
    elif isinstance(cache, DynamicCache):
        cache, ratio = copy.deepcopy(dense), 1.0
    else:
        share_prefill(model, dense, cache, prompt.context)
        ratio = cache_bytes(dense) / cache_bytes(cache)
    answer = answer_from(model, tokenizer, cache, prompt, limit)
    found = first_number(answer) == prompt.number
    tokens = int(prompt.context.shape[1])
    return NeedleTrial(prompt.length, prompt.depth, prompt.seed, prompt.number, tokens, answer, found, ratio)


def check_needle(methods: Sequence[Method]) -> list[CacheMethod]:
    """The methods, all of them run-time caches.

    Raises:
        ConfigError: one of them changes the model.
    """
    chosen = [method for method in methods if isinstance(method, CacheMethod)]
    if len(chosen) < len(methods):
        names = ", ".join(method.name for method in methods if not isinstance(method, CacheMethod))
        raise ConfigError(f"{names}: needles are asked for through run-time caches only (none, int4, rot4, jolt-3x …).")
    return chosen


@torch.no_grad()
def run_needles(
    model: PreTrainedModel,
    tokenizer: Any,
    methods: Sequence[CacheMethod],
    config: NeedleConfig,
    text: TextSource,
    progress: Progress | None = None,
) -> dict[str, list[NeedleTrial]]:
    """Ask for every needle through every method's cache: per method its trials, by length, depth and seed.

    Raises:
        ConfigError: the text is too short, or the lengths do not fit the model's context.
        UnsupportedModelError, BudgetError, NonFiniteError: of the model and the methods.
    """
    haystack = Haystack(text, tokenizer)
    for method in methods:
        method.make_cache(model)  # so that a model it does not support shows before any work
    limit = getattr(text_config(model), "max_position_embeddings", None)
    wanted = [(n, depth, seed) for n in config.lengths for depth in config.places for seed in range(config.seeds)]
    trials: dict[str, list[NeedleTrial]] = {method.name: [] for method in methods}
    for done, (length, depth, seed) in enumerate(wanted):
        prompt = haystack.prompt(length, depth, seed)
        needed = prompt.context.shape[1] + prompt.question.shape[1] + config.max_new_tokens
        if limit is not None and needed > limit:
            raise ConfigError(f"A prompt of {length} tokens needs {needed} with its answer; the model takes {limit}.")
        if progress is not None:
            progress(f"{length} tokens, depth {depth:.0%}, needle {seed + 1}", done, len(wanted))
        dense = DynamicCache(config=model.config)
        prefill(model, dense, prompt.context.to(model.device))
        for method in methods:
            trials[method.name].append(ask(model, tokenizer, method, prompt, dense, config.max_new_tokens))
    if progress is not None:
        progress("all needles asked for", len(wanted), len(wanted))
    return trials
