"""Every table of JoLT in docs/measurements.md, measured through the compressed cache.

    python benchmarks/jolt_table.py --model DIR --text test.txt --tokens 1024 2048 6144 --out benchmarks/results
    python benchmarks/jolt_table.py --print benchmarks/results

One JSON per model, number of tokens and section (``ratios``, ``ablation``, ``routes``); a file that is there already is
not made again. ``--print`` writes the Markdown tables from the files, without measuring.

Sections: ``ratios`` compares the paper's preset with ours from 1× to 8×; ``ablation`` takes the joint allocation apart
(equal bytes per cell, greedy steps, ranks alone, bits alone, half of the bytes for keys, and full Tucker that truncates
heads too); ``routes`` sets FlashJoLT beside exact spectra.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kvslim import models
from kvslim.evaluating.evaluation import EvalConfig, evaluate
from kvslim.evaluating.methods import parse_method
from kvslim.evaluating.texts import read_text

RATIOS = (1, 2, 3, 4, 5, 6, 8)
ABLATION_RATIOS = (2, 3, 4, 5)
SETTINGS = {
    "joint": "",
    "joint, keys and values weighed alike": ":keys=1",
    "equal bytes per cell": ":uniform",
    "greedy": ":greedy",
    "half for keys, half for values": ":split=0.5",
    "bits alone (rank 0)": ":no-backbone",
    "ranks alone (no residual)": ":bits=0",
    "full Tucker, 2/3 of the heads": ":slabs=0.67",
    "full Tucker, 1/3 of the heads": ":slabs=0.34",
}


def section_methods(section: str) -> list[str]:
    """Names of the methods of one section."""
    if section == "ratios":
        return ["none", *(f"jolt-{ratio}x{preset}" for preset in (":paper", "") for ratio in RATIOS)]
    if section == "ablation":
        return ["none", *(f"jolt-{ratio}x{one}" for ratio in ABLATION_RATIOS for one in SETTINGS.values())]
    routes, presets = ("exact", "gram", "randomized"), (":paper", "")
    return ["none", *(f"jolt-{r}x{preset}:{route}" for preset in presets for r in (2, 3, 4) for route in routes)]


def measure(args: argparse.Namespace) -> None:
    """Make the files that are missing."""
    model, tokenizer = models.load(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    name = Path(args.model).name
    for tokens in args.tokens:
        for section in args.sections:
            path = args.out / f"jolt-{section}-{name}-{tokens}.json"
            if path.exists():
                print(f"{path.name} is there already")
                continue
            config = EvalConfig(tokens=tokens, score=args.score, windows=args.windows, bos=args.bos)
            methods = [parse_method(one) for one in section_methods(section)]
            text = read_text(args.text)
            evaluate(model, tokenizer, name, methods, config, text=text).save(path)
            print(f"kept as {path.name}", flush=True)


def rows_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of one file by method."""
    return {row["method"]: row for row in data["methods"]}


def print_tables(folder: Path) -> None:
    """Write the Markdown tables of all files in ``folder``."""
    for path in sorted(folder.glob("jolt-*-*.json")):
        section = path.name.split("-")[1]
        if section not in ("ratios", "ablation", "routes"):
            continue
        data = json.loads(path.read_text())
        rows, tokens = rows_of(data), data["settings"]["tokens"]
        base = rows["none"]
        print(f"\n{data['model']['name']}, {tokens} tokens, {data['settings']['windows']} windows, ", end="")
        print(f"uncompressed perplexity {base['perplexity']:.2f}\n")
        print("\n".join({"ratios": _ratios, "ablation": _ablation, "routes": _routes}[section](rows)))


def _ratios(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| method | ratio | PPL | KL | agreement | error K | error V | bytes for keys | seconds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        if name != "none":
            share = "" if row["key_share"] is None else f"{row['key_share']:.0%}"
            yield (
                f"| {name} | {row['ratio']:.2f} | {row['perplexity']:.2f} | {row['kl']:.5f} | {row['agreement']:.3f} "
                f"| {row['key_error']:.4f} | {row['value_error']:.4f} | {share} | {row['seconds']:.2f} |"
            )


def _ablation(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| setting |" + "".join(f" KL at {ratio}× |" for ratio in ABLATION_RATIOS) + " errors K / V at 3× |"
    yield "|---|" + "---|" * (len(ABLATION_RATIOS) + 1)
    for words, option in SETTINGS.items():
        cells = [rows[f"jolt-{ratio}x{option}"] for ratio in ABLATION_RATIOS]
        at_three = rows[f"jolt-3x{option}"]
        errors = f"{at_three['key_error']:.4f} / {at_three['value_error']:.4f}"
        yield f"| {words} |" + "".join(f" {cell['kl']:.5f} |" for cell in cells) + f" {errors} |"


def _routes(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| method | PPL | difference to exact | KL | seconds |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        if name == "none":
            continue
        exact = rows[name.rsplit(":", 1)[0] + ":exact"]
        gap = row["perplexity"] - exact["perplexity"]
        yield f"| {name} | {row['perplexity']:.4f} | {gap:+.4f} | {row['kl']:.5f} | {row['seconds']:.2f} |"


def main() -> None:
    """Measure, or print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", type=Path, metavar="FOLDER", help="print the tables of the files in FOLDER")
    parser.add_argument("--model", help="a model directory, or 'default'")
    parser.add_argument("--text", type=Path, help="test text")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--sections", nargs="+", default=["ratios", "ablation", "routes"])
    parser.add_argument("--score", type=int, default=256)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--bos", action="store_true", help="start every window with the tokenizer's first token")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    if args.print:
        print_tables(args.print)
    elif args.model and args.text:
        measure(args)
    else:
        parser.error("give --model and --text, or --print")


if __name__ == "__main__":
    main()
