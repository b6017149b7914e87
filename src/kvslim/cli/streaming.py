"""What `kvslim compress --stream` does instead of loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvslim.cli.common import progress_lines
from kvslim.errors import ConfigError, ModelSourceError

if TYPE_CHECKING:
    import torch

    from kvslim.palu_config import PaluConfig, PaluReport


def check_streaming(stream: bool, work_dir: Path | None, restart: bool, eval_text: Path | None, model: str) -> None:
    """Refuse options that do not go together.

    Raises:
        ConfigError: there is one.
        ModelSourceError: the model is not on this machine.
    """
    if not stream:
        if work_dir is not None or restart:
            raise ConfigError("--work-dir and --restart are about streaming. Add --stream, or drop them.")
        return
    if eval_text is not None:
        raise ConfigError(
            "--eval-text measures the whole model in memory, which --stream avoids. Measure the result afterwards."
        )
    if model != "default" and not Path(model).expanduser().is_dir():
        raise ModelSourceError(f"--stream reads a directory on this machine, and {model} is none. Download it first.")


def compress_streamed(
    model: str,
    out: Path,
    config: PaluConfig,
    calibration: str | None,
    cut: dict[str, Any],
    *,
    dtype: torch.dtype,
    device: str,
    work_dir: Path | None,
    restart: bool,
) -> PaluReport:
    """Compress a directory into another with progress lines; ``cut`` says how windows are cut from the text."""
    from transformers import AutoTokenizer

    from kvslim import models
    from kvslim.streaming.compressing import compress_checkpoint

    source = models.resolve(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelSourceError(
            f"The tokenizer of {model} cannot be loaded: {str(error).splitlines()[0]} Save it beside the model."
        ) from error
    with progress_lines() as progress:
        return compress_checkpoint(
            source,
            out,
            config,
            calibration,
            tokenizer,
            **cut,
            dtype=dtype,
            device=device,
            work_dir=work_dir,
            restart=restart,
            progress=progress,
        )
