"""LoRA recovery: train the latents of a Palu-compressed model on instruction data (Palu, Eq. 9 and Appendix F).

``h = A x + A' B' x`` with the factors ``A`` of the compression fixed and ``A'``, ``B'`` of small rank trained on the
next-token loss, then merged into ``A``: the model has the size and speed that it had. Needs peft:
``pip install 'kvslim[recovery]'``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvslim.attending.families import text_config
from kvslim.attending.latent_model import LatentModelMixin
from kvslim.checkpointing.fingerprint import identity_of
from kvslim.config import is_count
from kvslim.errors import ConfigError, UnsupportedModelError
from kvslim.files import check_writable
from kvslim.palu_build import Progress
from kvslim.recovering.adapters import adapted, require_peft, target_layers
from kvslim.recovering.rows import TrainingSet, read_rows, training_set
from kvslim.recovering.state import read_state, write_state
from kvslim.recovering.training import Training, own_randomness, seed_all
from kvslim.recovery_config import RecoveryConfig, RecoveryReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RecoveryConfig", "RecoveryReport", "read_rows", "recover", "require_peft"]


def recover(
    model: PreTrainedModel,
    tokenizer: Any,
    rows: Iterable[Any],
    config: RecoveryConfig | None = None,
    *,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 50,
    progress: Progress | None = None,
) -> RecoveryReport:
    """Train adapters and merge them, **in place**; the report is also the last of ``model.palu.recoveries``.

    Whatever ends the training early, an interrupt included, leaves the model as it was. Equal model, rows and settings
    give equal weights: bit for bit on a CPU with as many threads, up to the order of its sums on a GPU. The global
    random state is not touched.

    Args:
        model: compressed by :func:`kvslim.compress` or loaded by :func:`kvslim.palu.load`; float32 or bfloat16.
        tokenizer: its tokenizer.
        rows: texts, ``{"text": ...}``, or ``{"instruction": ..., "input": ..., "output": ...}``.
        config: how to train; the paper's settings by default.
        checkpoint: a file for the state of the training. If it is there already, the training goes on from it, and ends
            with the weights that it would have had without a break.
        checkpoint_every: steps between two writes of that file. It is written after the last step too.
        progress: called with ``"recovery"``, steps done and steps in all.

    Raises:
        MissingDependencyError: peft is not installed.
        UnsupportedModelError: the model is not compressed, quantized, or spread over several devices.
        TrainingDataError: there are no rows, or one is malformed or too short.
        CheckpointError: the file at ``checkpoint`` is damaged, or of other settings, rows or another model.
        ConfigError: the model has no positions for ``max_length`` tokens, or ``checkpoint`` cannot be written.
        NonFiniteError: loss, gradient or a merged weight is NaN or Inf.
    """
    config = config or RecoveryConfig()
    place = None if checkpoint is None else Path(checkpoint)
    _check(model, config, place, checkpoint_every)
    data = training_set(tokenizer, rows, config)
    purpose = {
        "config": {**config.to_dict(), "targets": list(config.targets)},
        "data_sha256": data.sha256,
        "model": identity_of(model).to_dict(),
    }
    with own_randomness(model.device):
        seed_all(config.seed, model.device)
        with adapted(model, config) as parameters:
            state = None if place is None else read_state(place, purpose, Training.shapes(parameters))
            training = Training(model, parameters, data, config, state)

            def after_step(done: int) -> None:
                if place is not None and (done % checkpoint_every == 0 or done == training.total):
                    write_state(place, purpose, training.state())
                if progress is not None:
                    progress("recovery", done, training.total)

            training.run(after_step)
            report = _report(config, data, training)
    model.palu = replace(model.palu, recoveries=(*model.palu.recoveries, report))
    return report


def _check(model: PreTrainedModel, config: RecoveryConfig, place: Path | None, every: int) -> None:
    """Refuse what cannot be trained, before any work."""
    require_peft()
    if not isinstance(model, LatentModelMixin):
        raise UnsupportedModelError("The model is not compressed. Call kvslim.compress first.")
    target_layers(model, config.targets)
    most = getattr(text_config(model), "max_position_embeddings", None)
    if most is not None and config.max_length > most:
        raise ConfigError(f"max_length is {config.max_length}, but the model has {most} positions. Lower it.")
    if not is_count(every):
        raise ConfigError(f"checkpoint_every is a positive number of steps, not {every!r}.")
    if place is not None:
        check_writable(place)


def _report(config: RecoveryConfig, data: TrainingSet, training: Training) -> RecoveryReport:
    return RecoveryReport(
        config=config,
        sequences=len(data.ids),
        tokens=data.tokens,
        truncated=data.truncated,
        skipped=data.skipped,
        parameters=sum(parameter.numel() for parameter in training.parameters.values()),
        losses=tuple(training.losses),
        data_sha256=data.sha256,
    )
