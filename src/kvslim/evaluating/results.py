"""What an evaluation found, with everything needed to judge and repeat it: as JSON and as a table."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvslim.errors import ConfigError
from kvslim.evaluating.compare import MethodResult
from kvslim.files import write_atomically

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

SCHEMA = 1
"""Version of the JSON layout; a reader refuses another one."""


@dataclass(frozen=True)
class Environment:
    """Where and how a result was made.

    Attributes:
        date: UTC, ISO 8601.
        command: the command line.
        versions: of python, torch, transformers and kvslim.
        cpu: model name.
        cores: logical cores that the process may use.
        gpu: name of the first GPU, or ``None``.
        commit: of the git checkout that kvslim was imported from, ``-dirty`` if files differ; ``None`` otherwise.
    """

    date: str
    command: str
    versions: dict[str, str]
    cpu: str
    cores: int
    gpu: str | None
    commit: str | None

    @classmethod
    def now(cls) -> Self:
        """The environment of this process."""
        import torch

        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            versions={"python": platform.python_version(), **{p: _version(p) for p in _PACKAGES}},
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
            commit=_commit(),
        )


@dataclass(frozen=True)
class ModelFingerprint:
    """Which model it was.

    Attributes:
        name: as the user gave it.
        model_type: of its configuration.
        parameters: their number.
        dtype: of its weights in memory.
        config_sha256: of its configuration as sorted JSON, without the path and the transformers version.
    """

    name: str
    model_type: str
    parameters: int
    dtype: str
    config_sha256: str

    @classmethod
    def of(cls, name: str, model: PreTrainedModel) -> Self:
        """Fingerprint ``model``, which the user called ``name``."""
        config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
        return cls(name, str(model.config.model_type), model.num_parameters(), str(model.dtype), digest)


def parse_results(text: str) -> dict[str, Any]:
    """The JSON object of a results file, checked to be of the schema that this version reads.

    Raises:
        ConfigError: it is of another schema version.
        ValueError, KeyError, TypeError: it is no such JSON.
    """
    data: dict[str, Any] = json.loads(text)
    if data["schema"] != SCHEMA:
        raise ConfigError(f"These results have schema {data['schema']}; this kvslim reads {SCHEMA}.")
    return data


@dataclass(frozen=True)
class EvalResults:
    """One evaluation of several methods on one model and text.

    Attributes:
        model: which.
        text: origin of the test text.
        calibration: origin and amount of the calibration text, in words; ``None`` without.
        settings: the protocol's.
        methods: one entry per method, in the order asked.
        environment: where and how.
        schema: version of the layout.
    """

    model: ModelFingerprint
    text: str
    calibration: str | None
    settings: dict[str, Any]
    methods: tuple[MethodResult, ...]
    environment: Environment = field(default_factory=Environment.now)
    schema: int = SCHEMA

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: it is no such JSON, or of another schema version.
        """
        try:
            data = parse_results(text)
            methods = [
                MethodResult(**{**entry, "kl_per_window": tuple(entry["kl_per_window"])}) for entry in data["methods"]
            ]
            parts = {"model": ModelFingerprint(**data["model"]), "environment": Environment(**data["environment"])}
            return cls(**{**data, **parts, "methods": tuple(methods)})
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"These are no results of kvslim: {error}") from error

    def save(self, path: Path) -> None:
        """Write the JSON to ``path``, atomically. Errors as :func:`write_atomically`."""
        write_atomically(path, self.to_json().encode())

    def table(self) -> Table:
        """A rich table, one row per method."""
        return methods_table(self.methods)


def methods_table(methods: Sequence[MethodResult]) -> Table:
    """The figures of several methods as a rich table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("method", no_wrap=True)
    for name in ("ratio", "KB/token", "PPL", "KL", "agree", "err K", "err V", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    one_pass = any(one.one_pass_perplexity is not None for one in methods)
    if one_pass:
        table.add_column("one-pass PPL", justify="right", no_wrap=True)
    for one in methods:
        table.add_row(
            one.method,
            f"{one.ratio:.2f}x",
            f"{one.bytes_per_token / 1000:.2f}",
            f"{one.perplexity:.2f}",
            f"{one.kl:.5f}",
            f"{one.agreement:.1%}",
            f"{one.key_error:.4f}",
            f"{one.value_error:.4f}",
            f"{one.seconds:.1f}" if one.seconds < 10 else f"{one.seconds:.0f}",
            *([_one_pass(one)] if one_pass else []),
        )
    return table


def _one_pass(one: MethodResult) -> str:
    return "-" if one.one_pass_perplexity is None else f"{one.one_pass_perplexity:.2f}"


_PACKAGES = ("torch", "transformers", "kvslim")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this file lies in, or ``KVSLIM_COMMIT`` where the history is not at hand."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return os.environ.get("KVSLIM_COMMIT")

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
