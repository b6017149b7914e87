"""The session commands: save, look, go on; the second process computes only the new turn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvslim.cli import app
from kvslim.cli.sessions import _next_turn
from kvslim.errors import ConfigError
from kvslim.sessions import load_session

MakeTiny = Callable[..., PreTrainedModel]
WORDS = [f"w{index}" for index in range(120)]
SPECIAL = ["<pad>", "<s>", "<end>", "<user>", "<model>"]
TEMPLATE = (
    "<s> {% for m in messages %}{{ '<user> ' if m.role == 'user' else '<model> ' }}{{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<model> {% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE
    )


@pytest.fixture
def model_dir(make_tiny: MakeTiny, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_tiny().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text(" ".join(WORDS[(7 * index + index * index) % len(WORDS)] for index in range(400)))
    return path


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *[str(argument) for argument in arguments]])


@pytest.mark.parametrize("raw", [False, True])
def test_a_conversation_over_three_commands(model_dir: Path, prompt_file: Path, tmp_path: Path, raw: bool) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = ("--dtype", "float32", "--max-new-tokens", "6", *(["--raw"] if raw else []))
    done = call("save", model_dir, "-o", first, "--prompt-file", prompt_file, "--ratio", "2", *common)
    assert done.exit_code == 0, done.output
    assert re.search(r"x smaller in this file", done.stderr)
    shown = call("info", first)
    assert shown.exit_code == 0
    assert "llama with 2 layers" in shown.stdout
    assert "tokenizer recorded" in shown.stdout
    done = call("resume", first, model_dir, "--prompt", "w5 w6 w7", "-o", second, *common)
    assert done.exit_code == 0, done.output

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    before, after = (load_session(path, model, make_tokenizer()) for path in (first, second))
    assert before.input_ids is not None
    assert after.input_ids is not None
    asked = _next_turn(make_tokenizer(), before.input_ids, "w5 w6 w7", raw)
    expected = model.generate(
        asked, attention_mask=torch.ones_like(asked), past_key_values=before.cache, max_new_tokens=6, do_sample=False
    )
    assert torch.equal(after.input_ids, expected)
    assert after.cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("ended", [False, True])
def test_the_next_turn_is_what_the_template_would_have_made(ended: bool) -> None:
    tokenizer = make_tokenizer()
    talk = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    head = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True) + "w3"
    cached = tokenizer(head + (" <end>" if ended else ""), add_special_tokens=False, return_tensors="pt")["input_ids"]
    whole = tokenizer.apply_chat_template(
        [*talk, {"role": "user", "content": "w9"}], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert _next_turn(tokenizer, cached, "w9", raw=False)[0].tolist() == expected
    assert _next_turn(tokenizer, cached, "w9", raw=True)[0].tolist() == [
        *cached[0].tolist(),
        *tokenizer("w9")["input_ids"],
    ]
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="changes earlier answers"):
        _next_turn(tokenizer, cached, "w9", raw=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("info nowhere", "cannot be read"),
        ("resume nowhere MODEL --prompt w1", "cannot be read"),
        ("save MODEL -o OUT", "no prompt"),
        ("save MODEL -o OUT --prompt w1 --ratio 0.5", "ratio is at least 1"),
        ("save MODEL -o OUT --prompt w1 --max-new-tokens 0", "at least 1"),
        ("save MODEL -o OUT --prompt w1 --dtype int8", "--dtype is one of"),
        ("save ./nowhere/model -o OUT --prompt w1", "nowhere/model"),
        ("save MODEL -o MODEL --prompt w1", "is a directory"),
    ],
)
def test_bad_input_is_one_line_before_a_model_is_loaded(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded before the input was checked")

    monkeypatch.setattr("kvslim.cli.sessions.load_model", fail)
    places = {"MODEL": str(model_dir), "OUT": str(tmp_path / "out")}
    done = call(*[places.get(word, word) for word in arguments.split()])
    assert done.exit_code == 2, done.output
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_session_without_ids_cannot_be_resumed(model_dir: Path, prompt_file: Path, tmp_path: Path) -> None:
    done = call("save", model_dir, "-o", tmp_path / "s", "--prompt-file", prompt_file, "--dtype", "float32")
    assert done.exit_code == 0, done.output
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    load_session(tmp_path / "s", model).cache.save(tmp_path / "s")
    done = call("resume", tmp_path / "s", model_dir, "--prompt", "w1")
    assert done.exit_code == 2
    assert "has not the token ids" in done.stderr


def test_a_graded_conversation_from_calibration_to_the_next_turn(
    model_dir: Path, prompt_file: Path, tmp_path: Path
) -> None:
    text, stats, session = tmp_path / "text.txt", tmp_path / "stats.safetensors", tmp_path / "talk.session"
    text.write_text(" ".join(WORDS[(11 * index + index * index // 7) % len(WORDS)] for index in range(1200)))
    sizes = ("--windows", 8, "--length", 128, "--dtype", "float32")
    made = CliRunner().invoke(
        app, [str(part) for part in ("calibrate", model_dir, "-o", stats, "--calibration", text, *sizes)]
    )
    assert made.exit_code == 0, made.output
    assert "Calibrated on" in made.stdout
    options = ("--max-new-tokens", 4, "--dtype", "float32", "--raw", "--stats", stats)
    saved = call("save", model_dir, "-o", session, "--prompt-file", prompt_file, *options)
    assert saved.exit_code == 0, saved.output
    assert "graded" in call("info", session).stdout.lower()
    resumed = call("resume", session, model_dir, "--prompt", "w1 w2", *options)
    assert resumed.exit_code == 0, resumed.output
    without = call("resume", session, model_dir, "--prompt", "w1 w2", "--dtype", "float32")
    assert without.exit_code == 2
    assert "stats=" in without.stderr
    generated = CliRunner().invoke(
        app,
        [str(part) for part in ("generate", model_dir, "--prompt-file", prompt_file, "--cache", "graded", *options)],
    )
    assert generated.exit_code == 0, generated.output
    assert "compressed prefix: 400 tokens" in generated.stderr
    missing = CliRunner().invoke(app, ["generate", str(model_dir), "--prompt", "w1", "--cache", "graded"])
    assert missing.exit_code == 2
    assert "kvslim calibrate MODEL" in missing.stderr
