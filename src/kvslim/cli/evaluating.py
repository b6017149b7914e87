"""Commands that measure: demo, eval, spectrum."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvslim.cli.common import Device, DType, ModelName, TextFile, check_original, dtype_of, load_model, progress_lines
from kvslim.errors import ConfigError

if TYPE_CHECKING:
    from kvslim.demo import DemoResult
    from kvslim.evaluating.compare import MethodResult
    from kvslim.evaluating.continuation import Steps

_CALIBRATION = Annotated[
    Path | None, typer.Option(help="Text that Palu and graded caches are calibrated on; not the test text.")
]


def demo(
    model: Annotated[str, typer.Option(help="'default', a model directory, or a hub id.")] = "default",
    text: TextFile = None,
    out: Annotated[Path, typer.Option(help="Directory for demo.json and demo.png.")] = Path("demo-out"),
    tokens: Annotated[int, typer.Option(help="Tokens in the cache that is compressed.")] = 3840,
    score: Annotated[int, typer.Option(help="Tokens scored through it.")] = 256,
) -> None:
    """Compress the KV cache of a small real model and see bytes and quality, in minutes on a CPU."""
    from kvslim.demo import DemoConfig, run_demo, save_demo
    from kvslim.evaluating.texts import read_text
    from kvslim.files import check_writable

    config = DemoConfig(tokens=tokens, score=score)
    check_original(model)
    if text is not None:
        read_text(text)
    check_writable(out, directory=True)
    started = time.perf_counter()
    loaded, tokenizer = load_model(model, dtype_of("float32"), "cpu")
    with progress_lines() as progress:
        result = run_demo(loaded, tokenizer, model, config, text, progress)
    paths = save_demo(result, out)
    _print_demo(result, paths, time.perf_counter() - started)


def _print_demo(result: DemoResult, paths: list[Path], seconds: float) -> None:
    from rich import box
    from rich.table import Table

    console = Console(soft_wrap=False)
    results, continuation = result.results, result.continuation
    settings = results.settings
    console.print(f"\n[bold]Text[/]: {results.text}; Palu calibrated on {results.calibration}.")
    console.print(
        f"[bold]Protocol[/]: {settings['tokens']} tokens prefilled and compressed, the next {settings['score']} scored "
        f"through the compressed cache ({results.model.dtype}, 1 window). Ratios are against bf16."
    )
    console.print(results.table())
    console.print(f"[bold]Prompt[/]: {continuation.prompt}")
    sides = Table(box=box.SIMPLE_HEAD)
    sides.add_column("from the uncompressed cache")
    sides.add_column(f"from the {result.heard.ratio:.2f}x smaller cache ({continuation.method})")
    sides.add_row(continuation.uncompressed, continuation.compressed)
    console.print(sides)
    console.print(f"{continuation.report}\n", highlight=False)
    console.print(result.sentence, style="bold", highlight=False)
    console.print(f"\nWritten: {', '.join(map(str, paths))}. Took {seconds:.0f} s{_peak_memory()}.", highlight=False)


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:  # not on Windows
        return ""
    return f", at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory"


def evaluate_methods(  # noqa: PLR0913, PLR0917  # each option of the command is a parameter
    model: ModelName,
    methods: Annotated[str, typer.Option(help="Comma-separated method names, see below.")] = "none,int8,int4,jolt-3x",
    text: TextFile = None,
    calibration: _CALIBRATION = None,
    stats: Annotated[Path | None, typer.Option(help="Statistics for graded caches, of kvslim calibrate.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens prefilled and compressed per window.")] = 2048,
    score: Annotated[int, typer.Option(help="Tokens scored through the compressed cache.")] = 256,
    windows: Annotated[int, typer.Option(help="Windows, spread evenly over the text.")] = 12,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Also write a PNG beside --out.")] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Start each window with the beginning-of-text token.")] = False,
    stepwise: Annotated[bool, typer.Option("--stepwise", help="Feed the scored tokens one by one.")] = False,
    one_pass: Annotated[bool, typer.Option("--one-pass", help="Add one-pass perplexity for none and Palu.")] = False,
    calibration_windows: Annotated[int, typer.Option(help="Windows to calibrate on.")] = 16,
    calibration_length: Annotated[int, typer.Option(help="Tokens of each of them.")] = 2048,
    dtype: DType = "float32",
    device: Device = "cpu",
) -> None:
    """Measure methods on a text: prefill, compress, and score what follows through the compressed cache.

    Methods: none; int8 … int2 (per token); rot6 … rot2 (rotated, Lloyd-Max levels); jolt-3x, jolt-2.5x:post-rope,
    jolt-4x:bits=0/2/3/4:window=64, jolt-4x:paper, jolt-3x:uniform, jolt-3x:no-backbone, jolt-3x:gram; palu-30 (percent
    of channels removed), palu-50:fisher, palu-50:spectral:loss-aware, palu-30:gs1, palu-30:svd; graded-4x,
    graded-4x:speed, graded-3x:energy, graded-4x:gs1.
    """
    from kvslim.calibrating.graded_stats import GradedStats
    from kvslim.evaluating.evaluation import EvalConfig, evaluate
    from kvslim.evaluating.methods import check_methods, parse_methods
    from kvslim.evaluating.texts import check_apart, read_text

    chosen = parse_methods(methods)
    check_methods(chosen, calibrated=calibration is not None or stats is not None)
    steps: Steps = "token" if stepwise else "block"
    config = EvalConfig(tokens, score, steps, windows, bos, one_pass, calibration_windows, calibration_length)
    weights = dtype_of(dtype)
    check_original(model)
    source = None if text is None else read_text(text)
    other = None if calibration is None else read_text(calibration)
    check_apart(source, other)
    _check_out(out, plot)
    sidecar = None if stats is None else GradedStats.load(stats)

    loaded, tokenizer = load_model(model, weights, device)
    with progress_lines() as progress:
        results = evaluate(
            loaded, tokenizer, model, chosen, config, text=source, calibration=other, stats=sidecar, progress=progress
        )
    Console().print(results.table())
    if out is not None:
        results.save(out)
        typer.echo(f"Written: {out}", err=True)
        if plot:
            title = f"{model}: {tokens} tokens cached, {score} scored, {windows} windows"
            _plot(results.methods, out.with_suffix(".png"), title)


def sweep(
    model: ModelName,
    text: TextFile = None,
    calibration: _CALIBRATION = None,
    stats: Annotated[Path | None, typer.Option(help="Statistics for graded caches, of kvslim calibrate.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens prefilled and compressed per window.")] = 2048,
    windows: Annotated[int, typer.Option(help="Windows, spread evenly over the text.")] = 6,
    ratios: Annotated[str, typer.Option(help="Ratios of jolt and graded, comma-separated.")] = "2,2.5,3,3.5,4,5,6,8",
    out: Annotated[Path, typer.Option(help="JSON file for the results; a PNG is written beside it.")] = Path(
        "sweep.json"
    ),
    bos: Annotated[bool, typer.Option("--bos", help="Start each window with the beginning-of-text token.")] = False,
) -> None:
    """Measure every method at many ratios, draw them, and say where graded caches are not the best at equal bytes."""
    from kvslim.evaluating.results import EvalResults
    from kvslim.evaluating.sweep import beaten, near_lossless, plot_sweep, sweep_methods

    try:
        chosen = [float(part) for part in ratios.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--ratios are numbers with commas between them, such as 2,3,4, not {ratios!r}.") from None
    evaluate_methods(
        model,
        ",".join(sweep_methods(chosen)),
        text,
        calibration,
        stats,
        tokens=tokens,
        windows=windows,
        bos=bos,
        out=out,
    )
    results = EvalResults.from_json(out.read_text(encoding="utf-8"))
    plot_sweep(results.methods, out.with_suffix(".png"), f"{model}: {tokens} tokens cached, {windows} windows")
    for sentence in beaten(results.methods) or ["No method diverges less than graded caches at equal bytes."]:
        typer.echo(sentence)
    if best := near_lossless(results.methods):
        typer.echo(f"Near lossless (KL at most .001, agreement at least 99 %) up to {best.ratio:.2f}x ({best.method}).")
    typer.echo(f"Written: {out}, {out.with_suffix('.png')}", err=True)


def _check_out(out: Path | None, plot: bool) -> None:
    """Refuse, before any work, places where the results or the plot beside them cannot be written."""
    from kvslim.files import check_writable

    if out is None:
        if plot:
            raise ConfigError("--plot writes beside the results: give --out FILE too.")
        return
    if out.suffix.lower() == ".png":
        raise ConfigError(f"--out is the JSON file, and --plot writes a PNG beside it: {out} would be both.")
    check_writable(out)
    if plot:
        check_writable(out.with_suffix(".png"))


def _plot(methods: Sequence[MethodResult], path: Path, title: str) -> None:
    from kvslim.evaluating.plots import plot_quality, points_of

    if points_of(methods):
        plot_quality(methods, path, title)
        typer.echo(f"Written: {path}", err=True)
    else:
        typer.echo("No plot: no method differs from the uncompressed model.", err=True)


def spectrum(
    model: ModelName,
    text: TextFile = None,
    out: Annotated[Path, typer.Option(help="Directory for spectrum.json and spectrum.png.")] = Path("spectrum-out"),
    tokens: Annotated[int, typer.Option(help="Tokens of the cache to look at.")] = 2048,
    bos: Annotated[bool, typer.Option("--bos", help="Start with the beginning-of-text token.")] = False,
    dtype: DType = "float32",
    device: Device = "cpu",
) -> None:
    """Show which axes of the KV cache hold redundancy: heads, tokens, features, layers; before and after RoPE."""
    from kvslim.evaluating.texts import python_topics, read_text
    from kvslim.files import check_writable

    if tokens < 2:
        raise ConfigError(f"--tokens is at least 2, not {tokens}.")
    weights = dtype_of(dtype)
    check_original(model)
    source = read_text(text) if text is not None else None
    check_writable(out, directory=True)

    from kvslim.evaluating.spectrum import plot_spectra, spectrum_of
    from kvslim.evaluating.windows import bos_token, evenly_spaced_windows

    loaded, tokenizer = load_model(model, weights, device)
    if source is None:
        source, _ = python_topics(tokenizer, tokens)
    ids = evenly_spaced_windows(source.tokens(tokenizer), 1, tokens, bos_token(tokenizer) if bos else None)[0]
    results = spectrum_of(loaded, model, ids, source.origin)
    results.save(out / "spectrum.json")
    plot_spectra(results, out / "spectrum.png")
    for sentence in (*results.findings, *results.claims):
        typer.echo(sentence)
    typer.echo(f"Written: {out / 'spectrum.json'}, {out / 'spectrum.png'}", err=True)
