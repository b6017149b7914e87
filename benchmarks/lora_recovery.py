"""How much of what Palu costs in perplexity LoRA recovery takes back, for one model, one compression, several settings.

    python benchmarks/lora_recovery.py --model DIR --calibration valid.txt --test wiki.test.raw \
        --data alpaca=alpaca.jsonl code=code.jsonl --run data=alpaca+code --run data=alpaca+code,epochs=3,lr=1e-3

The model is compressed once, as in palu_table.py: float32, TF32 off, calibrated on up to 256 windows of 2048 tokens,
and measured on the test text in windows of 2048. Every run starts from this same compressed model, trains, and is
measured in the same way. ``recovered`` is the share of the loss that is taken back:
``(compressed - after) / (compressed - uncompressed)``. Part of it may be no recovery but that the data is nearer to
the test text than what the model was trained on last: run the same with ``--rate 0`` to see how much.

A run is given as ``name=value`` pairs with commas between them. ``data`` are sources with ``+`` between them, and so
are ``targets``; ``lr`` is the learning rate; all other names are settings of kvslim.recovery.RecoveryConfig. The JSON
file is written after every run, so that one that is cut short is of use. Works offline, on CUDA if present.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from palu_table import calibration_windows, perplexity, provenance, test_windows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvslim import palu
from kvslim.errors import CalibrationError, ConfigError
from kvslim.recovery import RecoveryConfig, read_rows, recover

_SHORT = {"lr": "learning_rate", "batch": "batch_size", "length": "max_length"}


def parse_run(words: str, sources: dict[str, Path]) -> tuple[list[str], RecoveryConfig]:
    """The sources and settings that one ``--run`` names."""
    names, fields = list(sources), {}
    for pair in words.split(","):
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--run takes name=value pairs with commas between them, not {pair!r}.")
        if name == "data":
            names = value.split("+")
        elif name == "targets":
            fields["targets"] = value.split("+")
        else:
            try:
                fields[_SHORT.get(name, name)] = json.loads(value)
            except ValueError:
                fields[_SHORT.get(name, name)] = value
    if unknown := set(names) - set(sources):
        raise ConfigError(f"--data has no {', '.join(sorted(unknown))}; it has {', '.join(sources)}.")
    return names, RecoveryConfig.from_dict(fields)


def measure(
    model: PreTrainedModel, tokenizer: Any, rows: list[Any], config: RecoveryConfig, test: Tensor, args: Any
) -> dict[str, Any]:
    """Train on ``rows``, measure, and put the weights back."""
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    report, start = model.palu, time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    try:
        done = recover(model, tokenizer, rows, config)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    seconds = time.perf_counter() - start
    value = perplexity(model, test, args.batch_size)
    model.load_state_dict(saved)
    model.palu = report
    return {
        "config": config.to_dict(), "perplexity": value, "seconds": seconds, "steps": done.steps,
        "sequences": done.sequences, "tokens": done.tokens, "truncated": done.truncated, "skipped": done.skipped,
        "parameters": done.parameters, "first_loss": done.first_loss, "last_loss": done.last_loss,
        "data_sha256": done.data_sha256,
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True, help="text, jsonl, xz or npy windows")
    parser.add_argument("--test", type=Path, required=True, help="text, jsonl, xz or npy windows")
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=FILE", help="sources to train on")
    parser.add_argument("--run", action="append", metavar="NAME=VALUE,...", help="one training [the paper's settings]")
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--group-size", type=int, help="[all KV heads]")
    parser.add_argument("--ranks", default="uniform")
    parser.add_argument("--calibration-windows", type=int, default=256, help="at most this many")
    parser.add_argument("--test-stride", type=int, default=1, help="measure every so many windows of the test text")
    parser.add_argument("--prepend-bos", action="store_true", help="start each window with the beginning token")
    parser.add_argument("--tf32", action="store_true", help="train with TF32; measured is without")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument("--batch-size", type=int, default=0, help="of measurements; 0: 8 on CUDA, 1 on a CPU")
    parser.add_argument("--name", default="", help="last part of the file name [the rate]")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--commit", default="", help="recorded commit, where git is not at hand")
    return parser.parse_args()


def main() -> None:
    """Compress, do all runs, and write one JSON file."""
    begun, args = time.perf_counter(), arguments()
    sources = {name: Path(path) for name, _, path in (words.partition("=") for words in args.data)}
    runs = [(words, *parse_run(words, sources)) for words in args.run or [f"data={'+'.join(sources)}"]]
    rows = {name: read_rows([path]) for name, path in sources.items()}
    if args.test in (*args.calibration, *sources.values()):
        raise CalibrationError("The test text must not be trained or calibrated on.")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.batch_size = args.batch_size or (8 if device == "cuda" else 1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    test = test_windows(args.test, tokenizer, args.prepend_bos)[:: args.test_stride]
    before = perplexity(model, test, args.batch_size)
    config = palu.PaluConfig(rate=args.rate, group_size=args.group_size, ranks=args.ranks)
    calibration = calibration_windows(args.calibration, tokenizer, args.calibration_windows, args.prepend_bos)
    palu.compress(model, tokenizer, config, calibration)
    after = perplexity(model, test, args.batch_size)
    print(f"uncompressed {before:.3f}, compressed {after:.3f}, {time.perf_counter() - begun:.0f} s", flush=True)
    result: dict[str, Any] = {
        **provenance(args), "dtype": f"float32, TF32 {'in training only' if args.tf32 else 'off'}",
        "model": args.model.name, "test_windows": test.shape[0], "window_length": test.shape[1],
        "calibration_windows": calibration.shape[0], "palu": model.palu.to_dict(), "uncompressed": before,
        "compressed": after, "runs": [],
    }  # fmt: skip
    result["files"] |= {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources.values()}
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"lora_recovery-{args.model.name}-{args.name or f'{args.rate:g}'}.json"
    for words, names, recovery in runs:
        if time.perf_counter() - begun > args.seconds:
            print(f"no time left for {words}")
            continue
        found = measure(model, tokenizer, [row for name in names for row in rows[name]], recovery, test, args)
        # At rate 0 nothing is lost; the run then shows what the data does to the model itself.
        share = (after - found["perplexity"]) / (after - before) if after > 1.001 * before else None
        result["runs"].append({"run": words, "data": names, "recovered": share, **found})
        beside = "" if share is None else f"recovered {share:6.1%}"
        print(
            f"{found['perplexity']:8.3f} {beside}  {found['steps']:5} steps {found['seconds']:5.0f} s  "
            f"loss {found['first_loss']:.3f} to {found['last_loss']:.3f}  {words}",
            flush=True,
        )
        target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
