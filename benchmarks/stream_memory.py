"""Memory that ``kvslim compress --stream`` takes for a checkpoint larger than the limit that it runs under.

    python benchmarks/stream_memory.py --work /tmp/big --out benchmarks/results/stream_memory.json

Writes a random Llama checkpoint in bfloat16, one layer per file so that it is never in memory, with a tokenizer of one
token per byte; compresses it in a process of its own; removes both. By default it has 2.0 billion parameters, 3.9 GB,
and windows are few and short: a core without bfloat16 units takes seconds for a layer and window.

Two figures are told apart. The peak is the most memory that the process ever had resident, as the system keeps count of
it (``VmHWM``; ``ru_maxrss`` would count what the parent had before the program was started): measured, not limited, and
the claim. ``RLIMIT_DATA`` is a limit of the system on private writable memory, in use or not: with it the process fails
at once where it asks for more. The limit on the whole address space (``RLIMIT_AS``) says nothing here: libraries
reserve gigabytes of addresses that are never touched. Works offline, on Linux.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvslim.evaluating.results import Environment
from kvslim.evaluating.texts import all_python_topics
from kvslim.files import write_atomically


def main() -> None:
    """Make the checkpoint, compress it, print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for both checkpoints; must not exist")
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--intermediate", type=int, default=6912)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--kv-heads", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--group-size", type=int, default=5)
    parser.add_argument("--limit", type=float, default=4.0, help="GB (10^9 bytes) of RLIMIT_DATA")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    args.work.mkdir(parents=True)
    try:
        parameters = make_checkpoint(args.work / "model", config_of(args))
        result: dict[str, Any] = {
            "settings": {name: value for name, value in vars(args).items() if name not in ("work", "out")},
            "parameters": parameters,
            "checkpoint_bytes": size_of(args.work / "model"),
            **measure(args),
            "environment": asdict(Environment.now()),
        }
        result["environment"]["command"] = result["environment"]["command"].replace(str(args.work), "WORK")
    finally:
        shutil.rmtree(args.work)
    print(json.dumps(result, indent=1))
    if args.out:
        write_atomically(args.out, json.dumps(result, indent=1).encode() + b"\n")


def config_of(args: argparse.Namespace) -> LlamaConfig:
    """The model that is made up."""
    return LlamaConfig(
        hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, vocab_size=args.vocab,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip


def make_checkpoint(folder: Path, config: LlamaConfig) -> int:
    """Write random weights, one file per layer, and return how many parameters there are."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    numbers = total = 0
    for number, shapes in enumerate(parts_of(config)):
        file = f"model-{number + 1:05d}-of-{config.num_hidden_layers + 1:05d}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator).mul_(0.02) if len(shape) > 1 else torch.ones(shape)
            tensors[name] = drawn.to(torch.bfloat16)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        numbers += sum(tensor.numel() for tensor in tensors.values())
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return numbers


def parts_of(config: LlamaConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, layer by layer, then those outside the layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    kv_features = config.num_key_value_heads * hidden // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        within = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_features, hidden),
            "self_attn.v_proj": (kv_features, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        yield {f"model.layers.{layer}.{name}.weight": shape for name, shape in within.items()}
    ends = {"model.embed_tokens": (config.vocab_size, hidden), "lm_head": (config.vocab_size, hidden)}
    yield {f"{name}.weight": shape for name, shape in {**ends, "model.norm": (hidden,)}.items()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compress in a process that may not take more private memory than the limit."""
    (args.work / "text.txt").write_text(all_python_topics().text[: 4 * args.windows * args.length])
    limit = int(args.limit * 1e9)
    start = time.perf_counter()
    peak = peak_of(
        args.work,
        f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit})); "
        "from kvslim.cli import main; main()",
        *("compress", args.work / "model", "-o", args.work / "slim", "--stream", "--rate", args.rate),
        *("--group-size", args.group_size, "--dtype", "bfloat16", "--calibration", args.work / "text.txt"),
        *("--calibration-windows", args.windows, "--window-length", args.length),
    )
    seconds = time.perf_counter() - start
    return {
        "rlimit_data_bytes": limit,
        "peak_rss_bytes": peak,
        "rss_of_imports_bytes": peak_of(
            args.work, "import kvslim.streaming.compressing, transformers.models.llama.modeling_llama"
        ),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "compressed_bytes": size_of(args.work / "slim"),
    }


def peak_of(work: Path, program: str, *arguments: object) -> int:
    """Most memory, in bytes, that a Python process ever has resident; it must succeed."""
    report = work / "peak.txt"
    ending = f"import shutil; shutil.copyfile('/proc/self/status', {str(report)!r})"
    code = f"try:\n {program}\nfinally:\n {ending}"
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True)
    return int(re.findall(r"VmHWM:\s+(\d+) kB", report.read_text())[0]) * 1024


def size_of(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
