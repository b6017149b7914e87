from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvslim.cli import app
from kvslim.cli.generating import cache_method
from kvslim.errors import ConfigError, KvslimError, ModelSourceError
from kvslim.evaluating.needle_results import NeedleResults
from kvslim.evaluating.results import EvalResults

WORDS = [f"w{index}" for index in range(126)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Test text and calibration text of 3,000 known words each."""
    folder = tmp_path_factory.mktemp("texts")
    paths = folder / "test.txt", folder / "calibration.txt"
    for step, path in zip((7, 11), paths, strict=True):
        path.write_text(" ".join(WORDS[(step * index + index * index) % len(WORDS)] for index in range(3000)))
    return paths


@pytest.fixture
def model_dir(make_tiny, tmp_path: Path) -> Path:
    """A tiny model on disk, with a tokenizer of one token per word."""
    folder = tmp_path / "model"
    make_tiny().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>").save_pretrained(folder)
    return folder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the input was checked")

    for module in ("compressing", "evaluating", "generating", "needle"):
        monkeypatch.setattr(f"kvslim.cli.{module}.load_model", fail)


# ---- the commands at work --------------------------------------------------------------------------------------------


def test_eval(model_dir: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results.json"
    names = ["none", "int4", "jolt-2x:sinks=0:window=0", "palu-50", "palu-50:sequential"]
    result = call(
        *("eval", model_dir, "--methods", ",".join(names), "--text", texts[0], "--calibration", texts[1]),
        *("--tokens", 128, "--score", 16, "--windows", 2, "--calibration-windows", 4, "--calibration-length", 128),
        *("--bos", "--one-pass", "--out", out, "--plot"),
    )
    assert result.exit_code == 0, result.output
    stored = EvalResults.from_json(out.read_text())
    assert [one.method for one in stored.methods] == names
    assert stored.settings["tokens"] == 128
    assert stored.settings["bos"] is True
    assert stored.methods[0].kl < 1e-12
    assert [one.one_pass_perplexity is not None for one in stored.methods] == [True, False, False, True, True]
    assert stored.text == str(texts[0])
    assert str(texts[1]) in (stored.calibration or "")
    assert all(name.split(":")[0] in result.stdout for name in names)
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


def test_eval_without_a_difference_to_plot(model_dir: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    options = ("--tokens", 64, "--score", 8, "--windows", 1, "--text", texts[0])
    result = call("eval", model_dir, "--methods", "none", *options, "--out", out, "--plot")
    assert result.exit_code == 0, result.output
    assert "No plot" in result.stderr
    assert [one.method for one in EvalResults.from_json(out.read_text()).methods] == ["none"]
    assert not out.with_suffix(".png").exists()


def test_demo(model_dir: Path, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvslim.demo

    # The ratios of the demo need longer caches than a tiny model has time for: without the fixed costs they fit.
    monkeypatch.setattr(kvslim.demo, "METHODS", "none,int8,jolt-2x:sinks=0:window=0,jolt-3x,graded-4x,palu-30")
    out = tmp_path / "out"
    result = call("demo", "--model", model_dir, "--text", texts[0], "--tokens", 512, "--score", 16, "--out", out)
    assert result.exit_code == 0, result.output
    shown = json.loads((out / "demo.json").read_text())
    stored = EvalResults.from_json(json.dumps(shown["results"]))
    assert [one.family for one in stored.methods] == ["none", "integer", "jolt", "jolt", "graded", "palu"]
    assert (out / "demo.png").read_bytes()[:4] == b"\x89PNG"
    heard = next(one for one in stored.methods if one.method == "graded-4x")
    flat = " ".join(result.stdout.split())
    assert f"{heard.ratio:.2f}x smaller, measured" in flat
    assert shown["sentence"] in flat
    assert shown["continuation"]["method"] == "graded-4x"
    for side in ("uncompressed", "compressed"):
        assert shown["continuation"][side].split()[0] in flat
    assert f"from the {heard.ratio:.2f}x smaller" in flat
    assert f"{heard.agreement:.1%} of 16 tokens" in flat
    assert str(texts[0]) in flat.replace(" ", "") or texts[0].name in flat


def test_generate(model_dir: Path, texts: tuple[Path, Path]) -> None:
    options = ("generate", model_dir, "--prompt-file", texts[0], "--max-new-tokens", 8, "--dtype", "float32")
    exact, slim = call(*options, "--cache", "none"), call(*options, "--cache", "int8")
    assert exact.exit_code == slim.exit_code == 0, exact.output + slim.output
    assert len(re.findall(r"w\d+|<pad>|<s>", exact.stdout)) >= 6
    assert slim.stdout.split()[0] == exact.stdout.split()[0]  # made before the cache is compressed
    assert "uncompressed cache: 3007 tokens" in exact.stderr
    assert "compressed prefix: 3000 tokens" in slim.stderr


def test_generate_says_why_a_short_prompt_is_not_compressed(model_dir: Path) -> None:
    options = ("--cache", "jolt-8x:window=30", "--max-new-tokens", 4)
    with pytest.warns(UserWarning, match="too few for a ratio of 8"):
        result = call("generate", model_dir, "--prompt", " ".join(WORDS[:40]), *options)
    assert result.exit_code == 0, result.output
    assert "stays exact" in result.stderr


def test_generate_keeps_a_prompt_within_sinks_and_window_exact(model_dir: Path) -> None:
    result = call("generate", model_dir, "--prompt", "w1 w2 w3", "--cache", "jolt-3x:window=30", "--max-new-tokens", 4)
    assert result.exit_code == 0, result.output
    assert "stays exact" in result.stderr


def test_compress_to_codes_then_generate(model_dir: Path, tmp_path: Path) -> None:
    from kvslim import palu

    out = tmp_path / "slim"
    options = ("--decomposition", "svd", "--bits", 4, "--no-hadamard", "--sinks", 1, "--window", 2)
    result = call("compress", model_dir, "-o", out, "--rate", 0.5, *options)
    assert result.exit_code == 0, result.output
    assert "packs latents at 4 bits, without Hadamard" in result.stdout
    config = palu.load(out).palu.config
    assert (config.bits, config.hadamard, config.sinks, config.window) == (4, False, 1, 2)
    generated = call("generate", out, "--prompt", "w1 w2 w3", "--max-new-tokens", 4, "--cache", "none")
    assert generated.exit_code == 0, generated.output
    assert "at 4 bits" in generated.stderr
    assert call("compress", model_dir, "-o", tmp_path / "other", "--bits", 7).exit_code == 2


def test_compress_graded_then_generate(model_dir: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "slim"
    options = ("--calibration", texts[1], "--window-length", 128, "--rate", 0, "--graded", 3)
    result = call("compress", model_dir, "-o", out, *options)
    assert result.exit_code == 0, result.output
    assert "grades latents at 3 bits per channel" in result.stdout
    generated = call("generate", out, "--prompt", "w1 w2 w3", "--max-new-tokens", 4, "--cache", "none")
    assert generated.exit_code == 0, generated.output
    assert "bits" in generated.stderr
    for wrong in (("--bits", 4), ("--hadamard",), ("--stream", "--decomposition", "whitened")):
        assert call("compress", model_dir, "-o", tmp_path / "other", *options, *wrong).exit_code == 2


def test_compress_then_generate(model_dir: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "slim"
    options = ("--calibration", texts[1], "--window-length", 128, "--dtype", "float32")
    result = call("compress", model_dir, "-o", out, "--rate", 0.5, "--group-size", 1, "--ranks", "spectral",
                  "--decomposition", "loss-aware", "--plot", tmp_path / "ranks.png", *options)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Kept 50.0%" in result.stdout
    assert (tmp_path / "ranks.png").stat().st_size > 5_000
    assert "bits" not in result.stdout
    assert "Not measured" in (out / "README.md").read_text()
    options = ("generate", out, "--prompt", "w1 w2 w3", "--max-new-tokens", 4, "--dtype", "float32")
    generated = call(*options, "--cache", "none")
    assert generated.exit_code == 0, generated.output
    refused = call(*options, "--cache", "jolt")
    assert refused.exit_code == 2
    assert "--cache none" in refused.stderr
    assert call("eval", out).exit_code == 2
    again = call("compress", model_dir, "-o", out)
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_compress_measures_what_the_model_card_states(
    model_dir: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    out, options = tmp_path / "slim", ("--window-length", 128, "--dtype", "float32", "--bos", "--rate", 0.5)
    result = call("compress", model_dir, "-o", out, *options, "--calibration", texts[1], "--eval-text", texts[0])
    assert result.exit_code == 0, result.output
    stored = json.loads((out / "config.json").read_text())["kvslim"]["quality"]
    assert stored["text"] == "test.txt, 23 windows of 128 tokens"
    assert 0 < stored["perplexity_before"] != stored["perplexity"] > 0
    assert f"{stored['perplexity']:.3f} after" in result.stdout
    assert f"| perplexity | {stored['perplexity']:.6g} |" in (out / "README.md").read_text()
    same = call(
        "compress", model_dir, "-o", tmp_path / "x", *options, "--calibration", texts[0], "--eval-text", texts[0]
    )
    assert same.exit_code == 2
    assert "is the test text" in same.stderr


def test_compress_on_several_texts_in_sequence(
    model_dir: Path, texts: tuple[Path, Path], tmp_path: Path, stats_folder: Path
) -> None:
    from kvslim import palu

    rows = tmp_path / "rows.jsonl.xz"
    rows.write_bytes(lzma.compress(json.dumps({"text": texts[0].read_text()}).encode()))
    options = ("--calibration", texts[1], "--calibration", rows, "--window-length", 128, "--calibration-windows", 6,
               "--ranks", "uniform", "--decomposition", "whitened")  # fmt: skip
    result = call("compress", model_dir, "-o", tmp_path / "one", "--rate", 0.5, "--sequential", *options)
    assert result.exit_code == 0, result.output
    assert f"equal shares of {texts[1]}; {rows}, each layer behind" in " ".join(result.stdout.split())
    report = palu.load(tmp_path / "one").palu
    assert (report.config.sequential, report.calibration_tokens) == (True, 6 * 128)
    assert not stats_folder.exists()
    assert call("compress", model_dir, "-o", tmp_path / "two", "--no-stats-cache", *options).exit_code == 0
    assert not stats_folder.exists()
    assert call("compress", model_dir, "-o", tmp_path / "three", *options).exit_code == 0
    assert len(list(stats_folder.iterdir())) == 1
    short = tmp_path / "short.txt"
    short.write_text("w1 w2 w3")
    refused = call("compress", model_dir, "-o", tmp_path / "four", *options, "--calibration", short)
    assert refused.exit_code == 2
    assert "short.txt' has 3 tokens, less than one window of 128" in " ".join(refused.stderr.split())


def test_spectrum(model_dir: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "spectrum"
    result = call("spectrum", model_dir, "--text", texts[0], "--tokens", 64, "--bos", "--out", out)
    assert result.exit_code == 0, result.output
    stored = json.loads((out / "spectrum.json").read_text())
    assert stored["tokens"] == 64
    lines = result.stdout.splitlines()
    assert lines[: len(stored["findings"])] == stored["findings"]
    assert [line.partition(":")[0] for line in lines[len(stored["findings"]) :]] == [
        c["text"] for c in stored["claims"]
    ]
    assert (out / "spectrum.png").read_bytes()[:4] == b"\x89PNG"


def test_needle(model_dir: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "haystack.txt", tmp_path / "deep" / "needle.json"
    text.write_text(" ".join(f"{WORDS[i % 100]} {WORDS[(3 * i) % 100]}." for i in range(400)))
    options = ("--lengths", "300,400", "--depths", 3, "--seeds", 1, "--dtype", "float32")
    result = call("needle", model_dir, "--methods", "none,int8", "--text", text, *options, "--out", out)
    assert result.exit_code == 0, result.output
    stored = NeedleResults.from_json(out.read_text())
    assert [(score.method, len(score.trials)) for score in stored.scores] == [("none", 6), ("int8", 6)]
    assert stored.text == str(text)
    for score in stored.scores:
        (row,) = (line for line in result.stdout.splitlines() if line.split()[:1] == [score.method])
        assert row.split()[1:] == [f"{score.ratio:.2f}x", *(f"{score.found(n):.0%}" for n in (300, 400, None))]
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("eval MODEL --methods fancy", "Unknown method 'fancy'.*jolt-3x"),
        ("eval MODEL --methods jolt-0.9x", "ratio is at least 1"),
        ("eval MODEL --methods palu-30", "--calibration FILE"),
        ("eval MODEL --text nowhere.txt", "nowhere.txt cannot be read"),
        ("eval MODEL --tokens 0", "tokens and score"),
        ("eval MODEL --windows 0", "at least 1"),
        ("eval MODEL --dtype int8", "--dtype is one of"),
        ("eval MODEL --plot", "give --out"),
        ("eval MODEL --out FILE/results.json", "cannot be written"),
        ("eval MODEL --out r.png", "would be both"),
        ("eval MODEL --out r.PNG --plot", "would be both"),
        ("eval MODEL --out model.json --plot", "model.png is a directory"),
        ("eval MODEL --text FILE --calibration FILE", "is the test text"),
        ("eval MODEL --text FILE --calibration ./sub/../file", "is the test text"),
        ("eval MODEL --text FILE --calibration COPY", "is the test text"),
        ("eval FILE", "is a file"),
        ("eval ./no/such/model", "neither an existing directory nor a possible hub id"),
        ("generate MODEL --prompt x --ratio 0.9", "ratio is at least 1"),
        ("generate MODEL --prompt x --cache int4 --ratio 3", "ratio of its own"),
        ("generate MODEL --prompt x --cache palu-30", "kvslim compress"),
        ("generate MODEL", "no prompt"),
        ("generate MODEL --prompt x --max-new-tokens 0", "at least 1"),
        ("demo --model MODEL --out FILE", "cannot be written"),
        ("demo --model MODEL --text BINARY", "not UTF-8"),
        ("demo --model MODEL --text EMPTY", "is empty"),
        ("demo --tokens -1", "tokens and score"),
        ("spectrum MODEL --tokens 1", "at least 2"),
        ("spectrum MODEL --out FILE/deep", "cannot be written"),
        ("needle MODEL --methods palu-30:svd", "run-time caches only"),
        ("needle MODEL --lengths 10,x", "whole numbers with commas"),
        ("needle MODEL --lengths 0", "lengths are numbers of tokens"),
        ("needle MODEL --depths 0", "depths, seeds and max_new_tokens"),
        ("needle MODEL --text nowhere.txt", "cannot be read"),
        ("needle MODEL --out FILE/deep.json", "cannot be written"),
        ("needle MODEL --out n.png", "would be both"),
        ("needle MODEL --out model.json", "model.png is a directory"),
        ("compress MODEL -o OUT --rate 1", "rate is the fraction"),
        ("compress MODEL -o OUT --ranks magic", "uniform, fisher"),
        ("compress MODEL -o OUT --group-size 0", "group_size must be"),
        ("compress MODEL -o MODEL", "exists already"),
        ("compress MODEL -o OUT --calibration nowhere.txt", "cannot be read"),
    ],
)
def test_bad_input_is_one_line_before_a_model_is_loaded(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    no_model_is_loaded(monkeypatch)
    places = {"MODEL": model_dir, "OUT": tmp_path / "out"}
    for name, content in (("FILE", b"x"), ("COPY", b"x\n"), ("EMPTY", b" \n"), ("BINARY", b"\xff\xfe\x00")):
        places[name] = tmp_path / name.lower()
        places[name].write_bytes(content)
    for folder in ("model.png", "sub"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    pattern = "|".join(places)
    result = call(*(re.sub(pattern, lambda found: str(places[found[0]]), part) for part in arguments.split()))
    assert result.exit_code == 2
    assert re.search(words, result.stderr), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    assert not result.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("eval MODEL --text TEXT", r"The text has 3000 tokens, but 12 windows of 2305 need 27660.*at most 1"),
        ("eval MODEL --text TEXT --tokens 16 --score 8 --windows 1 --methods jolt-3x", "16 tokens are too few"),
        ("spectrum MODEL --text TEXT --tokens 4000", "3000 tokens"),
        ("demo --model MODEL --text TEXT", "has 3000 tokens, the demo needs 5121"),
        ("compress MODEL -o OUT --calibration TEXT --window-length 4000", "calibration texts have 3000 tokens"),
    ],
)
def test_texts_and_models_that_do_not_fit(
    model_dir: Path,
    texts: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": model_dir, "TEXT": texts[0], "OUT": tmp_path / "out"}
    result = call(*(places.get(part, part) for part in arguments.split()))
    assert result.exit_code == 2
    assert re.search(words, result.stderr, re.IGNORECASE), result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    ["demo --model no/such --out leftover", "eval no/such --out sub/deep/r.json", "spectrum no/such --out a/b"],
)
def test_a_failed_load_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelSourceError("no such model")

    monkeypatch.setattr("kvslim.cli.evaluating.load_model", fail)
    monkeypatch.chdir(tmp_path)
    assert call(*arguments.split()).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_error_itself() -> None:
    with pytest.raises(KvslimError, match="Unknown method"):
        CliRunner().invoke(app, ["--debug", "eval", "x", "--methods", "fancy"], catch_exceptions=False)


def test_cache_names() -> None:
    assert cache_method("jolt", None).name == "jolt-3x"
    assert cache_method("jolt", 2.5).settings["ratio"] == 2.5
    assert cache_method("jolt:post-rope", 4).settings["pre_rope"] is False
    assert cache_method("rot4", None).name == "rot4"
    with pytest.raises(ConfigError):
        cache_method("joltx", None)


@pytest.mark.parametrize("command", ["demo", "compress", "generate", "eval", "needle", "spectrum"])
def test_help_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"kvslim {command} " in result.stdout.partition("Examples:")[2].replace("\n", " ") + " "


def test_help_is_quick_because_it_loads_no_torch() -> None:
    code = "import sys; from kvslim.cli import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
