"""``kvslim compress --stream``, and the memory that it takes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from kvslim import palu
from kvslim.cli import app

WORDS = [f"w{index}" for index in range(126)]
OPTIONS = ("--rate", 0.5, "--window-length", 64, "--calibration-windows", 4, "--dtype", "float32")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def source(write_model: Callable[..., Path], tmp_path: Path) -> Path:
    folder = write_model()
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>").save_pretrained(folder)
    (tmp_path / "text.txt").write_text(" ".join(WORDS[(11 * i + i * i) % len(WORDS)] for i in range(600)))
    return folder


def test_the_same_model_with_and_without_stream(source: Path, tmp_path: Path) -> None:
    common = ("compress", source, "--calibration", tmp_path / "text.txt", *OPTIONS)
    streamed = call(*common, "-o", tmp_path / "streamed", "--stream", "--work-dir", tmp_path / "work")
    assert streamed.exit_code == 0, streamed.output
    assert "Kept 50.0%" in streamed.stdout
    plain = ("--ranks", "uniform", "--decomposition", "whitened")  # as --stream does unless told otherwise
    assert call(*common, *plain, "-o", tmp_path / "usual").exit_code == 0
    ids = torch.arange(2, 40)[None]
    ours, usual = palu.load(tmp_path / "streamed"), palu.load(tmp_path / "usual")
    assert torch.equal(ours(ids).logits, usual(ids).logits)
    assert ours.palu == usual.palu
    assert (tmp_path / "streamed" / "tokenizer.json").is_file()
    assert not (tmp_path / "work").exists()
    again = call(*common, "-o", tmp_path / "streamed", "--stream")
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_options_that_do_not_go_together(source: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    for arguments, words in (
        ((source, "--restart"), "Add --stream"),
        ((source, "--work-dir", tmp_path / "w"), "Add --stream"),
        ((source, "--stream", "--eval-text", tmp_path / "text.txt"), "Measure the result afterwards"),
        (("someone/model", "--stream"), "Download it first"),
        ((source, "--stream", "--ranks", "spectral"), "need gradients"),
    ):
        result = call("compress", *arguments, *out)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"]


PEAK = r"""
import re, sys
from pathlib import Path
import torch
from kvslim.palu import PaluConfig
from kvslim.streaming.compressing import compress_checkpoint

def peak():
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024

config = PaluConfig(rate=0.5, group_size=1, ranks="uniform", decomposition="whitened")
windows = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(0))
compress_checkpoint(sys.argv[1], sys.argv[2], config, windows)
print(peak())  # of the same model with few layers, so that imports count for nothing
compress_checkpoint(sys.argv[3], sys.argv[4], config, windows)
print(peak())
"""


def large_model(folder: Path, layers: int) -> int:
    """A random checkpoint in bfloat16, and its bytes."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (512, 512), "model.norm": (512,)}
    for layer in range(layers):
        within = {
            "self_attn.q_proj": (512, 512), "self_attn.k_proj": (128, 512), "self_attn.v_proj": (128, 512),
            "self_attn.o_proj": (512, 512), "mlp.gate_proj": (4096, 512), "mlp.up_proj": (4096, 512),
            "mlp.down_proj": (512, 4096), "input_layernorm": (512,), "post_attention_layernorm": (512,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in within.items()}
    drawn = torch.Generator().manual_seed(0)
    tensors = {f"{k}.weight": (torch.randn(v, generator=drawn) * 0.02).bfloat16() for k, v in shapes.items()}
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of the resident memory from /proc")
def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    large_model(tmp_path / "small", 2)
    size = large_model(tmp_path / "large", 30)
    assert size > 400_000_000
    folders = [tmp_path / name for name in ("small", "small-out", "large", "large-out")]
    done = subprocess.run([sys.executable, "-c", PEAK, *folders], capture_output=True, text=True, check=True)
    before, after = map(int, re.findall(r"\d+", done.stdout))
    assert after - before < size / 8
