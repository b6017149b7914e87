"""Every JoLT table of docs/measurements.md, for one model and text: presets, ablations, spectra, baselines.

    python benchmarks/jolt_table.py --model models/smollm2-135m-instruct --text data/test_tokenized.txt --device cuda
    python benchmarks/jolt_table.py --show benchmarks/results/jolt_table-smollm2*.json --plot docs/jolt-smollm2.png

The first form measures: T tokens are prefilled and compressed, the next N scored through the compressed cache, on
evenly spaced windows. It writes one JSON file per T, whole after each cell, so that it can be stopped at any time;
called again it measures only what is missing. The second form prints the tables of such files and plots them, without a
model.

A cell is one method. Its name in the file is a hash of everything that decides its figures: model, text, protocol and
all settings of the method. What a budget refuses is kept as refused, with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvslim import models
from kvslim.attending.families import text_config
from kvslim.errors import BudgetError, ConfigError, KvslimError
from kvslim.evaluating.compare import MethodResult, measure
from kvslim.evaluating.continuation import ContinuationConfig, run_reference
from kvslim.evaluating.methods import CacheMethod, parse_method
from kvslim.evaluating.plots import COLOURS, new_figure, save_png
from kvslim.evaluating.results import SCHEMA, Environment, ModelFingerprint
from kvslim.evaluating.texts import read_text
from kvslim.evaluating.windows import bos_token, evenly_spaced_windows
from kvslim.files import check_writable, write_atomically

RATIOS = (1, 2, 3, 4, 5, 6, 8)
ABLATED = (2, 3, 4, 5)
PRESETS = {"paper": ":exact:paper", "ours": ":exact"}
ABLATIONS = {
    "joint (ours)": ":exact",
    "uniform: equal bytes per cell": ":exact:uniform",
    "greedy": ":exact:greedy",
    "K and V half and half": ":exact:split=0.5",
    "rank only": ":exact:rank-only",
    "quantization only": ":exact:no-backbone",
    "full Tucker, heads to 75 %": ":exact:slabs=0.75",
    "full Tucker, heads to 50 %": ":exact:slabs=0.5",
    "two layers per cell": ":exact:layers=2",
    "two layers, full Tucker, heads and layers to 75 %": ":exact:layers=2:slabs=0.75",
    "two layers, full Tucker, heads and layers to 50 %": ":exact:layers=2:slabs=0.5",
}
SPECTRA = {"exact": ":exact", "Gram route": ":gram", "randomized, as in the paper": ":randomized"}
BASELINES = ("none", "int8", "int4", "int3", "int2", "rot6", "rot5", "rot4", "rot3", "rot2")

GROUPS: dict[str, list[str]] = {
    "presets": ["none", *(f"jolt-{ratio}x{options}" for ratio in RATIOS for options in PRESETS.values())],
    "spectra": [f"jolt-{ratio}x{options}" for options in SPECTRA.values() for ratio in ABLATED],
    "ablations": [f"jolt-{ratio}x{options}" for options in ABLATIONS.values() for ratio in ABLATED],
    "baselines": list(BASELINES),
}
"""Method names by table, in the order in which they are measured. The same cell in two tables is measured once."""


@dataclass
class Cells:
    """What was measured of one model, text and protocol, and the JSON file that it is kept in.

    Attributes:
        path: the file.
        model: which model, a fingerprint.
        text: origin and SHA-256 of the test text.
        protocol: what is prefilled and scored, on how many windows, in which dtype.
        runs: the environment of each call that measured a cell.
        cells: by hash: the method, the number of its run, and its result or why it was refused.
    """

    path: Path
    model: dict[str, Any]
    text: dict[str, str]
    protocol: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Cells:
        """The file at ``path``.

        Raises:
            ConfigError: it is missing or no such file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, *(data[name] for name in ("model", "text", "protocol", "runs", "cells")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} holds no JoLT tables ({error!r}). Give a file that this script wrote."
            ) from error

    def take_over(self) -> None:
        """Take what the file at ``path`` holds already, if there is one.

        Raises:
            ConfigError: it is of another model, text or protocol.
        """
        if not self.path.exists():
            return
        found = Cells.read(self.path)
        for name in ("model", "text", "protocol"):
            theirs, ours = (_what_counts(one, name) for one in (found, self))
            if theirs != ours:
                raise ConfigError(
                    f"{self.path} is of another {name}: {theirs}, not {ours}. Move it away or choose another --out."
                )
        self.runs, self.cells = found.runs, found.cells

    def key(self, name: str) -> str:
        """The hash of everything that decides the figures of method ``name``: 16 hexadecimal digits."""
        method = parse_method(name)
        config = {
            **{name: _what_counts(self, name) for name in ("model", "text", "protocol")},
            "method": {"family": method.family, **method.settings},
        }
        return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]

    def result(self, name: str) -> MethodResult | None:
        """The figures of method ``name``, or ``None`` if it was refused or is not measured yet."""
        found = self.cells.get(self.key(name), {}).get("result")
        return None if found is None else MethodResult(**found)

    def refused(self, name: str) -> bool:
        """Whether the budget refused method ``name``."""
        return "refused" in self.cells.get(self.key(name), {})

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those of ``names`` that are to be measured, each cell once."""
        wanted = {self.key(name): name for name in reversed(names)}
        return [
            name for name in dict.fromkeys(names) if wanted.get(key := self.key(name)) == name and key not in self.cells
        ]

    def save(self) -> None:
        """Write the file, atomically."""
        data = {"schema": SCHEMA, **{k: v for k, v in vars(self).items() if k != "path"}}
        write_atomically(self.path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def _what_counts(cells: Cells, name: str) -> dict[str, Any]:
    """A part of the description without where things lay: the same model and text may lie elsewhere next time."""
    return {key: value for key, value in getattr(cells, name).items() if key not in ("name", "origin")}


# ---- measuring -------------------------------------------------------------------------------------------------------


def fill(cells: Cells, names: Sequence[str], model: Any, windows: torch.Tensor, deadline: float) -> None:
    """Measure what is missing of ``names``, one cell at a time, until the clock passes ``deadline``."""
    missing = cells.missing(names)
    print(f"{cells.path.name}: {len(missing)} cells to measure", flush=True)
    if not missing:
        return
    config = ContinuationConfig(cells.protocol["tokens"], cells.protocol["score"])
    references = [run_reference(model, window, config) for window in windows]
    cells.runs.append(dataclasses.asdict(Environment.now()))
    for done, name in enumerate(missing):
        if time.monotonic() > deadline:
            print(f"stopped by --minutes, {len(missing) - done} cells are left", flush=True)
            return
        method = parse_method(name)
        assert isinstance(method, CacheMethod)
        cell: dict[str, Any] = {"method": name, "run": len(cells.runs) - 1}
        started = time.monotonic()
        try:
            found = measure(model, method, references, config)
            cell["result"] = dataclasses.asdict(found)
            words = f"{found.ratio:5.2f}x  KL {found.kl:.5f}"
        except BudgetError as error:
            cell["refused"] = words = str(error)
        cells.cells[cells.key(name)] = cell
        cells.save()
        print(f"{done + 1:4} of {len(missing)}  {name:32} {words}  ({time.monotonic() - started:.0f} s)", flush=True)


def run(args: argparse.Namespace) -> list[Cells]:
    """Measure one model and text at every T that fits its context."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    source = read_text(args.text)
    targets = {t: args.out / f"jolt_table-{args.model.name}-{t}.json" for t in args.tokens}
    for target in targets.values():
        check_writable(target)
    model, tokenizer = models.load(str(args.model), dtype=dtype, device=args.device)
    context = int(text_config(model).max_position_embeddings)
    names = [name for group in args.groups for name in GROUPS[group]]
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    ids, bos = source.tokens(tokenizer), bos_token(tokenizer) if args.bos else None
    text = {"origin": source.origin, "sha256": hashlib.sha256(source.text.encode()).hexdigest()}
    fingerprint = dataclasses.asdict(ModelFingerprint.of(str(args.model), model))
    made = []
    for tokens, target in targets.items():
        if tokens + args.score > context:
            print(f"T = {tokens} is left out: with {args.score} scored tokens it exceeds the context of {context}.")
            continue
        protocol = {
            "tokens": tokens,
            "score": args.score,
            "windows": args.windows,
            "bos": args.bos,
            "dtype": args.dtype,
        }
        cells = Cells(target, fingerprint, text, protocol)
        cells.take_over()
        windows = evenly_spaced_windows(ids, args.windows, tokens + args.score + 1, bos)
        fill(cells, names, model, windows, deadline)
        if cells.cells:
            made.append(cells)
    return made


