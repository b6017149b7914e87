"""Perplexity of Palu at equal kept rank beside the public implementation's, for one model and one test text.

    python benchmarks/palu_table.py --model DIR --calibration valid.txt --test wiki.test.raw --out benchmarks/results

The model runs in float32 (TF32 off), the test text in windows of 2048 tokens that do not overlap; the figure is the
exponential of the mean loss over all predictions. One calibration serves all rows: Gram matrices from up to 256 windows
of 2048 tokens, Fisher information from up to 256 of 1024; short texts give fewer, and the output says how many.

The rows repeat those measured with the public implementation, at the rank it kept (its rounding to 32 misses the
request), plus the plain 30, 50 and 70 % of every group size. ``--table N`` (1, 3, 8, 9, 10) measures only what repeats
that table of the paper with this model's group sizes. ``--print FILE.json`` writes the tables of a file again and
``--plot ranks.png`` draws the ranks per layer. Every row is written as it is measured, and ``--resume`` goes on where a
run was cut short. Needs torch, transformers, safetensors and numpy; works offline, on CUDA if present.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from palu_rows import RULES, Row, all_rows, markdown, same_row, table_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvslim import palu
from kvslim.calibrating.fisher import calibrate_fisher
from kvslim.calibrating.grams import calibrate_grams
from kvslim.calibrating.windows import windows_from_texts
from kvslim.errors import CalibrationError, ConfigError
from kvslim.evaluating.plots import plot_ranks
from kvslim.files import write_atomically

LENGTH, FISHER_LENGTH, SLICE = 2048, 1024, 256


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


def measure(
    model: PreTrainedModel, rows: list[Row], calibration: Tensor, test: Tensor, batch: int, target: Target
) -> None:
    """Perplexities of the model and of every row that ``target`` lacks, one calibration for all, written row by row."""
    base = perplexity(model, test, batch)
    print(f"uncompressed: {base:.3f}", flush=True)
    start = time.perf_counter()
    grams = calibrate_grams(model, calibration, batch_size=batch)
    fisher = calibrate_fisher(model, calibration[:, :FISHER_LENGTH], output_grams=True)
    seconds = time.perf_counter() - start
    print(f"calibrated on {grams.tokens} tokens, {fisher.windows} Fisher windows, {seconds:.0f} s", flush=True)
    target.about |= {"uncompressed": base, "calibration_tokens": grams.tokens, "fisher_windows": fisher.windows,
                     "calibration_seconds": seconds}  # fmt: skip
    saved = palu.snapshot(model)
    print(
        f"{'group':>5} {'ranks':>10} {'svd':>10} {'kept':>6} {'k / v':>11} {'PPL':>8} {'public':>7} {'ours/public':>11}"
    )
    for row in rows:
        if any(same_row(row, known) for known in target.rows):
            continue
        try:
            palu.compress_with(model, row.config, grams=grams, fisher=fisher)
        except ConfigError as error:
            print(f"skipped {row}: {error}")
            continue
        chosen = model.palu.plan
        value = perplexity(model, test, batch, through_cache=row.config.coded)
        palu.restore(model, saved)
        half = chosen.channels / chosen.kept / 2
        keys = sum(map(sum, chosen.key_ranks)) / half
        values = sum(map(sum, chosen.value_ranks)) / half
        target.add({**asdict(row), "achieved": chosen.kept, "kept_k": keys, "kept_v": values, "perplexity": value,
                    "full_rank": chosen.full_rank, "key_ranks": chosen.key_ranks,
                    "value_ranks": chosen.value_ranks})  # fmt: skip
        beside = f"{row.public:7.2f} {value / row.public:11.4f}" if row.public else ""
        print(
            f"{row.group_size:5} {row.ranks:>10} {row.decomposition:>10} {chosen.kept:6.3f} {keys:5.2f} {values:5.2f} "
            f"{value:8.3f} {beside}{'' if row.bits == 16 else f'  {row.bits} bits'}"
            f"{'' if row.bits == 16 or row.hadamard else ', no Hadamard'}",
            flush=True,
        )


class Target:
    """The result file: always whole, so that a run that was cut short can go on.

    Args:
        path: the JSON file.
        about: what is in it beside the rows.
        resume: take over the rows that are there.

    Raises:
        ConfigError: ``resume``, and the rows there are of other data or another version.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, resume: bool) -> None:
        self.path, self.about = path, about
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.is_file():
            known = json.loads(path.read_text())
            for name in ("model", "commit", "files", "test_windows", "calibration_windows"):
                if known.get(name) != about[name]:
                    raise ConfigError(f"{path} is of another {name}. Leave out --resume to measure anew.")
            self.rows = known["rows"]

    def add(self, row: dict[str, Any]) -> None:
        """Append one row and write the file."""
        self.rows.append(row)
        write_atomically(self.path, (json.dumps({**self.about, "rows": self.rows}, indent=1) + "\n").encode())


