"""The command that trains a compressed model: recover."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvslim.cli.common import Device, check_model_name, dtype_of, is_compressed, load_compressed, progress_lines
from kvslim.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from kvslim.evaluating.texts import TextSource
    from kvslim.recovery import RecoveryReport

_EVAL_LENGTH = 2048


def recover(  # noqa: PLR0913, PLR0917  # each option of the command is a parameter
    model: Annotated[str, typer.Argument(metavar="MODEL_DIR", help="A directory that `kvslim compress` made.")],
    data: Annotated[
        list[Path], typer.Option(help="Instruction rows or texts: .jsonl, .json or plain text. Any number of times.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory for the recovered model.")],
    rank: Annotated[int, typer.Option(help="Rank of each adapter.")] = 32,
    alpha: Annotated[float, typer.Option(help="Adapters are scaled by alpha / rank.")] = 32.0,
    lr: Annotated[float, typer.Option(help="Highest learning rate; it falls as a cosine.")] = 2e-4,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps instead of epochs.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per step.")] = 4,
    micro_batch: Annotated[
        int | None, typer.Option(help="Sequences in memory at once, where a batch does not fit. [default: the batch]")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    targets: Annotated[str, typer.Option(help="Of latents, attention, mlp, with commas: what is trained.")] = "latents",
    template: Annotated[str, typer.Option(help="alpaca, or chat for the tokenizer's own.")] = "alpaca",
    responses_only: Annotated[bool, typer.Option("--responses-only", help="Learn the responses only.")] = False,
    bos: Annotated[bool, typer.Option("--bos", help="Start each row with the beginning-of-text token.")] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same weights.")] = 0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File for the state; if it is there, the training goes on from it.")
    ] = None,
    eval_text: Annotated[Path | None, typer.Option(help="Text to show the perplexity of, before and after.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Weights in memory: float32 or bfloat16. [default: as stored]")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Train a compressed model to recover what it lost: LoRA on its latents, merged (needs peft).

    The result has the size of MODEL_DIR and is used like it.
    """
    from kvslim import palu, recovery
    from kvslim.evaluating.texts import read_text
    from kvslim.files import check_new_directory

    config = recovery.RecoveryConfig(
        rank=rank, alpha=alpha, learning_rate=lr, epochs=epochs, steps=steps, batch_size=batch_size,
        micro_batch=micro_batch, max_length=max_length, targets=tuple(filter(None, targets.split(","))),
        template=template, responses_only=responses_only, prepend_bos=bos, seed=seed,
    )  # fmt: skip
    weights = None if dtype is None else dtype_of(dtype)
    recovery.require_peft()
    check_model_name(model)
    if not is_compressed(model):
        raise UnsupportedModelError(f"{model} is not compressed. Make a compressed model with `kvslim compress` first.")
    check_new_directory(out)
    rows = recovery.read_rows(data)
    text = None if eval_text is None else read_text(eval_text)
    if eval_text is not None and any(eval_text.samefile(path) for path in data):
        raise ConfigError(f"{eval_text} is trained on, so its perplexity would say nothing. Give another --eval-text.")

    loaded, tokenizer = load_compressed(model, weights, device)
    if text is not None:
        typer.echo(f"Perplexity before: {_perplexity(loaded, tokenizer, text, bos):.3f} on {text.origin}.")
    with progress_lines() as progress:
        report = recovery.recover(loaded, tokenizer, rows, config, checkpoint=checkpoint, progress=progress)
    palu.save(loaded, out, tokenizer)
    if text is not None:
        typer.echo(f"Perplexity after: {_perplexity(loaded, tokenizer, text, bos):.3f}.")
    _print_summary(report, out)


def _perplexity(model: Any, tokenizer: Any, text: TextSource, bos: bool) -> float:
    """Over the whole text, in windows that do not overlap."""
    from kvslim.evaluating.continuation import perplexity
    from kvslim.evaluating.windows import bos_token, evenly_spaced_windows

    first = bos_token(tokenizer) if bos else None
    ids = text.tokens(tokenizer)
    length = min(_EVAL_LENGTH, model.config.max_position_embeddings, len(ids) + bos)
    return perplexity(model, evenly_spaced_windows(ids, len(ids) // (length - bos), length, first))


def _print_summary(report: RecoveryReport, out: Path) -> None:
    typer.echo(
        f"Trained {report.parameters} parameters on {report.sequences} sequences, {report.steps} steps: loss "
        f"{report.first_loss:.3f} in the first tenth, {report.last_loss:.3f} in the last."
    )
    if report.skipped:
        typer.echo(f"Left out {report.skipped} rows with an empty output.")
    typer.echo(f"Written: {out}", err=True)
