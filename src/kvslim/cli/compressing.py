"""The command that changes a model: compress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from kvslim.cli.streaming import check_streaming, compress_streamed
from kvslim.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from kvslim.calibrating.corpora import Corpus
    from kvslim.evaluating.texts import TextSource
    from kvslim.palu import PaluReport

_EVAL_WINDOWS = 32
"""Windows that the perplexity is measured on at most."""


def compress(  # noqa: PLR0913, PLR0917  # each option of the command is a parameter
    model: ModelName,
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory for the compressed model.")],
    rate: Annotated[float, typer.Option(help="Fraction of the latent channels to remove, 0 to below 1.")] = 0.3,
    group_size: Annotated[
        int | None, typer.Option(help="KV heads that share a decomposition: 1 is per head. [default: all]")
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help="spectral, uniform, fisher or fisher-rms. [default: spectral; uniform for svd, --stream]"),
    ] = None,
    decomposition: Annotated[
        str | None,
        typer.Option(
            help="loss-aware or whitened (by calibration text), or svd. [default: loss-aware; whitened for --stream]"
        ),
    ] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Calibrate each layer behind the layers compressed before it.")
    ] = False,
    rank_multiple: Annotated[int, typer.Option(help="Ranks are multiples of this.")] = 1,
    fusion: Annotated[str, typer.Option(help="Second factors: auto (fewer parameters), fold, apply or none.")] = "auto",
    bits: Annotated[int, typer.Option(help="Width of cached latents: 2, 3, 4 or 8; 16 keeps the model's dtype.")] = 16,
    hadamard: Annotated[
        bool | None,
        typer.Option(
            "--hadamard/--no-hadamard", help="Fold a Hadamard rotation into the factors, below 16 bits. [default: yes]"
        ),
    ] = None,
    graded: Annotated[
        float | None,
        typer.Option(
            help="Mean bits per channel of the original keys and values, given out by channel, in place of --bits."
        ),
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="First tokens that stay exact, of coded latents. [default: 0; 4 with --graded]")
    ] = None,
    window: Annotated[int, typer.Option(help="Most recent tokens that stay exact, of coded latents.")] = 0,
    calibration: CalibrationData = None,
    calibration_windows: Annotated[
        int | None, typer.Option(help="Windows to calibrate on. [default: as many as fit, up to 256]")
    ] = None,
    window_length: Annotated[int, typer.Option(help="Tokens of each of them.")] = 2048,
    eval_text: Annotated[
        Path | None, typer.Option(help="Other text: its perplexity before and after goes into the model card.")
    ] = None,
    bos: Annotated[bool, typer.Option("--bos", help="Start each window with the beginning-of-text token.")] = False,
    stats_cache: Annotated[
        bool, typer.Option("--stats-cache/--no-stats-cache", help="Keep calibration statistics for the next time.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the ranks per layer to this PNG.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="One layer after the other, from disk to disk, for large models.")
    ] = False,
    work_dir: Annotated[
        Path | None, typer.Option(help="Where --stream keeps what is done. [default: OUT.partial]")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget what a broken --stream has done.")] = False,
    dtype: DType = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Compress a model by Palu once, so that it caches small latents from then on.

    With --stream about two layers are in memory at a time, and after a break the same command goes on where it was.

    To use the result: `kvslim generate OUT --cache none`, or in Python import kvslim and
    AutoModelForCausalLM.from_pretrained(OUT).
    """
    from kvslim import palu
    from kvslim.calibrating.corpora import default_mix, origin_of, read_corpus
    from kvslim.calibrating.stats_cache import user_folder
    from kvslim.calibrating.windows import windows_hash
    from kvslim.evaluating.texts import check_apart, read_text
    from kvslim.files import check_new_directory, check_writable

    config = palu.PaluConfig(
        rate=rate,
        group_size=group_size,
        ranks=ranks or ("uniform" if stream else "auto"),
        decomposition=decomposition or ("whitened" if stream else "loss-aware"),
        sequential=sequential,
        rank_multiple=rank_multiple,
        fusion=fusion,
        bits=bits,
        hadamard=hadamard,
        graded=graded,
        sinks=sinks,
        window=window,
    )
    if window_length < 2 or (calibration_windows is not None and calibration_windows < 1):
        raise ConfigError("--window-length is at least 2 and --calibration-windows at least 1.")
    weights = dtype_of(dtype)
    check_original(model)
    check_streaming(stream, work_dir, restart, eval_text, model)
    if not stream:  # which may find its own result of an earlier run there
        check_new_directory(out)
    if plot is not None:
        check_writable(plot)
    needed = config.needs_calibration
    corpora = (list(map(read_corpus, dict.fromkeys(calibration))) if calibration else default_mix()) if needed else []
    test = None if eval_text is None else read_text(eval_text)
    for corpus in corpora:
        check_apart(test, corpus)

    cut: dict[str, Any] = {
        "calibration_windows": calibration_windows,
        "window_length": window_length,
        "prepend_bos": bos,
    }
    given = _source(corpora)
    if stream:
        report = compress_streamed(
            model, out, config, given, cut, dtype=weights, device=device, work_dir=work_dir, restart=restart
        )
        _finish(report, origin_of(corpora) if corpora else None, out, model, plot)
        return
    loaded, tokenizer = load_model(model, weights, device)
    windows = None if test is None else _test_windows(tokenizer, test, window_length, bos)
    before = None if windows is None else measure(loaded, windows)
    with progress_lines() as progress:
        palu.compress(
            loaded,
            tokenizer,
            config,
            calibration=given,
            stats_cache=user_folder() if stats_cache else None,
            **cut,
            progress=progress,
        )
    quality: dict[str, Any] | None = None
    if windows is not None and test is not None:
        quality = {
            "perplexity": measure(loaded, windows),
            "perplexity_before": before,
            "text": f"{Path(test.origin).name}, {windows.shape[0]} windows of {windows.shape[1]} tokens",
            "windows_sha256": windows_hash(windows),
        }
    palu.save(loaded, out, tokenizer, quality)
    _finish(loaded.palu, origin_of(corpora) if corpora else None, out, model, plot)
    if quality is not None:
        typer.echo(f"Perplexity on {quality['text']}: {before:.3f} before, {quality['perplexity']:.3f} after.")


