"""Palu for a checkpoint that does not fit in memory: one decoder layer after the other, from disk to disk.

The hidden states of the calibration windows wait in a file between two layers, so memory holds about two layers, what
one window needs in one of them, and the Gram matrix. The result is what :func:`kvslim.palu.compress` and
:func:`kvslim.palu.save` make of the same windows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvslim.attending.families import family_of, text_config
from kvslim.attending.latent_forms import Forms
from kvslim.attending.latent_model import causal_class, latent_layout, layer_places, layer_size_of
from kvslim.attending.projections import layer_projections
from kvslim.calibrating.fisher import FisherStats
from kvslim.calibrating.grams import add_gram, require_finite
from kvslim.calibrating.mixing import windows_of
from kvslim.calibrating.windows import check_windows, windows_hash
from kvslim.checkpointing.latent_metadata import INDEX, Described, write_metadata
from kvslim.errors import CalibrationError, ConfigError, KvslimError
from kvslim.files import check_new_directory, check_writable, reason, sha256
from kvslim.models.loading import checked_device
from kvslim.palu_build import Progress, build_attention, forms_of
from kvslim.palu_checks import check_gram
from kvslim.palu_config import PaluConfig, PaluPlan, PaluReport, codes_of
from kvslim.palu_plan import plan
from kvslim.streaming.skeleton import Call, Skeleton, enough, read_config, run_layer, until_enough
from kvslim.streaming.tensors import SourceWeights, names_in, write_tensors
from kvslim.streaming.work import Work, is_work, open_work, read_hidden, remove_work, used, write_hidden
from kvslim.version import __version__

_WINDOWS_AT_MOST = 256
"""Calibration windows taken from long texts unless a number is given, as in memory."""
_SPARE = 64 << 20
"""Bytes of disk wanted beyond the weights and hidden states, for tokenizer, headers and manifest."""


@torch.no_grad()
def compress_checkpoint(  # noqa: PLR0913  # as palu.compress, and where to read and write
    source: str | Path,
    out: str | Path,
    config: PaluConfig,
    calibration: str | Iterable[str] | Tensor | None = None,
    tokenizer: Any = None,
    *,
    calibration_windows: int | None = None,
    window_length: int = 2048,
    prepend_bos: bool = False,
    fisher: FisherStats | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    work_dir: str | Path | None = None,
    restart: bool = False,
    progress: Progress | None = None,
) -> PaluReport:
    """Compress the model in one directory into another, with about two of its layers in memory.

    Killed at any moment, the same call goes on after the last finished layer. The new directory appears when it is
    complete; the work directory is removed then.

    Args:
        source: directory of an uncompressed model with safetensors weights.
        out: the new directory; must not exist, or be empty.
        config: what to do. Ranks are ``uniform`` unless ``fisher`` is given; ``spectral`` ranks and the ``loss-aware``
            decomposition need the whole model.
        calibration: text, several texts, or ``(windows, length)`` token ids. Not needed for plain SVD.
        tokenizer: for texts; written beside the new model if given.
        calibration_windows: windows to cut from the texts; ``None`` takes as many as fit, at most 256.
        window_length: tokens per window.
        prepend_bos: start each window with the beginning-of-text token, for models trained so.
        fisher: the information for ``fisher`` and ``fisher-rms`` ranks, collected elsewhere.
        dtype: of the model, while it is compressed and in the new directory; by default that of the stored weights.
        device: where layers run and are factored.
        work_dir: keeps what is done, on the same disk as ``out``. By default ``OUT.partial`` beside it.
        restart: forget what an earlier run has left there.
        progress: called with stage, steps done and steps in all.

    Returns:
        What was done, as in ``model.palu``.

    Raises:
        ModelSourceError: the source is no model directory, or its weights are missing, truncated or pickled.
        UnsupportedModelError: it is of no supported family, compressed already or quantized.
        ConfigError: the configuration needs the whole model, the place is taken, the disk is or would get full, or the
            work directory belongs to another compression.
        CalibrationError: calibration data is missing or too short.
        NonFiniteError: weights or activations hold NaN or Inf; the message names them.
        CheckpointError: the work directory was damaged.
    """
    folder, target = Path(source), Path(out)
    work_folder = Path(f"{target.absolute()}.partial") if work_dir is None else Path(work_dir)
    _check_streamable(config, fisher)
    model_config = read_config(folder)
    chosen = plan(model_config, config, fisher)
    windows = None
    if config.decomposition != "svd":
        windows = _windows(calibration, tokenizer, (window_length, calibration_windows, prepend_bos))
        windows = check_windows(windows, text_config(model_config).vocab_size)
    device, weights = checked_device(device), SourceWeights(folder)
    dtype = weights.dtype if dtype is None else dtype
    inputs = {
        "model": {"config": sha256(folder / "config.json"), "weights": weights.files()},
        "config": {**config.to_dict(), "ranks of the plan": [chosen.key_ranks, chosen.value_ranks]},
        "calibration": None if windows is None else windows_hash(windows),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device.type,
        "kvslim version": __version__,
    }
    skeleton = Skeleton.of(weights, model_config, dtype, device)
    forms = [forms_of(skeleton.model, config, chosen, layer) for layer in range(len(skeleton.layers))]
    report = _report(skeleton, config, chosen, forms, windows, fisher)
    _check_places(target, work_folder, _bytes_needed(skeleton, report, windows) - used(work_folder))
    with open_work(work_folder, inputs, restart=restart) as work:
        if not (work.assembled and not work.checkpoint.exists() and target.is_dir()):
            check_new_directory(target)
            _Run(skeleton, config, chosen, forms, windows, work, progress).all_layers()
            _assemble(skeleton, report, tokenizer, work)
            _put(work.checkpoint, target)
    remove_work(work_folder)
    return report


def _check_streamable(config: PaluConfig, fisher: FisherStats | None) -> None:
    if config.graded is not None:
        raise ConfigError(
            "graded shares bits among the channels of all layers, which are never in memory together when the model is "
            "streamed. Use bits, or compress without streaming (--stream)."
        )
    if config.decomposition == "loss-aware":
        raise ConfigError(
            "decomposition='loss-aware' needs gradients through the whole model, which is never in memory when it is "
            "streamed. Use whitened or svd, or compress without streaming (--stream)."
        )
    if config.ranks == "spectral" or (config.ranks != "uniform" and fisher is None):
        given = "." if config.ranks == "spectral" else ", or pass fisher=... collected elsewhere."
        raise ConfigError(
            f"ranks={config.ranks!r} need gradients through the whole model, which is never in memory when it is "
            f"streamed. Use uniform, or compress without streaming (--stream){given}"
        )


def _windows(calibration: Any, tokenizer: Any, cut: tuple[int, int | None, bool]) -> Tensor:
    if calibration is None:
        raise CalibrationError(
            "decomposition='whitened' needs calibration text. Pass calibration=..., or use decomposition='svd'."
        )
    return windows_of(tokenizer, calibration, *cut, _WINDOWS_AT_MOST)


def _report(
    skeleton: Skeleton,
    config: PaluConfig,
    chosen: PaluPlan,
    forms: list[Forms],
    windows: Tensor | None,
    fisher: FisherStats | None,
) -> PaluReport:
    size = layer_size_of(skeleton.model)
    layers = zip(forms, chosen.key_ranks, chosen.value_ranks, strict=True)
    return PaluReport(
        config=config,
        plan=chosen,
        forms=tuple((form.key, form.value) for form in forms),
        dense_parameters=size.dense * len(forms),
        parameters=sum(size.compressed(*layer) for layer in layers),
        calibration_tokens=0 if windows is None else windows.numel(),
        fisher_windows=fisher.windows if fisher is not None and config.needs_fisher else 0,
        calibration_sha256=None if windows is None else windows_hash(windows),
    )


def _bytes_needed(skeleton: Skeleton, report: PaluReport, windows: Tensor | None) -> int:
    """Disk that the new checkpoint, the hidden states before and after a layer, and the rest take."""
    parameters = int(sum(value.numel() for value in skeleton.model.parameters()))  # tied ones once
    hidden = 0 if windows is None else 2 * windows.numel() * int(skeleton.model.config.hidden_size)
    kept = parameters - report.dense_parameters + report.parameters
    return (kept + hidden) * skeleton.dtype.itemsize + _SPARE


def _check_places(target: Path, work_folder: Path, needed: int) -> None:
    """Refuse places where the run would fail in the end, before it starts."""
    if not is_work(work_folder):
        check_new_directory(target)
    check_writable(target, directory=True)
    check_writable(work_folder, directory=True)
    nearest = [
        next(place for place in (path, *path.parents) if place.exists())
        for path in (target.absolute(), work_folder.absolute())
    ]
    if nearest[0].stat().st_dev != nearest[1].stat().st_dev:
        raise ConfigError(
            f"{work_folder} and {target} are on different disks, so the result could not be moved in one step. Put the "
            f"work directory on the disk of the result."
        )
    free = shutil.disk_usage(nearest[1]).free
    if free < needed:
        raise ConfigError(
            f"{work_folder} needs {needed / 1e9:.2f} GB of disk, and {free / 1e9:.2f} GB are free. Make room, or "
            f"choose a place on another disk."
        )


@dataclass
class _Run:
    """The layers on their way from the old checkpoint to the new one."""

    skeleton: Skeleton
    config: PaluConfig
    chosen: PaluPlan
    forms: list[Forms]
    windows: Tensor | None
    work: Work
    progress: Progress | None

    def all_layers(self) -> None:
        """Write the new checkpoint's weights, as far as they are not written yet."""
        work, count = self.work, len(self.skeleton.layers)
        if work.assembled or work.done > count:
            return
        work.checkpoint.mkdir(exist_ok=True)
        if work.done < 0:
            self._start()
        self._places = layer_places(self.skeleton.model, codes_of(self.config, self.chosen))
        calls = self._calls() if work.done < count else []
        for index in range(work.done, count):
            self._layer(index, calls)
            if self.progress is not None:
                self.progress("layers", index + 1, count)
        rest = work.checkpoint / self._name(count)
        write_tensors(rest, self.skeleton.outside(), self.skeleton.dtype)
        work.commit(count + 1, [rest])

    def _name(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{len(self.skeleton.layers) + 1:05d}.safetensors"

    def _start(self) -> None:
        """Write the inputs of the first layer."""
        if self.windows is None:
            self.work.commit(0, [])
            return
        first = self.work.hidden(0)
        write_hidden(first, self.skeleton.front(self.windows).hidden(), self._check_dtype)
        self.work.commit(0, [first])

    def _calls(self) -> list[Call]:
        if self.windows is None:
            return []
        return self.skeleton.front(self.windows[:1]).calls(self.skeleton.layer(0))

    def _check_dtype(self, state: Tensor) -> None:
        if state.dtype != self.skeleton.dtype:
            raise ConfigError(
                f"The model's layers hand on {state.dtype}, not {self.skeleton.dtype}. Choose that dtype."
            )

    def _layer(self, index: int, calls: list[Call]) -> None:
        """Compress one layer and let the hidden states pass it."""
        work, layer, written = self.work, self.skeleton.layer(index), []
        before, after = work.hidden(index), work.hidden(index + 1)
        last, in_turn = index + 1 == len(self.skeleton.layers), bool(getattr(self.config, "sequential", False))
        gram = None
        if self.windows is not None:
            watched = _Watched(index, layer_projections(self.skeleton.model, self._attention(layer)).key.module)
            if last or in_turn:
                watched.alone(layer, self._read(before), calls[index])
            else:
                write_hidden(after, watched.passing(layer, self._read(before), calls[index]), self._check_dtype)
                written.append(after)
            gram = watched.total
        self._compress(index, layer, gram)
        if self.windows is not None and in_turn and not last:
            passed = (run_layer(layer, hidden, calls[index]) for hidden in self._read(before))
            write_hidden(after, passed, self._check_dtype)
            written.append(after)
        shard = work.checkpoint / self._name(index)
        prefix = self.skeleton.layers[index]
        write_tensors(shard, {f"{prefix}.{k}": v for k, v in layer.state_dict().items()}, self.skeleton.dtype)
        work.commit(index + 1, [*written, shard], None if self.windows is None else before)

    def _attention(self, layer: nn.Module) -> nn.Module:
        attention: nn.Module = getattr(layer, family_of(self.skeleton.model).attention)
        return attention

    def _compress(self, index: int, layer: nn.Module, gram: Tensor | None) -> None:
        original = self._attention(layer)
        parts = layer_projections(self.skeleton.model, original)
        ranks = (self.chosen.key_ranks[index], self.chosen.value_ranks[index])
        if gram is not None:
            check_gram(gram, f"The Gram matrix of layer {index}'s inputs")
        metric = (gram, (None, None))
        module = build_attention(original, self._places[index], parts, ranks, self.forms[index], metric, self.config)
        setattr(layer, family_of(self.skeleton.model).attention, module)

    def _read(self, path: Path) -> Iterator[Tensor]:
        assert self.windows is not None
        shape = (*self.windows.shape, int(self.skeleton.model.config.hidden_size))
        return read_hidden(path, shape, self.skeleton.dtype, self.skeleton.device)


class _Watched:
    """Sums the Gram matrix of what a layer's key projection reads."""

    def __init__(self, index: int, key: nn.Module) -> None:
        self.index, self.key = index, key
        self.total: Tensor | None = None

    def passing(self, layer: nn.Module, states: Iterator[Tensor], call: Call) -> Iterator[Tensor]:
        """The layer's outputs for all windows."""
        handle = self.key.register_forward_pre_hook(self._add)
        try:
            for window, hidden in enumerate(states):
                yield run_layer(layer, hidden, call)
                require_finite(self.total, self.index, window)
        finally:
            handle.remove()

    def alone(self, layer: nn.Module, states: Iterator[Tensor], call: Call) -> None:
        """Run no more of the layer than the projection needs."""
        handle = self.key.register_forward_pre_hook(self._add)
        stop = self.key.register_forward_pre_hook(lambda *_: enough())
        try:
            for window, hidden in enumerate(states):
                until_enough(lambda hidden=hidden: run_layer(layer, hidden, call))  # type: ignore[misc]
                require_finite(self.total, self.index, window)
        finally:
            handle.remove()
            stop.remove()

    def _add(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.total = add_gram(self.total, args[0].flatten(0, -2))


def _assemble(skeleton: Skeleton, report: PaluReport, tokenizer: Any, work: Work) -> None:
    """Write everything but the weights into the new checkpoint."""
    if work.assembled:
        return
    folder, model = work.checkpoint, skeleton.model
    sizes = {path.name: names_in(path) for path in sorted(folder.glob("*.safetensors"))}
    index = {
        "metadata": {"total_size": sum(sum(names.values()) for names in sizes.values())},
        "weight_map": {name: file for file, names in sizes.items() for name in names},
    }
    described = Described(
        ranks=tuple(zip(report.plan.key_ranks, report.plan.value_ranks, strict=True)),
        forms=report.forms,
        layout=latent_layout(model, codes_of(report.config, report.plan)),
        report=report.to_dict(),
    )
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    name = causal_class(family_of(model).model_type).__name__
    write_metadata(folder, model.config, (name, str(skeleton.dtype).removeprefix("torch.")), described)
    folder.chmod(0o755)
    work.finish()


def _put(checkpoint: Path, target: Path) -> None:
    """Move the checkpoint to its place in one step."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.replace(target)
    except OSError as error:
        if isinstance(error, KvslimError):
            raise
        raise ConfigError(f"{target} cannot be made: {reason(error)}. The same command continues later.") from error
