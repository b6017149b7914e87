"""Needles: the prompts are what they claim, the answer is read from the compressed cache, and scoring is exact."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from matplotlib import colormaps
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvslim.caching.compressed import CompressedCache
from kvslim.errors import ConfigError
from kvslim.evaluating.continuation import prefill
from kvslim.evaluating.methods import CacheMethod, parse_method, parse_methods
from kvslim.evaluating.needle import (
    Haystack,
    NeedleConfig,
    NeedleTrial,
    answer_from,
    ask,
    check_needle,
    first_number,
    run_needles,
)
from kvslim.evaluating.needle_results import NeedleResults, NeedleScore, plot_needles
from kvslim.evaluating.results import ModelFingerprint
from kvslim.evaluating.texts import TextSource, read_text

TEMPLATE = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}<answer>"


def letters(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, with ids that the tiny models know."""
    characters = "".join(map(chr, range(32, 126))) + "\n"
    tokenizer = Tokenizer(models.WordLevel({"?": 2, "<s>": 1, **{c: 3 + i for i, c in enumerate(characters)}}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")
    fast.chat_template = template
    return fast


def prose(sentences: int = 300) -> TextSource:
    words = ("ships", "sail", "slowly", "past", "the", "old", "harbour", "wall", "at", "noon")
    made = (" ".join(words[(i * j + j) % 10] for j in range(3 + i % 12)) for i in range(sentences))
    return TextSource(" ".join(f"{sentence.capitalize()}." for sentence in made), "made up")


@pytest.mark.parametrize("template", [TEMPLATE, None])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_needle_lies_where_it_was_put(template: str | None, depth: float) -> None:
    tokenizer = letters(template)
    prompt = Haystack(prose(), tokenizer).prompt(1000, depth, seed=3)
    context, question = tokenizer.decode(prompt.context[0]), tokenizer.decode(prompt.question[0])
    assert 985 < prompt.context.shape[1] <= 1000
    assert context.count(prompt.number) == 1
    assert prompt.number not in question
    assert context.startswith("<user>" if template else "A magic number")
    assert "?" in question
    assert question.rstrip().endswith("is")
    place = context[: context.index(prompt.number)].split()[-2]
    assert question.count(place) == 2
    hay = context.partition("\n\n")[2]
    at = hay.index(f"The magic number of {place}")
    assert at / (len(hay) - len(f"The magic number of {place} is {prompt.number}.")) == pytest.approx(depth, abs=0.06)


def test_prompts_repeat_and_differ() -> None:
    haystack = Haystack(prose(), letters())
    one, same = (haystack.prompt(800, 0.5, seed=0) for _ in range(2))
    assert torch.equal(one.context, same.context)
    others = [haystack.prompt(800, 0.5, seed=1), haystack.prompt(900, 0.5, seed=0), haystack.prompt(800, 0.6, seed=0)]
    assert len({prompt.number for prompt in [one, *others]}) == 4


def test_long_sentences_are_cut_to_fill_the_length() -> None:
    text = TextSource(" ".join(["word " * 400 + "end."] * 5), "long")
    for length in (600, 1500, 3333):
        assert length - 10 < Haystack(text, letters()).prompt(length, 0.5, 0).context.shape[1] <= length


@pytest.mark.parametrize(("length", "words"), [(9000, "needs"), (50, "hold no haystack")])
def test_texts_and_lengths_that_do_not_fit(length: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Haystack(prose(60), letters()).prompt(length, 0.5, 0)
    with pytest.raises(ConfigError, match="no sentences"):
        Haystack(TextSource("no end to this", "one"), letters())


def test_the_models_context_is_a_limit(make_tiny) -> None:
    model = make_tiny()
    model.config.max_position_embeddings = 500
    with pytest.raises(ConfigError, match=r"480 tokens needs \d+ with its answer; the model takes 500"):
        run_needles(model, letters(), [parse_method("none")], NeedleConfig((480,), 1, 1), prose())


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (" 1234567.", "1234567"),
        (" 1,234,567, as it says", "1234567"),
        ("not 12 but 1234567", "12"),
        (" 12345678", "12345678"),
        ("no idea", None),
    ],
)
def test_first_number(answer: str, number: str | None) -> None:
    assert first_number(answer) == number


@torch.no_grad()
def test_the_question_follows_the_context_exactly(make_tiny) -> None:
    """Fed on top of a cache or in one piece: the same answer."""
    tokenizer, tiny_llama = letters(), make_tiny(seed=2)
    prompt = Haystack(prose(), tokenizer).prompt(400, 0.5, 0)
    dense = DynamicCache(config=tiny_llama.config)
    prefill(tiny_llama, dense, prompt.context)
    whole = torch.cat((prompt.context, prompt.question), 1)
    expected = tiny_llama.generate(whole, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, whole.shape[1] :]
    assert len(set(expected.tolist())) > 3
    answer = answer_from(tiny_llama, tokenizer, dense, prompt, 12)
    assert answer == tokenizer.decode(expected, skip_special_tokens=True)
    assert dense.get_seq_length() == whole.shape[1] + 11


@pytest.mark.parametrize("name", ["none", "int8", "jolt-2x"])
def test_methods_do_not_disturb_each_other(tiny_llama: PreTrainedModel, name: str) -> None:
    text, config = prose(), NeedleConfig((500,), 2, 1)
    alone = run_needles(tiny_llama, letters(), [parse_method(name)], config, text)
    together = run_needles(tiny_llama, letters(), parse_methods("int2,none,jolt-2x,int8"), config, text)
    assert together[name] == alone[name]
    assert [len(trials) for trials in together.values()] == [2] * 4
    assert all(trial.ratio == 1.0 for trial in together["none"])
    assert all(trial.ratio >= 2 for trial in together["jolt-2x"])


def scramble(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what compression leaves of the text is noise; sinks stay, so attention still works."""
    compress = CompressedCache.compress

    def compress_and_scramble(cache: CompressedCache) -> None:
        compress(cache)
        assert cache.prefix is not None
        broken = cache.prefix.map(lambda t: torch.randint_like(t, 0, 255) if t.dtype == torch.uint8 else t)
        for layer in cache.compressible:
            layer.prefix = broken

    monkeypatch.setattr(CompressedCache, "compress", compress_and_scramble)


@torch.no_grad()
def test_the_answer_is_read_from_the_compressed_cache(
    tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, method = letters(), parse_method("int8")
    assert isinstance(method, CacheMethod)
    prompt = Haystack(prose(), tokenizer).prompt(500, 0.5, 0)
    dense = DynamicCache(config=tiny_llama.config)
    prefill(tiny_llama, dense, prompt.context)
    intact = ask(tiny_llama, tokenizer, method, prompt, dense, 16)
    scramble(monkeypatch)
    assert ask(tiny_llama, tokenizer, method, prompt, dense, 16).answer != intact.answer


class _Forgetful(Cache):
    """A cache of neither kind: it keeps no values and says that it is half as large."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(key_states, torch.zeros_like(value_states), layer_idx, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        return sum(2 * layer.keys.numel() for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class _Forgetting(CacheMethod):
    family, settings = "forgetting", None

    def make_cache(self, model: PreTrainedModel) -> Cache:
        return _Forgetful(layer_class_to_replicate=DynamicLayer)


@torch.no_grad()
def test_a_cache_of_another_library_is_asked_itself(tiny_llama: PreTrainedModel) -> None:
    tokenizer, method = letters(), parse_method("none")
    assert isinstance(method, CacheMethod)
    prompt = Haystack(prose(), tokenizer).prompt(500, 0.5, 0)
    dense = DynamicCache(config=tiny_llama.config)
    prefill(tiny_llama, dense, prompt.context)
    intact = ask(tiny_llama, tokenizer, method, prompt, dense, 16)
    forgetful = ask(tiny_llama, tokenizer, _Forgetting("forgetting"), prompt, dense, 16)
    assert (intact.ratio, forgetful.ratio) == (1, 2)
    assert forgetful.answer != intact.answer


def test_a_destroyed_cache_destroys_the_score(
    default_model_dir: Path, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvslim import models as real

    model, tokenizer = real.load(str(default_model_dir), dtype=torch.bfloat16)
    text, config = read_text(shared_dir / "data/haystack/austen_persuasion.txt"), NeedleConfig((512,), 3, 1)
    methods = check_needle(parse_methods("none,int8,jolt-2x"))
    intact = run_needles(model, tokenizer, methods, config, text)
    assert {name: [trial.found for trial in trials] for name, trials in intact.items()} == {
        name: [True] * 3 for name in ("none", "int8", "jolt-2x")
    }
    scramble(monkeypatch)
    destroyed = run_needles(model, tokenizer, methods[:2], config, text)
    assert all(trial.found for trial in destroyed["none"])
    assert not any(trial.found for trial in destroyed["int8"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lengths": ()}, "lengths are"),
        ({"lengths": (0,)}, "lengths are"),
        ({"lengths": 5}, "lengths are"),
        ({"depths": 0}, "depths, seeds"),
        ({"seeds": 0}, "depths, seeds"),
        ({"max_new_tokens": 1.5}, "depths, seeds"),
    ],
)
def test_bad_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NeedleConfig(**settings)


def test_depths_go_from_end_to_end() -> None:
    assert NeedleConfig(depths=5).places == (0, 0.25, 0.5, 0.75, 1)
    assert NeedleConfig(depths=1).places == (0.5,)
    assert NeedleConfig(lengths=(2048, 512, 2048)).lengths == (512, 2048)


def test_a_method_that_changes_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="palu-30:svd: needles"):
        check_needle(parse_methods("none,palu-30:svd"))


@pytest.fixture
def results(tiny_llama: PreTrainedModel) -> NeedleResults:
    def trials(ratio: float, *found: bool) -> tuple[NeedleTrial, ...]:
        places = [(length, depth) for length in (64, 128) for depth in (0.0, 1.0)]
        return tuple(
            NeedleTrial(length, depth, 0, "1", length, "", ok, ratio)
            for (length, depth), ok in zip(places, found, strict=True)
        )

    scores = (
        NeedleScore("none", "none", {}, trials(1.0, True, True, True, True)),
        NeedleScore("int2", "integer", {"bits": 2}, trials(6.4, True, False, False, False)),
    )
    return NeedleResults(ModelFingerprint.of("tiny", tiny_llama), "made up", NeedleConfig((64, 128), 2, 1), scores)


def test_scores_and_json(results: NeedleResults, tmp_path: Path) -> None:
    none, int2 = results.scores
    assert (none.found(), int2.found(), int2.found(64), int2.found(128), int2.found(64, 1.0)) == (1, 0.25, 0.5, 0, 0)
    results.save(tmp_path / "n.json")
    assert NeedleResults.from_json((tmp_path / "n.json").read_text()) == results
    assert '"found_by_length": {\n        "64": 0.5' in (tmp_path / "n.json").read_text()
    for broken in ("{", "{}", results.to_json().replace('"schema": 1', '"schema": 9')):
        with pytest.raises(ConfigError, match=r"no needle results|schema 9"):
            NeedleResults.from_json(broken)


def test_the_map_shows_what_was_found(results: NeedleResults, tmp_path: Path) -> None:
    plot_needles(results, tmp_path / "a.png")
    worse = dataclasses.replace(results, scores=(results.scores[1], results.scores[1]))
    plot_needles(worse, tmp_path / "b.png")

    def pixels(name: str, share: float) -> int:
        colour = tuple(int(255 * part) for part in colormaps["cividis"](share, bytes=False)[:3])
        near = Image.open(tmp_path / f"{name}.png").convert("RGB").getcolors(1 << 20) or []
        return sum(count for count, seen in near if max(abs(a - b) for a, b in zip(seen, colour, strict=True)) <= 1)

    light, dark = ([pixels(name, share) for name in "ab"] for share in (1.0, 0.0))
    assert light[0] > light[1] > 0
    assert dark[1] > dark[0] > 0