def plot_file(result: dict[str, Any], path: Path) -> None:
    """Ranks per layer of each rule, joint or the largest groups there are, at the share nearest to a half (Fig. 7)."""
    rows = [row for row in result["rows"] if row["public"] is None and row["decomposition"] != "svd"]
    rows = [row for row in rows if row["ranks"] != "uniform" and row["bits"] == 16 and "full_rank" in row]
    if not rows:
        raise ConfigError("The file has no ranks but uniform ones to plot.")
    size = max(row["group_size"] for row in rows)
    kept = min((row["kept"] for row in rows), key=lambda share: abs(share - 0.5))
    plans = {
        f"{row['ranks']}, {row['decomposition']}: PPL {row['perplexity']:.2f}": palu.PaluPlan(
            tuple(map(tuple, row["key_ranks"])), tuple(map(tuple, row["value_ranks"])), size, row["full_rank"]
        )
        for row in rows
        if (row["group_size"], row["kept"]) == (size, kept)
    }
    plot_ranks(plans, path, f"{result['model']}: ranks per layer, {1 - kept:.0%} removed, groups of {size} KV heads")


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
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--calibration", type=Path, nargs="+", default=[], help="text, jsonl, xz or npy windows")
    parser.add_argument("--test", type=Path, help="text, jsonl, xz or npy windows")
    parser.add_argument("--windows", choices=["all", "every10"], default="all", help="which test windows")
    parser.add_argument("--calibration-windows", type=int, default=256, help="at most this many")
    parser.add_argument("--prepend-bos", action="store_true", help="start each window with the beginning token")
    parser.add_argument("--table", type=int, choices=[1, 3, 8, 9, 10], help="only the rows of this table of the paper")
    parser.add_argument("--measured-only", action="store_true", help="only rows that the public code was run on")
    parser.add_argument("--only", choices=list(dict.fromkeys(ranks for ranks, _ in RULES)), help="only these ranks")
    parser.add_argument("--batch-size", type=int, default=0, help="0: 8 on CUDA, 1 on a CPU")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON file")
    parser.add_argument("--resume", action="store_true", help="measure only rows that the JSON file lacks")
    parser.add_argument("--commit", default="", help="recorded commit, where git is not at hand")
    parser.add_argument(
        "--print", type=Path, metavar="JSON", help="write the Markdown tables of a file, measure nothing"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the ranks per layer (the paper's Fig. 7)")
    args = parser.parse_args()
    if args.print is None and not (args.model and args.calibration and args.test):
        parser.error("--model, --calibration and --test are needed to measure")
    return args


def chosen_rows(args: argparse.Namespace, kv_heads: int) -> tuple[list[Row], str]:
    """The rows that the command line asks for, and what the file's name says of them."""
    rows = table_rows(args.table, kv_heads, args.windows) if args.table else all_rows(kv_heads, args.windows)
    if args.measured_only:
        rows = [row for row in rows if row.public]
    if args.only:
        rows = [row for row in rows if row.ranks == args.only]
    parts = [f"table{args.table}" if args.table else "", args.only or "", "measured" if args.measured_only else ""]
    return rows, "".join(f"-{part}" for part in parts if part)


def run(args: argparse.Namespace) -> Path:
    """Measure, and return the result file."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = args.batch_size or (8 if device == "cuda" else 1)
    if args.test in args.calibration:
        raise CalibrationError("The test text must not be the calibration text.")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    test = test_windows(args.test, tokenizer, args.prepend_bos)[:: 10 if args.windows == "every10" else 1]
    calibration = calibration_windows(args.calibration, tokenizer, args.calibration_windows, args.prepend_bos)
    if calibration.shape[0] < args.calibration_windows:
        print(f"The calibration text gives {calibration.shape[0]} of {args.calibration_windows} windows.")
    print(f"{args.model.name}: {test.shape[0]} test windows of {test.shape[1]} tokens on {device}", flush=True)
    rows, name = chosen_rows(args, model.config.num_key_value_heads)
    about = {"model": args.model.name, "test_windows": test.shape[0], "window_length": test.shape[1],
             "calibration_windows": calibration.shape[0]}  # fmt: skip
    path = args.out / f"palu_table-{args.model.name}-{args.windows}{name}.json"
    target = Target(path, {**provenance(args), **about}, resume=args.resume)
    measure(model, rows, calibration, test, batch, target)
    print(f"wrote {path}")
    return path


def main() -> None:
    """Measure and write one JSON file, or take the one there is; then its tables and plot."""
    args = arguments()
    result = json.loads((args.print or run(args)).read_text())
    print(markdown(result))
    if args.plot:
        plot_file(result, args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
