"""The command that hides a number in a long text and asks for it: needle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvslim.cli.common import (
    Device,
    DType,
    ModelName,
    TextFile,
    check_original,
    counts,
    dtype_of,
    load_model,
    progress_lines,
)
from kvslim.errors import ConfigError


def needle(
    model: ModelName,
    methods: Annotated[str, typer.Option(help="Comma-separated run-time methods, as for eval.")] = (
        "none,jolt-2x,jolt-3x"
    ),
    text: TextFile = None,
    lengths: Annotated[str, typer.Option(help="Tokens in the compressed cache, comma-separated.")] = "1024,2048,4096",
    depths: Annotated[int, typer.Option(help="Depths per length, from the beginning to the end.")] = 5,
    seeds: Annotated[int, typer.Option(help="Needles per length and depth.")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results; a PNG is written beside it.")] = None,
    dtype: DType = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Hide a number in a long text, compress the cache of the text, and ask for the number through it.

    The question is fed after the compression, so that it reads the compressed cache. The answer is decoded greedily and
    counts only if its first number is the hidden one, digit by digit.
    """
    from kvslim.evaluating.methods import parse_methods
    from kvslim.evaluating.needle import NeedleConfig, check_needle, run_needles
    from kvslim.evaluating.texts import all_python_topics, read_text
    from kvslim.files import check_writable

    chosen = check_needle(parse_methods(methods))
    config = NeedleConfig(counts("--lengths", lengths), depths, seeds)
    weights = dtype_of(dtype)
    check_original(model)
    source = read_text(text) if text is not None else all_python_topics()
    if out is not None:
        if out.suffix.lower() == ".png":
            raise ConfigError(f"--out is the JSON file, and a PNG is written beside it: {out} would be both.")
        check_writable(out)
        check_writable(out.with_suffix(".png"))

    from kvslim.evaluating.needle_results import NeedleResults, plot_needles
    from kvslim.evaluating.results import ModelFingerprint

    loaded, tokenizer = load_model(model, weights, device)
    with progress_lines() as progress:
        trials = run_needles(loaded, tokenizer, chosen, config, source, progress)
    results = NeedleResults.of(ModelFingerprint.of(model, loaded), source.origin, config, chosen, trials)
    Console().print(results.table())
    if out is not None:
        results.save(out)
        plot_needles(results, out.with_suffix(".png"))
        typer.echo(f"Written: {out}, {out.with_suffix('.png')}", err=True)
