"""The commands for sessions: keep the cache of a conversation in a file, look at it, go on from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvslim.cli.common import Device, DType, ModelName, check_model_name, dtype_of, is_compressed, load_model
from kvslim.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

SessionPath = Annotated[Path, typer.Argument(metavar="FILE", help="A session file.")]
Prompt = Annotated[str, typer.Option(help="The next turn.")]
NewTokens = Annotated[int, typer.Option(help="Length of the answer, at most.")]
StatsPath = Annotated[
    Path | None, typer.Option(help="Statistics of kvslim calibrate: for graded caches. [default: jolt]")
]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")]

_MARK = "\N{BULLET}kvslim\N{BULLET}"


@app.command("info", epilog="Example:\n\nkvslim cache info report.session")
def show_info(file: SessionPath) -> None:
    """Say what a session holds: model, tokens, bytes, errors. Its tensors are not read."""
    from kvslim.checkpointing.session_info import info

    typer.echo(str(info(file)))


@app.command(
    epilog='Example:\n\nkvslim cache save default -o report.session --prompt-file report.txt --prompt "Sum this up."'
)
def save(  # noqa: PLR0913, PLR0917  # each option of the command is a parameter
    model: ModelName,
    out: Annotated[Path, typer.Option("--out", "-o", help="The session file to write.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file put in front of the prompt.")] = None,
    ratio: Annotated[float, typer.Option(help="bf16 over compressed bytes.")] = 3.0,
    stats: StatsPath = None,
    max_new_tokens: NewTokens = 128,
    raw: Raw = False,
    dtype: DType = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Answer a prompt as [bold]kvslim generate[/bold] does, and keep the compressed cache in a file."""
    from kvslim.evaluating.texts import read_text
    from kvslim.files import check_writable
    from kvslim.graded import GradedCache, GradedConfig, GradedStats
    from kvslim.jolt import JoltCache, JoltConfig

    config = JoltConfig(ratio=ratio)
    sidecar = None if stats is None else GradedStats.load(stats)
    parts = [read_text(prompt_file).text] if prompt_file is not None else []
    text = "\n\n".join([*parts, *([prompt] if prompt else [])])
    _check(model, text, max_new_tokens, dtype)
    check_writable(out)
    loaded, tokenizer = load_model(model, dtype_of(dtype), device)
    if not raw and getattr(tokenizer, "chat_template", None) is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
    cache: Any = JoltCache(loaded, config)
    if sidecar is not None:
        cache = GradedCache(loaded, sidecar, GradedConfig(ratio=ratio))
    _answer_and_save(loaded, tokenizer, ids, cache, max_new_tokens, out)


@app.command(
    epilog='Example:\n\nkvslim cache resume report.session default --prompt "And the costs?" -o report.session'
)
def resume(
    file: SessionPath,
    model: ModelName,
    prompt: Prompt,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the session here afterwards.")] = None,
    max_new_tokens: NewTokens = 128,
    stats: StatsPath = None,
    raw: Raw = False,
    dtype: DType = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Go on from a saved session: only the new turn is computed."""
    from kvslim.checkpointing.session_info import info
    from kvslim.files import check_writable

    if info(file).id_tokens is None or info(file).rows != 1:
        raise ConfigError(f"{file} has not the token ids of one conversation, so there is nothing to go on from.")
    _check(model, prompt, max_new_tokens, dtype)
    if out is not None:
        check_writable(out)
    from kvslim.graded import GradedStats
    from kvslim.sessions import load_session

    sidecar = None if stats is None else GradedStats.load(stats)
    loaded, tokenizer = load_model(model, dtype_of(dtype), device)
    session = load_session(file, loaded, tokenizer, stats=sidecar)
    assert session.input_ids is not None  # info has said so
    turn = _next_turn(tokenizer, session.input_ids, prompt, raw)
    _answer_and_save(loaded, tokenizer, turn, session.cache, max_new_tokens, out)


def _check(model: str, text: str, max_new_tokens: int, dtype: str) -> None:
    """Refuse what can be refused before a model is loaded."""
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is at least 1, not {max_new_tokens}.")
    if not text.strip():
        raise ConfigError("There is no prompt: give --prompt TEXT, or with save --prompt-file FILE.")
    dtype_of(dtype)
    check_model_name(model)
    if is_compressed(model):
        raise UnsupportedModelError(
            f"{model} is compressed by Palu and keeps latents already. Give the original model."
        )


def _next_turn(tokenizer: Any, ids: torch.Tensor, prompt: str, raw: bool) -> torch.Tensor:
    """All token ids with ``prompt`` as another turn behind them.

    The chat template is asked what it puts between an answer and the next one. The answer's own end token may be there.
    """
    import torch

    text = prompt
    if not raw and getattr(tokenizer, "chat_template", None) is not None:
        turns = (("user", "?"), ("assistant", _MARK), ("user", prompt))
        messages = [{"role": role, "content": content} for role, content in turns]
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        _, found, text = whole.partition(_MARK)
        if not found:
            raise ConfigError("The chat template of this model changes earlier answers. Use --raw.")
        end = tokenizer.eos_token
        if end and text.lstrip().startswith(end) and int(ids[0, -1]) == tokenizer.eos_token_id:
            text = text.lstrip().removeprefix(end)
    new = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return torch.cat((ids, new.to(ids.device)), dim=1)


def _answer_and_save(
    model: Any, tokenizer: Any, ids: torch.Tensor, cache: Any, max_new_tokens: int, out: Path | None
) -> None:
    import torch
    from transformers import TextStreamer

    from kvslim.attending.compat import cache_keyword
    from kvslim.checkpointing.session_info import info

    ids = ids.to(model.device)
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **{cache_keyword(model): cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    if out is not None:
        cache.save(out, written, tokenizer)
        typer.echo(f"\n{info(out)}", err=True)
