"""The application: its commands and its entry point."""

from __future__ import annotations

from typing import Annotated

import typer

from kvslim.cli import evaluating, generating
from kvslim.cli.common import CleanErrors

app = typer.Typer(
    cls=CleanErrors,
    name="kvslim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Make the KV cache of a language model several times smaller, with the loss measured and shown."""


app.command()(evaluating.demo)
app.command()(generating.generate)
app.command("eval")(evaluating.evaluate_methods)
app.command()(evaluating.spectrum)


def main() -> None:
    """Entry point of the ``kvslim`` command."""
    app()
