"""Every table of JoLT in docs/measurements.md, measured through the compressed cache.

    python benchmarks/jolt_table.py --model DIR --text test.txt --tokens 1024 2048 6144 --out benchmarks/results
    python benchmarks/jolt_table.py --print benchmarks/results --plot docs/jolt.png

One JSON per model, number of tokens and section (``ratios``, ``ablation``, ``routes``, ``baselines``), whole after each
method. What such a file holds already is not measured again, so that a run can be stopped and taken up at any time, and
a table can get new rows. ``--print`` writes the Markdown tables from the files, without measuring; ``--plot`` draws the
divergence against the ratio.

Sections: ``ratios`` compares the paper's preset with ours from 1× to 8×; ``ablation`` takes the joint allocation apart
(equal bytes per cell, greedy steps, ranks alone, bits alone, half of the bytes for keys, and full Tucker that truncates
heads, or heads and layers, too); ``routes`` sets FlashJoLT beside exact spectra; ``baselines`` are codes per token.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvslim import models
from kvslim.attending.families import text_config
from kvslim.errors import BudgetError, ConfigError, KvslimError
from kvslim.evaluating.compare import MethodResult, measure
from kvslim.evaluating.continuation import Reference, run_reference
from kvslim.evaluating.evaluation import EvalConfig
from kvslim.evaluating.methods import CacheMethod, parse_method
from kvslim.evaluating.plots import COLOURS, new_figure, save_png
from kvslim.evaluating.results import Environment, EvalResults, ModelFingerprint
from kvslim.evaluating.texts import TextSource, read_text
from kvslim.evaluating.windows import bos_token, evenly_spaced_windows
from kvslim.files import check_writable

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
    "two layers per cell": ":layers=2",
    "two layers per cell, full Tucker, 2/3 of heads and layers": ":layers=2:slabs=0.67",
    "two layers per cell, full Tucker, 1/3 of heads and layers": ":layers=2:slabs=0.34",
}
PRESETS = {"JoLT, the paper's preset": ":paper", "JoLT, ours": ""}
BASELINES = {"rotated": ("rot6", "rot5", "rot4", "rot3", "rot2"), "integers": ("int8", "int4", "int3", "int2")}
SECTIONS = ("ratios", "ablation", "routes", "baselines")

Rows = dict[str, MethodResult]


def section_methods(section: str) -> list[str]:
    """Names of the methods of one section."""
    if section == "ratios":
        return ["none", *(f"jolt-{ratio}x{preset}" for preset in PRESETS.values() for ratio in RATIOS)]
    if section == "ablation":
        return ["none", *(f"jolt-{ratio}x{one}" for ratio in ABLATION_RATIOS for one in SETTINGS.values())]
    if section == "baselines":
        return ["none", *(name for names in BASELINES.values() for name in names)]
    routes = ("exact", "gram", "randomized")
    return ["none", *(f"jolt-{r}x{preset}:{one}" for preset in PRESETS.values() for r in (2, 3, 4) for one in routes)]


# ---- measuring -------------------------------------------------------------------------------------------------------


def taken_over(path: Path, fresh: EvalResults) -> EvalResults:
    """``fresh`` with what the file at ``path`` holds of it already, and where that was measured.

    Raises:
        ConfigError: the file is of another model, text or protocol.
    """
    if not path.exists():
        return fresh
    found = EvalResults.from_json(path.read_text(encoding="utf-8"))
    nameless = [dataclasses.replace(one.model, name="") for one in (found, fresh)]
    apart = [key for key, value in fresh.settings.items() if found.settings.get(key, value) != value]
    if apart or nameless[0] != nameless[1]:
        what = f"settings ({', '.join(apart)})" if apart else "model"
        raise ConfigError(f"{path} is of another {what}. Move it away or choose another --out.")
    source = {name: getattr(found.environment, name) for name in ("date", "command", "commit", "gpu")}
    earlier = [*found.settings.get("earlier", []), {"methods": [one.method for one in found.methods], **source}]
    return dataclasses.replace(fresh, methods=found.methods, settings={**fresh.settings, "earlier": earlier})


def is_measured(name: str, results: EvalResults) -> bool:
    """Whether the method is there with the same settings; those that did not exist yet do not count."""
    now = parse_method(name).settings
    return any(
        one.method == name and all(now.get(key) == value for key, value in one.settings.items())
        for one in results.methods
    )


def fill(path: Path, results: EvalResults, names: Sequence[str], model: Any, references: Sequence[Reference]) -> None:
    """Measure ``names`` one by one and write the file after each, in the section's order; a refusal is kept too."""
    config = EvalConfig(**{one.name: results.settings[one.name] for one in dataclasses.fields(EvalConfig)})
    found = {one.method: one for one in results.methods}
    refused: dict[str, str] = {}
    for done, name in enumerate(names):
        method = parse_method(name)
        assert isinstance(method, CacheMethod)
        started = time.monotonic()
        try:
            found[name] = one = measure(model, method, references, config.continuation)
            words = f"{one.ratio:5.2f}x  KL {one.kl:.5f}"
        except BudgetError as error:
            refused[name] = words = str(error)
        order = {method: place for place, method in enumerate(section_methods(path.name.split("-")[1]))}
        methods = sorted(found.values(), key=lambda one: order.get(one.method, len(order)))
        settings = {**results.settings, "refused": refused} if refused else results.settings
        dataclasses.replace(results, methods=tuple(methods), settings=settings).save(path)
        print(f"{done + 1:4} of {len(names)}  {name:28} {words}  ({time.monotonic() - started:.0f} s)", flush=True)


