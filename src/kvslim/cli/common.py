"""What all commands share: clean errors, progress on standard error, common options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvslim.errors import ConfigError, KvslimError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="'default' (the embedded SmolLM2-135M), a model directory, or a hub id.")
]
DType = Annotated[str, typer.Option(help="Weights in memory: float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1 …")]
TextFile = Annotated[Path | None, typer.Option("--text", help="UTF-8 text file; Python's reference topics by default.")]

CalibrationData = Annotated[
    list[Path] | None,
    typer.Option(
        help="Data to calibrate on: text, .jsonl or .json rows, or these as .xz; several are mixed in equal "
        "shares. [default: reference prose, source code and licences that are installed]"
    ),
]


class CleanErrors(typer.core.TyperGroup):
    """Prints every error of kvslim as one line and exits with code 2; ``--debug`` shows the traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KvslimError as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"kvslim: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called ``name``.

    Raises:
        ConfigError: it is not one of the three.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"--dtype is one of {', '.join(known)}, not {name!r}.")
    return known[name]


def counts(option: str, listed: str) -> tuple[int, ...]:
    """The comma-separated numbers given for ``option``.

    Raises:
        ConfigError: there are none, or one is no whole number.
    """
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"{option} are whole numbers with commas between them, such as 1024,2048, not {listed!r}.")
    return tuple(map(int, parts))


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be a model, without preparing or loading any.

    Raises:
        ModelSourceError: it is neither ``default``, nor a model directory, nor a possible hub id.
    """
    from kvslim import models

    if name != "default":
        models.resolve(name)


def check_original(name: str) -> None:
    """As :func:`check_model_name`; refuse compressed models too.

    Raises:
        ModelSourceError, UnsupportedModelError: it is no model, or a compressed one.
    """
    check_model_name(name)
    if is_compressed(name):
        raise UnsupportedModelError(f"{name} is compressed already. Give the original model.")


def load_model(name: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """The model in eval mode and its tokenizer, original or compressed; transformers draws no bars of its own."""
    from transformers.utils import logging

    from kvslim import models

    logging.disable_progress_bar()
    if is_compressed(name):
        return load_compressed(name, dtype, device)
    return models.load(name, dtype=dtype, device=device)


def load_compressed(name: str, dtype: torch.dtype | None, device: str) -> tuple[Any, Any]:
    """A compressed model in eval mode, by default in the dtype that it was saved in, and its tokenizer."""
    from transformers import AutoTokenizer

    from kvslim import palu

    model = palu.load(name, **({} if dtype is None else {"dtype": dtype})).to(device)
    return model, AutoTokenizer.from_pretrained(name, config=model.config)


def is_compressed(name: str) -> bool:
    """Whether ``name`` is a directory that ``kvslim compress`` made."""
    from kvslim.checkpointing.latent_model import is_latent_model

    return name != "default" and is_latent_model(Path(name).expanduser())


@contextmanager
def progress_lines() -> Iterator[Callable[[str, int, int], None]]:
    """Give a callback ``(what, done, of)`` that draws one line with a bar per stage on standard error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task: TaskID | None = None
        last = 0

        def report(what: str, done: int, of: int) -> None:
            nonlocal task, last
            if task is None or done <= last:  # a new stage counts from the start again
                task = progress.add_task(what, total=of)
            progress.update(task, description=what, completed=done)
            last = done

        yield report
