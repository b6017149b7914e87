"""The command that writes: generate text from a compressed cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvslim.cli.common import Device, DType, ModelName, check_model_name, dtype_of, is_compressed, load_model
from kvslim.errors import ConfigError

if TYPE_CHECKING:
    from kvslim.evaluating.method_forms import CacheMethod


_RATIOS = {"jolt": 3, "graded": 4}
"""Ratios where none is given."""


def generate(  # noqa: PLR0913, PLR0917  # each option of the command is a parameter
    model: ModelName,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 file put in front of the prompt.")] = None,
    cache: Annotated[
        str, typer.Option(help="none, jolt, graded, int8 … int2, rot6 … rot2, or a full method name.")
    ] = "jolt",
    ratio: Annotated[
        float | None, typer.Option(help="For jolt and graded: bf16 over compressed bytes. [default: 3; 4 for graded]")
    ] = None,
    stats: Annotated[Path | None, typer.Option(help="For graded: statistics of kvslim calibrate.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer, at most.")] = 128,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")] = False,
    dtype: DType = "bfloat16",
    device: Device = "cpu",
) -> None:
    """Generate text from a compressed cache, greedily, and say what the cache took.

    The prompt is prefilled exactly and compressed before the second new token; the answer is kept exact.
    """
    from kvslim.evaluating.texts import read_text

    method = cache_method(cache, ratio, stats)
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is at least 1, not {max_new_tokens}.")
    parts = [read_text(prompt_file).text] if prompt_file is not None else []
    text = "\n\n".join([*parts, *([prompt] if prompt else [])])
    if not text.strip():
        raise ConfigError("There is no prompt: give --prompt TEXT, --prompt-file FILE, or both.")
    weights = dtype_of(dtype)
    check_model_name(model)
    if is_compressed(model) and method.family != "none":
        raise ConfigError(f"{model} is compressed by Palu and keeps latents already: use --cache none with it.")

    loaded, tokenizer = load_model(model, weights, device)
    store = method.make_cache(loaded)
    _stream(loaded, tokenizer, _ids(tokenizer, text, raw), store, max_new_tokens)
    typer.echo(f"\n{_report(store)}", err=True)


def cache_method(cache: str, ratio: float | None, stats: Path | None = None) -> CacheMethod:
    """The method that ``--cache``, ``--ratio`` and ``--stats`` name.

    Raises:
        ConfigError: no such method, one that is no cache, a ratio where there is none to choose, or statistics that
            are missing or not asked for.
        ModelSourceError, CheckpointError: the statistics cannot be read.
    """
    from kvslim.calibrating.graded_stats import GradedStats
    from kvslim.evaluating.graded_methods import StatsMethod
    from kvslim.evaluating.method_forms import CacheMethod
    from kvslim.evaluating.methods import parse_method

    name = cache
    if found := re.fullmatch("(jolt|graded)(:.*)?", cache):
        chosen = _RATIOS[found[1]] if ratio is None else ratio
        name = f"{found[1]}-{chosen:g}x{found[2] or ''}"
    elif ratio is not None:
        raise ConfigError(f"--ratio goes with --cache jolt or graded; {cache!r} has a ratio of its own.")
    method = parse_method(name)
    if isinstance(method, StatsMethod):
        if stats is None:
            metric = "" if method.calibration.metric == "loss" else f" --metric {method.calibration.metric}"
            raise ConfigError(f"{cache!r} needs statistics: kvslim calibrate MODEL{metric} -o FILE, then --stats FILE.")
        return replace(method, stats=GradedStats.load(stats))
    if stats is not None:
        raise ConfigError(f"--stats goes with --cache graded or kvtc-4x; {cache!r} needs none.")
    if not isinstance(method, CacheMethod):
        raise ConfigError(f"{cache!r} changes the model, not the cache: make the model first, with kvslim compress.")
    return method


def _ids(tokenizer: Any, text: str, raw: bool) -> Any:
    if not raw and getattr(tokenizer, "chat_template", None) is not None:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return tokenizer(text, return_tensors="pt")["input_ids"]


def _stream(model: Any, tokenizer: Any, ids: Any, cache: Any, max_new_tokens: int) -> None:
    import torch
    from transformers import TextStreamer

    from kvslim.attending.compat import cache_keyword

    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=torch.ones_like(ids).to(model.device),
        **{cache_keyword(model): cache},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )


def _report(cache: Any) -> str:
    """The summary of the cache's own report, without the line per cell."""
    from kvslim.evaluating.continuation import cache_bytes

    if hasattr(cache, "report"):
        return "\n".join(line for line in str(cache.report()).splitlines() if " B  error " not in line)
    what = str(cache) if hasattr(cache, "nbytes") else "uncompressed cache"
    return f"{what}: {cache.get_seq_length()} tokens, {cache_bytes(cache) / 1e6:.2f} MB in bf16"
