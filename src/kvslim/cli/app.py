"""The application: its commands and its entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from kvslim.cli import calibrating, compressing, evaluating, generating, needle, recovering, sessions
from kvslim.cli.common import CleanErrors

app = typer.Typer(
    cls=CleanErrors,
    name="kvslim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Make the KV cache of a language model several times smaller, with the loss measured and shown."""


_EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("kvslim demo", "kvslim demo --text book.txt --tokens 2048 --out book-demo"),
    "eval": (
        "kvslim eval default --methods none,int8,rot4,jolt-3x --text wiki.txt --out results.json --plot",
        "kvslim eval org/model --methods none,palu-30,palu-50:spectral:gs4 --text test.txt --calibration train.txt",
    ),
    "calibrate": (
        "kvslim calibrate default -o smollm2.stats.safetensors",
        "kvslim calibrate org/model -o stats.safetensors --calibration train.txt --calibration code.jsonl",
    ),
    "compress": (
        "kvslim compress default -o smollm2-palu30 --rate 0.3",
        "kvslim compress org/model -o slim --rate 0.5 --group-size 4 --ranks fisher --calibration train.txt",
    ),
    "recover": (
        "kvslim recover slim -o slim-recovered --data alpaca.jsonl --checkpoint slim.state",
        "kvslim recover slim -o slim-recovered --data alpaca.jsonl --data code.jsonl --epochs 3 --eval-text test.txt",
    ),
    "generate": (
        'kvslim generate default --prompt "What is a KV cache?" --cache none',
        'kvslim generate default --prompt-file report.txt --prompt "Sum this up." --cache jolt --ratio 4',
        'kvslim generate default --prompt "What is a KV cache?" --cache graded --stats smollm2.stats.safetensors',
    ),
    "needle": (
        "kvslim needle default --methods none,jolt-2x,jolt-3x --text novel.txt --out needle.json",
        "kvslim needle org/model --methods none,int4,jolt-4x --lengths 1024,2048,4096 --depths 5 --seeds 4",
    ),
    "sweep": (
        "kvslim sweep default --text wiki.test.txt --calibration wiki.valid.txt --out sweep.json",
        "kvslim sweep org/model --text test.txt --stats stats.safetensors --tokens 4096 --ratios 3,4,5",
    ),
    "spectrum": (
        "kvslim spectrum default",
        "kvslim spectrum org/model --text book.txt --tokens 4096 --out book-spectrum",
    ),
}

_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": evaluating.demo,
    "calibrate": calibrating.calibrate,
    "compress": compressing.compress,
    "recover": recovering.recover,
    "generate": generating.generate,
    "eval": evaluating.evaluate_methods,
    "needle": needle.needle,
    "spectrum": evaluating.spectrum,
    "sweep": evaluating.sweep,
}

for _name, _command in _COMMANDS.items():
    app.command(_name, epilog="\n\n".join(("Examples:", *_EXAMPLES[_name])))(_command)

app.add_typer(sessions.app, name="cache", help="Keep the cache of a conversation in a file, and go on from it.")


def main() -> None:
    """Entry point of the ``kvslim`` command."""
    app()
