"""Perplexity of Palu at equal kept rank beside the public implementation's, for one model and one test text.

    python benchmarks/palu_table.py --model DIR --calibration valid.txt --test wiki.test.raw --out benchmarks/results

The model runs in float32 (TF32 off), the test text in windows of 2048 tokens that do not overlap; the figure is the
exponential of the mean loss over all predictions. One calibration serves all rows: Gram matrices from up to 256 windows
of 2048 tokens, Fisher information from up to 256 of 1024; short texts give fewer, and the output says how many.

The rows repeat those measured with the public implementation, at the rank it kept (its rounding to 32 misses the
request), plus the plain 30, 50 and 70 % of every group size. Needs torch, transformers, safetensors and numpy; works
offline, on CUDA if present.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import json
import lzma
import math
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvslim import palu
from kvslim.calibrating.fisher import calibrate_fisher
from kvslim.calibrating.grams import calibrate_grams
from kvslim.calibrating.windows import windows_from_texts
from kvslim.errors import CalibrationError, ConfigError

LENGTH, FISHER_LENGTH, SLICE = 2048, 1024, 256


@dataclass(frozen=True)
class Row:
    """One configuration; ``public`` is the public implementation's perplexity at this kept rank, if measured.

    ``multiple`` is 32 where the public code rounded ranks to 32, which also keeps at least 32 in every group.
    """

    group_size: int
    ranks: str
    kept: float
    decomposition: str = "whitened"
    public: float | None = None
    multiple: int = 1
    floor: float = palu.PaluConfig.rank_floor
    bits: int = 16
    hadamard: bool = True


def rows_for(kv_heads: int, windows: str) -> list[Row]:
    """The rows measured with the public implementation for this model, then 30/50/70 % of every group size."""
    measured: list[Row] = []
    if kv_heads == 3 and windows == "all":
        measured = [
            Row(3, "uniform", 0.667, public=27.63),
            Row(3, "uniform", 0.50, public=31.20),
            Row(3, "fisher-rms", 0.697, public=24.68, multiple=32),
            Row(3, "fisher-rms", 0.50, public=31.83, multiple=32),
            Row(3, "fisher", 0.697),
            *(Row(3, "fisher", kept, floor=0.0) for kept in (0.70, 0.50)),  # the paper to the letter
        ]
    elif kv_heads == 3:
        measured = [
            Row(3, "fisher-rms", 0.697, public=23.92, multiple=32),
            Row(3, "fisher-rms", 0.697, "svd", public=75.2, multiple=32),
            Row(1, "fisher-rms", 0.733, public=28.12, multiple=32),
            Row(1, "uniform", 0.50, public=48.8),
            Row(1, "fisher-rms", 0.603, public=36.5, multiple=32),
            Row(1, "fisher", 0.603),
        ]
    elif kv_heads == 8:
        uniform = [(8, 0.688, 24.67), (8, 0.50, 24.76), (4, 0.699, 24.73), (4, 0.50, 24.98), (2, 0.75, 24.80),
                   (2, 0.50, 25.55), (1, 0.703, 25.17), (1, 0.50, 26.40)]  # fmt: skip
        fisher = [(8, 0.699, 24.67), (8, 0.504, 24.74), (4, 0.702, 24.71), (4, 0.50, 24.92), (2, 0.691, 24.82),
                  (2, 0.516, 25.16), (1, 0.707, 24.86)]  # fmt: skip
        measured = [Row(size, "uniform", kept, public=ppl) for size, kept, ppl in uniform]
        measured += [Row(size, "fisher-rms", kept, public=ppl) for size, kept, ppl in fisher]
        measured.append(Row(4, "fisher-rms", 0.711, "svd", public=24.75, multiple=32))
    sizes = [size for size in range(kv_heads, 0, -1) if kv_heads % size == 0]
    grid = [
        Row(size, ranks, kept, decomposition)
        for kept in (0.7, 0.5, 0.3)
        for size in sizes
        for ranks, decomposition in (
            ("uniform", "whitened"),
            ("fisher", "whitened"),
            ("fisher-rms", "whitened"),
            ("uniform", "svd"),
        )
    ]
    return measured + grid


def rows_for_codes(kv_heads: int, windows: str) -> list[Row]:
    """Tables 3 and 9 of the paper: 16, 4, 3 and 2 bits, with and without Hadamard, at 30 and 50 %.

    The public figures are those of its simulated quantization, at the rank it kept.
    """
    public: dict[tuple[float, int, bool], float] = {}
    if kv_heads == 3:
        size, ranks, cells = 3, "fisher-rms", ((0.697, 32), (0.50, 32))
        if windows == "all":
            public = _code_figures(0.697, (24.68, 25.69, 28.43, 70.6), (25.16, 26.56, 43.7))
            public |= _code_figures(0.50, (31.83, 32.71, 36.31, 81.3), (32.40, 34.70, 58.6))
    else:
        size, ranks, cells = min(4, kv_heads), "fisher-rms", ((0.711, 32), (0.50, 1))
        if kv_heads == 8 and windows == "all":
            public = _code_figures(0.711, (24.72, 24.98, 25.88, 31.44), (24.83, 25.31, 28.65))
            public |= _code_figures(0.50, (24.90, 25.17, 26.07, 31.65), (25.03, 25.59, 29.40))
    return [
        Row(size, ranks, kept, multiple=multiple, bits=bits, hadamard=hadamard,
            public=public.get((kept, bits, hadamard)))
        for kept, multiple in cells
        for bits, hadamard in ((16, True), *((bits, turned) for bits in (4, 3, 2) for turned in (False, True)))
    ]  # fmt: skip


def _code_figures(kept: float, plain: tuple[float, ...], turned: tuple[float, ...]) -> dict[Any, float]:
    """Public perplexities by (kept, bits, Hadamard): 16, 4, 3, 2 bits plain, then 4, 3, 2 bits rotated."""
    figures = {(kept, bits, bits == 16): value for bits, value in zip((16, 4, 3, 2), plain, strict=True)}
    return figures | {(kept, bits, True): value for bits, value in zip((4, 3, 2), turned, strict=True)}


def read_texts(path: Path) -> list[str]:
    """The texts of a plain or ``.jsonl`` file (field ``text``), or ``.xz`` of these; line ends become newlines."""
    data = path.read_bytes()
    data = lzma.decompress(data) if path.suffix == ".xz" else data
    text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    if ".jsonl" in path.suffixes:
        return [json.loads(line)["text"] for line in text.splitlines() if line.strip()]
    return [text]


def read_ids(path: Path) -> Tensor:
    """``(windows, 2048)`` from an ``.npy`` file of token ids."""
    return torch.from_numpy(np.load(path, allow_pickle=False).astype(np.int64).reshape(-1, LENGTH))


def calibration_windows(paths: list[Path], tokenizer: Any, count: int, prepend_bos: bool) -> Tensor:
    """At most ``count`` windows that do not overlap, spread over all files."""
    share = math.ceil(count / len(paths))
    parts = [
        read_ids(path)[:share]
        if path.suffix == ".npy"
        else windows_from_texts(tokenizer, read_texts(path), LENGTH, None, prepend_bos, share)
        for path in paths
    ]
    return torch.cat(parts)[:count]


def test_windows(path: Path, tokenizer: Any, prepend_bos: bool) -> Tensor:
    """Every window of the text, one after the other; a shorter rest is left out."""
    if path.suffix == ".npy":
        return read_ids(path)
    ids = tokenizer("\n\n".join(read_texts(path)), add_special_tokens=False, verbose=False)["input_ids"]
    body = LENGTH - prepend_bos
    rows = torch.tensor(ids[: len(ids) // body * body]).view(-1, body)
    return torch.nn.functional.pad(rows, (1, 0), value=tokenizer.bos_token_id) if prepend_bos else rows


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Tensor, batch_size: int, *, through_cache: bool = False) -> float:
    """Exponential of the mean loss; logits are made in slices, as all at once would take gigabytes.

    With ``through_cache`` each batch passes through an empty cache, so that attention sees what the cache keeps.
    Without, no cache is made and nothing is coded.
    """
    total, count = 0.0, 0
    head: Any = model.get_output_embeddings()
    for batch in windows.split(batch_size):
        ids = batch.to(model.device)
        hidden = model.base_model(input_ids=ids, use_cache=through_cache).last_hidden_state[:, :-1]
        targets = ids[:, 1:]
        for start in range(0, hidden.shape[1], SLICE):
            logits = head(hidden[:, start : start + SLICE]).float().flatten(0, 1)
            goal = targets[:, start : start + SLICE].flatten()
            total += float(torch.nn.functional.cross_entropy(logits, goal, reduction="sum").double())
            count += goal.numel()
    return math.exp(total / count)


def measure(model: PreTrainedModel, rows: list[Row], calibration: Tensor, test: Tensor, batch: int) -> dict[str, Any]:
    """Perplexities of the model and of every row, one calibration for all."""
    base = perplexity(model, test, batch)
    print(f"uncompressed: {base:.3f}", flush=True)
    start = time.perf_counter()
    grams = calibrate_grams(model, calibration, batch_size=batch)
    fisher = calibrate_fisher(model, calibration[:, :FISHER_LENGTH])
    seconds = time.perf_counter() - start
    print(f"calibrated on {grams.tokens} tokens, {fisher.windows} Fisher windows, {seconds:.0f} s", flush=True)
    results, saved = [], palu.snapshot(model)
    print(
        f"{'group':>5} {'ranks':>10} {'svd':>8} {'kept':>6} {'k / v':>11} {'PPL':>8} {'public':>7} {'ours/public':>11}"
    )
    for row in rows:
        config = palu.PaluConfig(
            rate=1 - row.kept,
            group_size=row.group_size,
            ranks=row.ranks,
            decomposition=row.decomposition,
            rank_multiple=row.multiple,
            rank_floor=row.floor,
            bits=row.bits,
            hadamard=row.hadamard,
        )
        try:
            palu.compress_with(model, config, grams=grams, fisher=fisher)
        except ConfigError as error:
            print(f"skipped {row}: {error}")
            continue
        chosen = model.palu.plan
        value = perplexity(model, test, batch, through_cache=config.coded)
        palu.restore(model, saved)
        half = chosen.channels / chosen.kept / 2
        keys = sum(map(sum, chosen.key_ranks)) / half
        values = sum(map(sum, chosen.value_ranks)) / half
        results.append({**asdict(row), "achieved": chosen.kept, "kept_k": keys, "kept_v": values, "perplexity": value,
                        "key_ranks": chosen.key_ranks, "value_ranks": chosen.value_ranks})  # fmt: skip
        beside = f"{row.public:7.2f} {value / row.public:11.4f}" if row.public else ""
        print(
            f"{row.group_size:5} {row.ranks:>10} {row.decomposition:>8} {chosen.kept:6.3f} {keys:5.2f} {values:5.2f} "
            f"{value:8.3f} {beside}{'' if row.bits == 16 else f'  {row.bits} bits'}"
            f"{'' if row.bits == 16 or row.hadamard else ', no Hadamard'}",
            flush=True,
        )
    return {"uncompressed": base, "calibration_tokens": grams.tokens, "fisher_windows": fisher.windows,
            "calibration_seconds": seconds, "rows": results}  # fmt: skip


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """What is needed to repeat the run."""
    commit = args.commit
    if not commit:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    files = [args.test, *args.calibration]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__
        },
        "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "dtype": "float32, TF32 off",
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True, help="text, jsonl, xz or npy windows")
    parser.add_argument("--test", type=Path, required=True, help="text, jsonl, xz or npy windows")
    parser.add_argument("--windows", choices=["all", "every10"], default="all", help="which test windows")
    parser.add_argument("--calibration-windows", type=int, default=256, help="at most this many")
    parser.add_argument("--prepend-bos", action="store_true", help="start each window with the beginning token")
    parser.add_argument("--measured-only", action="store_true", help="only rows that the public code was run on")
    parser.add_argument("--only", choices=["uniform", "fisher", "fisher-rms"], help="only rows with these ranks")
    parser.add_argument("--table", choices=["3", "9"], help="instead: rows with coded latents, as these tables have")
    parser.add_argument("--batch-size", type=int, default=0, help="0: 8 on CUDA, 1 on a CPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--commit", default="", help="recorded commit, where git is not at hand")
    return parser.parse_args()


def main() -> None:
    """Run all rows and write one JSON file."""
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = args.batch_size or (8 if device == "cuda" else 1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    test = test_windows(args.test, tokenizer, args.prepend_bos)[:: 10 if args.windows == "every10" else 1]
    calibration = calibration_windows(args.calibration, tokenizer, args.calibration_windows, args.prepend_bos)
    if calibration.shape[0] < args.calibration_windows:
        print(f"The calibration text gives {calibration.shape[0]} of {args.calibration_windows} windows.")
    if args.test in args.calibration:
        raise CalibrationError("The test text must not be the calibration text.")
    print(f"{args.model.name}: {test.shape[0]} test windows of {test.shape[1]} tokens on {device}", flush=True)
    rows = (rows_for_codes if args.table else rows_for)(model.config.num_key_value_heads, args.windows)
    if args.measured_only:
        rows = [row for row in rows if row.public]
    if args.only:
        rows = [row for row in rows if row.ranks == args.only]
    result = measure(model, rows, calibration, test, batch)
    args.out.mkdir(parents=True, exist_ok=True)
    kind = f"{'-' + args.only if args.only else ''}{'-codes' if args.table else ''}"
    target = args.out / f"palu_table-{args.model.name}-{args.windows}{kind}.json"
    about = {"model": args.model.name, "test_windows": test.shape[0], "window_length": test.shape[1]}
    target.write_text(json.dumps({**provenance(args), **about, **result}, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