def _test_windows(tokenizer: Any, test: TextSource, length: int, bos: bool) -> Tensor:
    from kvslim.calibrating.windows import windows_from_texts

    if (tokens := len(test.tokens(tokenizer))) < length:
        raise ConfigError(f"--eval-text has {tokens} tokens, less than one window. Give more, or a --window-length.")
    return windows_from_texts(tokenizer, test.text, length, None, bos, _EVAL_WINDOWS)


def measure(model: Any, windows: Tensor) -> float:
    """The perplexity that the model card states, of a model before or after compression."""
    from kvslim.evaluating.continuation import perplexity

    return perplexity(model, windows)


def _source(corpora: list[Corpus]) -> Any:
    """What to calibrate on: nothing, one text, or a mix."""
    if len(corpora) > 1:
        return {corpus.name: corpus.text for corpus in corpora}
    return corpora[0].text if corpora else None


def _finish(report: PaluReport, origin: str | None, out: Path, model: str, plot: Path | None) -> None:
    _print_summary(report, origin, out)
    if plot is not None:
        from kvslim.evaluating.plots import plot_ranks

        name = f"{report.config.ranks}, {report.config.decomposition}"
        plot_ranks({name: report.plan}, plot, f"{model}: ranks per layer")
        typer.echo(f"Written: {plot}", err=True)


def _print_summary(report: PaluReport, origin: str | None, out: Path) -> None:
    plan = report.plan
    typer.echo(f"Kept {plan.kept:.1%} of the latent channels, {plan.channels} per token in all layers together.")
    if report.config.graded is not None:
        typer.echo(f"The cache grades latents at {report.config.graded:g} bits per channel of the original.")
    elif report.config.coded:
        rotation = "with" if report.config.hadamard else "without"
        typer.echo(f"The cache packs latents at {report.config.bits} bits, {rotation} Hadamard rotation.")
    for note in plan.notes:
        typer.echo(note)
    if origin is not None:
        turn = ", each layer behind the compressed ones before it" if report.config.sequential else ""
        typer.echo(f"Calibrated on {origin}{turn}.")
    typer.echo(f"Written: {out}", err=True)
