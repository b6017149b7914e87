"""The command that makes the sidecar of graded caches: calibrate."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvslim.cli.common import (
    CalibrationData,
    Device,
    DType,
    ModelName,
    check_original,
    dtype_of,
    load_model,
    progress_lines,
)


def calibrate(
    model: ModelName,
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the statistics, such as stats.safetensors.")],
    calibration: CalibrationData = None,
    windows: Annotated[int, typer.Option(help="Windows at most.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of each of them.")] = 2048,
    metric: Annotated[str, typer.Option(help="What an error costs: loss, diagonal, layer or energy.")] = "loss",
    group_size: Annotated[int | None, typer.Option(help="KV heads that share channels. [default: all]")] = None,
    dtype: DType = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Calibrate graded caches for a model: once, in minutes. The statistics serve the model in this dtype only.

    To use them: `kvslim generate MODEL --cache graded --stats FILE`, or in Python
    kvslim.GradedCache(model, kvslim.GradedStats.load(FILE), ratio=4).
    """
    from kvslim.calibrating.corpora import default_mix, origin_of, read_corpus
    from kvslim.files import check_writable
    from kvslim.graded import GradedCalibration
    from kvslim.graded import calibrate as calibrate_model

    settings = GradedCalibration.from_dict({"metric": metric, "group_size": group_size})
    weights = dtype_of(dtype)
    check_original(model)
    check_writable(out)
    corpora = list(map(read_corpus, dict.fromkeys(calibration))) if calibration else default_mix()
    texts: Any = {corpus.name: corpus.text for corpus in corpora} if len(corpora) > 1 else corpora[0].text
    loaded, tokenizer = load_model(model, weights, device)
    started = time.perf_counter()
    with progress_lines() as progress:
        stats = calibrate_model(
            loaded,
            tokenizer,
            texts,
            settings,
            at_most=windows,
            length=length,
            origin=origin_of(corpora),
            progress=progress,
        )
    stats.save(out)
    typer.echo(
        f"Calibrated on {stats.tables.tokens} tokens of {stats.origin}, in {time.perf_counter() - started:.0f} s."
    )
    typer.echo(f"Written: {out}, {out.stat().st_size / 1e6:.1f} MB", err=True)