# ---- showing ---------------------------------------------------------------------------------------------------------


def markdown(cells: Cells) -> str:
    """All tables of one file, as far as they are measured."""
    protocol = cells.protocol
    title = (
        f"### {Path(cells.model['name']).name}, T = {protocol['tokens']} ({Path(cells.text['origin']).name}, "
        f"{protocol['score']} scored, {protocol['windows']} windows, {protocol['dtype']})"
    )
    parts = [title]
    parts += _section("Presets", _figures(cells, _preset_rows()))
    parts += _section("Spectra: perplexity, and its difference to exact spectra", list(_spectra(cells)))
    parts += _section("Ablations: KL", list(_by_ratio(cells, ABLATIONS, lambda one: f"{one.kl:.5f}")))
    parts += _section(
        "Ablations: error of keys / values, keys' share of the bytes",
        list(
            _by_ratio(
                cells,
                ABLATIONS,
                lambda one: f"{one.key_error:.4f} / {one.value_error:.4f}, {_share(one)}",
            )
        ),
    )
    parts += _section("Baselines", _figures(cells, {name: name for name in BASELINES}))
    return "\n\n".join(parts) + "\n"


def _preset_rows() -> dict[str, str]:
    return {f"{preset} {r}×": f"jolt-{r}x{options}" for preset, options in PRESETS.items() for r in RATIOS}