def make(args: argparse.Namespace) -> None:
    """Measure what the files of one model and text lack, for every number of tokens that fits the context."""
    source = read_text(args.text)
    paths = {
        (tokens, section): args.out / f"jolt-{section}-{Path(args.model).name}-{tokens}.json"
        for tokens in args.tokens
        for section in args.sections
    }
    for path in paths.values():
        check_writable(path)
    model, tokenizer = models.load(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    context = int(text_config(model).max_position_embeddings)
    for tokens in args.tokens:
        if tokens + args.score > context:
            print(f"{tokens} tokens are left out: with {args.score} scored ones they exceed the context of {context}.")
            continue
        config = EvalConfig(tokens=tokens, score=args.score, windows=args.windows, bos=args.bos)
        fresh = fresh_results(model, Path(args.model).name, source, config)
        references: list[Reference] = []
        for section in args.sections:
            path = paths[tokens, section]
            results = taken_over(path, fresh)
            missing = [name for name in section_methods(section) if not is_measured(name, results)]
            print(f"{path.name}: {len(missing)} methods to measure", flush=True)
            if missing and not references:
                bos = bos_token(tokenizer) if args.bos else None
                windows = evenly_spaced_windows(source.tokens(tokenizer), args.windows, config.continuation.window, bos)
                references = [run_reference(model, window, config.continuation) for window in windows]
            fill(path, results, missing, model, references)


def fresh_results(model: Any, name: str, source: TextSource, config: EvalConfig) -> EvalResults:
    """Results without a method yet."""
    settings = {**config.to_dict(), "text_sha256": hashlib.sha256(source.text.encode()).hexdigest()}
    return EvalResults(ModelFingerprint.of(name, model), source.origin, None, settings, (), Environment.now())


# ---- printing --------------------------------------------------------------------------------------------------------


def files_in(folder: Path) -> Iterator[tuple[str, EvalResults]]:
    """The sections and results of all files of this script in ``folder``."""
    for path in sorted(folder.glob("jolt-*-*.json")):
        section = path.name.split("-")[1]
        if section in SECTIONS:
            yield section, EvalResults.from_json(path.read_text(encoding="utf-8"))


def print_tables(folder: Path) -> None:
    """Write the Markdown tables of all files in ``folder``."""
    shown = {"ratios": _figures, "ablation": _ablation, "routes": _routes, "baselines": _figures}
    for section, results in files_in(folder):
        rows = {one.method: one for one in results.methods}
        tokens, windows = results.settings["tokens"], results.settings["windows"]
        base = f", uncompressed perplexity {rows['none'].perplexity:.2f}" if "none" in rows else ""
        print(f"\n{results.model.name}, {tokens} tokens, {windows} windows{base}\n")
        print("\n".join(shown[section](rows)))
        for name, reason in results.settings.get("refused", {}).items():
            print(f"\n{name} was refused: {reason}")


def _figures(rows: Rows) -> Iterator[str]:
    yield "| method | ratio | PPL | KL | agreement | error K | error V | bytes for keys | seconds |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        if name != "none":
            share = "" if row.key_share is None else f"{row.key_share:.0%}"
            yield (
                f"| {name} | {row.ratio:.2f} | {row.perplexity:.2f} | {row.kl:.5f} | {row.agreement:.3f} "
                f"| {row.key_error:.4f} | {row.value_error:.4f} | {share} | {row.seconds:.2f} |"
            )


def _ablation(rows: Rows) -> Iterator[str]:
    yield "| setting |" + "".join(f" KL at {ratio}× |" for ratio in ABLATION_RATIOS) + " errors K / V at 3× |"
    yield "|---|" + "---|" * (len(ABLATION_RATIOS) + 1)
    for words, option in SETTINGS.items():
        cells = [rows.get(f"jolt-{ratio}x{option}") for ratio in ABLATION_RATIOS]
        if any(cells):
            at_three = rows.get(f"jolt-3x{option}")
            errors = f"{at_three.key_error:.4f} / {at_three.value_error:.4f}" if at_three else ""
            yield f"| {words} |" + "".join(f" {one.kl:.5f} |" if one else "  |" for one in cells) + f" {errors} |"


def _routes(rows: Rows) -> Iterator[str]:
    yield "| method | PPL | difference to exact | KL | seconds |"
    yield "|---|---|---|---|---|"
    for name, row in rows.items():
        if name != "none":
            exact = rows.get(name.rsplit(":", 1)[0] + ":exact")
            gap = f"{row.perplexity - exact.perplexity:+.4f}" if exact else ""
            yield f"| {name} | {row.perplexity:.4f} | {gap} | {row.kl:.5f} | {row.seconds:.2f} |"


def plot(folder: Path, path: Path) -> None:
    """Draw KL (logarithmic) against the measured ratio: a panel per model and length, with baselines where measured.

    Raises:
        ConfigError: there is nothing to draw.
    """
    panels: dict[tuple[str, int], Rows] = {}
    for section, results in files_in(folder):
        if section in ("ratios", "baselines"):
            place = panels.setdefault((results.model.name, results.settings["tokens"]), {})
            place |= {one.method: one for one in results.methods if one.kl > 0}
    if not panels:
        raise ConfigError(f"{folder} holds no ratios to plot. Measure them first.")
    lines = {label: tuple(f"jolt-{ratio}x{preset}" for ratio in RATIOS) for label, preset in PRESETS.items()}
    figure, axes = new_figure(1 + 3.6 * len(panels), 4.2, columns=len(panels))
    for panel, ((model, tokens), rows) in zip(axes, sorted(panels.items()), strict=True):
        for index, (label, names) in enumerate((lines | BASELINES).items()):
            points = sorted((rows[name].ratio, rows[name].kl) for name in names if name in rows)
            if points:
                panel.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLOURS[index], label=label)
        panel.set(yscale="log", ylim=(1e-6, 1), xlabel="measured ratio", title=f"{model}, {tokens} tokens")
        panel.title.set_fontsize(9)
        panel.grid(True, which="both", alpha=0.2)
    axes[0].set_ylabel("KL from the uncompressed model, nats per token")
    axes[0].legend(fontsize=8)
    save_png(figure, path)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, or print and plot what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", type=Path, metavar="FOLDER", help="print the tables of the files in FOLDER")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="with --print: draw the divergence against the ratio")
    parser.add_argument("--model", help="a model directory, or 'default'")
    parser.add_argument("--text", type=Path, help="test text, or .jsonl with a field 'text'")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--score", type=int, default=256)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--bos", action="store_true", help="start every window with the tokenizer's first token")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(given)
    if not args.print and not (args.model and args.text):
        parser.error("give --model and --text, or --print")
    try:
        if args.print:
            print_tables(args.print)
            if args.plot:
                plot(args.print, args.plot)
        else:
            make(args)
    except KvslimError as error:
        sys.exit(f"jolt_table: {error}")


if __name__ == "__main__":
    main()
