"""kvslim recover: train a compressed model, save it, go on after a break, and refuse what cannot work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvslim import palu
from kvslim.cli import app

WORDS = [f"w{index}" for index in range(125)]
QUICK = ("--rank", 4, "--steps", 4, "--batch-size", 2, "--max-length", 32)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def slim(make_tiny: Callable[..., PreTrainedModel], tmp_path: Path) -> Path:
    """A compressed model on disk, in float32, with data and a text beside it."""
    model = palu.compress(make_tiny(head_dim=8), None, palu.PaluConfig(decomposition="svd"))
    palu.save(model, tmp_path / "slim", make_tokenizer())
    make_tiny(head_dim=8).save_pretrained(tmp_path / "original")
    sentences = [" ".join(WORDS[(7 * n + n * n + k) % 125] for n in range(20)) for k in range(12)]
    rows = [{"instruction": "w1", "input": "", "output": sentence} for sentence in sentences]
    rows.append({**rows[0], "output": ""})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "text.txt").write_text(" ".join(sentences[:4]))
    return tmp_path / "slim"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["recover", *map(str, arguments)])


def test_recover(slim: Path, tmp_path: Path) -> None:
    rows, text, out, state = (tmp_path / name for name in ("rows.jsonl", "text.txt", "out", "state"))
    options = ("--data", rows, "--eval-text", text, "--checkpoint", state, "--targets", "latents,mlp", "--seed", 5)
    result = call(slim, "-o", out, *options, *QUICK)
    assert result.exit_code == 0, result.output
    assert "Perplexity before" in result.stdout
    assert "Perplexity after" in result.stdout
    assert "4 steps" in result.stdout
    assert "Left out 1 rows" in result.stdout
    before, after = palu.load(slim), palu.load(out)
    (record,) = after.palu.recoveries
    assert (record.config.targets, record.config.seed, record.steps) == (("latents", "mlp"), 5, 4)
    assert after.dtype is torch.float32
    assert not torch.equal(
        before.model.layers[0].self_attn.v_latent.down.weight, after.model.layers[0].self_attn.v_latent.down.weight
    )
    # From the state of the finished training the same model follows at once.
    again = call(slim, "-o", tmp_path / "again", "--data", rows, *options[4:], *QUICK)
    assert again.exit_code == 0, again.output
    repeated = palu.load(tmp_path / "again").state_dict()
    assert all(torch.equal(value, repeated[name]) for name, value in after.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("SLIM --data rows.jsonl -o out --rank 0", "rank is a whole number"),
        ("SLIM --data rows.jsonl -o out --targets keys", "latents, attention, mlp"),
        ("SLIM --data rows.jsonl -o out --dtype int8", "--dtype is one of"),
        ("SLIM --data nowhere.jsonl -o out", "nowhere.jsonl cannot be read"),
        ("SLIM --data rows.jsonl -o SLIM", "exists already"),
        ("SLIM --data rows.jsonl -o out --eval-text ./rows.jsonl", 'not {"text"'),
        ("SLIM --data text.txt -o out --eval-text ./text.txt", "is trained on"),
        ("original --data rows.jsonl -o out", "is not compressed"),
        ("rows.jsonl --data rows.jsonl -o out", "is a file"),
        ("SLIM --data rows.jsonl -o out --max-length 5000", "positions"),
        ("SLIM --data rows.jsonl -o out --template chat", "no chat template"),
    ],
)
def test_bad_input(slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*(str(slim) if part == "SLIM" else part for part in arguments.split()))
    assert result.exit_code == 2, result.output
    assert result.stderr.strip().startswith("kvslim: ")
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_peft(slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    result = call(slim, "--data", tmp_path / "rows.jsonl", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install 'kvslim[recovery]'" in result.stderr