def _section(title: str, lines: list[str]) -> list[str]:
    """A titled table; nothing if it has no row beneath its two lines of head."""
    return [f"**{title}**", "\n".join(lines)] if len(lines) > 2 else []


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _head(columns: Sequence[str]) -> list[str]:
    return [_line(columns), "|---" * len(columns) + "|"]


def _figures(cells: Cells, rows: dict[str, str]) -> list[str]:
    columns = ("method", "ratio", "PPL", "KL", "agreement", "error K", "error V", "keys' share", "s")
    lines = _head(columns)
    for label, name in rows.items():
        if cells.refused(name):
            lines.append(_line([label, "refused", *["–"] * (len(columns) - 2)]))
        elif one := cells.result(name):
            lines.append(
                _line(
                    [label, f"{one.ratio:.2f}", f"{one.perplexity:.3f}", f"{one.kl:.5f}", f"{one.agreement:.3f}",
                     f"{one.key_error:.4f}", f"{one.value_error:.4f}", _share(one), f"{one.seconds:.2f}"]
                )
            )  # fmt: skip
    return lines


def _share(one: MethodResult) -> str:
    return "–" if one.key_share is None else f"{one.key_share:.0%}"


def _by_ratio(cells: Cells, rows: dict[str, str], shown: Callable[[MethodResult], str]) -> Iterator[str]:
    """One line per row, one column per ratio; rows without any figure are left out."""
    yield from _head(["", *(f"{ratio}×" for ratio in ABLATED)])
    for label, options in rows.items():
        names = [f"jolt-{ratio}x{options}" for ratio in ABLATED]
        found = [cells.result(name) for name in names]
        if any(found) or any(map(cells.refused, names)):
            texts = [
                shown(one) if one else "refused" if cells.refused(name) else ""
                for name, one in zip(names, found, strict=True)
            ]
            yield _line([label, *texts])


def _spectra(cells: Cells) -> Iterator[str]:
    exact = {ratio: cells.result(f"jolt-{ratio}x{SPECTRA['exact']}") for ratio in ABLATED}

    def shown(one: MethodResult) -> str:
        base = exact[round(one.settings["ratio"])]
        moved = f" ({one.perplexity - base.perplexity:+.4f})" if base else ""
        return f"{one.perplexity:.4f}{moved}, KL {one.kl:.5f}, {one.seconds:.2f} s"

    return _by_ratio(cells, SPECTRA, shown)


def plot(files: Sequence[Cells], path: Path) -> None:
    """Draw KL (logarithmic) against the measured ratio: a panel per file, a line per preset and kind of baseline."""
    lines = {preset: [f"jolt-{ratio}x{options}" for ratio in RATIOS] for preset, options in PRESETS.items()}
    lines = {f"JoLT, {preset}": names for preset, names in lines.items()}
    lines |= {"rotated": [n for n in BASELINES if n.startswith("rot")], "integer": [n for n in BASELINES if "int" in n]}
    figure, panels = new_figure(1 + 4.6 * len(files), 4.4, columns=len(files))
    for axes, cells in zip(panels, files, strict=True):
        for index, (label, names) in enumerate(lines.items()):
            points = sorted((one.ratio, one.kl) for name in names if (one := cells.result(name)) and one.kl > 0)
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLOURS[index], label=label)
        axes.set(
            yscale="log",
            xlabel="measured ratio",
            title=f"{Path(cells.model['name']).name}, T = {cells.protocol['tokens']}",
        )
        axes.grid(True, which="both", alpha=0.2)
    panels[0].set_ylabel("KL from the uncompressed model, nats per token")
    panels[0].legend(fontsize=8)
    save_png(figure, path)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--text", type=Path, help="test text, or .jsonl with a field 'text'")
    parser.add_argument("--bos", action="store_true", help="start each window with the beginning-of-text token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 6144], help="prefilled tokens T")
    parser.add_argument("--score", type=int, default=256, help="scored tokens N")
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--groups", choices=list(GROUPS), nargs="+", default=list(GROUPS), help="which tables")
    parser.add_argument("--minutes", type=float, default=0, help="start no cell after so many; 0 sets no limit")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the JSON files")
    parser.add_argument("--show", type=Path, nargs="+", help="print the tables of these files instead of measuring")
    parser.add_argument("--plot", type=Path, help="PNG to write, a panel per file")
    args = parser.parse_args(given)
    if not args.show and not (args.model and args.text):
        parser.error("give --model and --text to measure, or --show FILE ... to print what was measured")
    return args


def main(given: Sequence[str] | None = None) -> None:
    """Measure or read, print the tables, and plot if asked to."""
    args = arguments(given)
    try:
        files = [Cells.read(path) for path in args.show] if args.show else run(args)
        for cells in files:
            print(markdown(cells))
        if args.plot and files:
            plot(files, args.plot)
    except KvslimError as error:
        sys.exit(f"jolt_table: {error}")


if __name__ == "__main__":
    main()
