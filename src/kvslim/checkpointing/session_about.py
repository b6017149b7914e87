"""What a session says about itself in JSON: every field typed and ranged before it is used."""

from __future__ import annotations

import dataclasses
import re
import struct
from dataclasses import dataclass
from typing import Any, Literal, Self

from kvslim.checkpointing.fingerprint import ModelIdentity
from kvslim.checkpointing.session_file import SessionFile
from kvslim.checkpointing.session_graded import GradedRecords
from kvslim.checkpointing.session_plan import CELL_RECORDS, PrefixPlan, RecordKind
from kvslim.config import is_count, is_flag
from kvslim.errors import CheckpointError, ConfigError
from kvslim.quantizing.codebook import LEVEL_KINDS
from kvslim.version import __version__

Method = Literal["jolt", "graded"]
_DTYPES = ("float32", "bfloat16", "float16")
_SINCE_2 = {"method", "stats"}
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class About:
    """The description of a session.

    Attributes:
        model: the model that filled the cache.
        config: settings of the method, without its weights, which are in the plan.
        dtype: of keys and values.
        weights, price: how many numbers of each follow the plan.
        compressed: there is a compressed prefix.
        decoding, rolled_back, note: as in :class:`~kvslim.caching.snapshot.Snapshot`.
        tokenizer: hash of its vocabulary, or None.
        kvslim: version that wrote the session.
        method: whose cache it is.
        stats: digest of the calibration statistics of a graded cache, else None.
    """

    model: ModelIdentity
    config: dict[str, Any]
    dtype: str
    weights: int
    price: int
    compressed: bool
    decoding: bool
    rolled_back: bool
    note: str
    tokenizer: str | None
    kvslim: str = __version__
    method: Method = "jolt"
    stats: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields; those that format 1 has not are left out where they say nothing."""
        fields = dataclasses.asdict(self)
        return {n: v for n, v in fields.items() if n not in _SINCE_2} if self.method == "jolt" else fields

    @classmethod
    def of_file(cls, file: SessionFile) -> Self:
        """Read and check the description of an opened session.

        Raises:
            CheckpointError: a field is missing, unknown, or of a kind or range that no writer makes.
        """
        fields = file.about
        names = {field.name for field in dataclasses.fields(cls)} - (_SINCE_2 if file.format_version < 2 else set())
        if set(fields) != names:
            raise file.damaged(f"its description lacks or adds {', '.join(sorted(names ^ set(fields)))}")
        texts = (fields["note"], fields["kvslim"], fields["tokenizer"] or "")
        flags = (fields["compressed"], fields["decoding"], fields["rolled_back"])
        counts = (fields["weights"], fields["price"])
        config, model = fields["config"], fields["model"]
        if not all(isinstance(text, str) for text in texts) or not all(map(is_flag, flags)):
            raise file.damaged("its description has a field of the wrong kind")
        if not all(is_count(count, least=0) and count <= file.size for count in counts):
            raise file.damaged("its description has a count out of range")
        if fields["dtype"] not in _DTYPES or not isinstance(config, dict) or not isinstance(model, dict):
            raise file.damaged("its description names no dtype, settings or model")
        if file.format_version < 2:
            _check_jolt(file, config)
        else:
            _check_graded(file, fields)
        try:
            identity = ModelIdentity.from_dict(model)
        except (ConfigError, TypeError) as error:
            raise file.damaged(f"it names no model ({error})") from error
        if identity.sliding == identity.layers:
            raise file.damaged("its model has no layers to compress")
        return cls(**{**fields, "model": identity})

    @property
    def cells(self) -> int:
        """Cells of each compressed stretch: layer groups times two."""
        layers = self.model.layers - self.model.sliding
        return int(2 * -(-layers // (self.config["layer_group"] if self.method == "jolt" else 1)))

    @property
    def records(self) -> RecordKind:
        """How the cells are described."""
        if self.method == "jolt":
            return CELL_RECORDS
        return GradedRecords(self.model.kv_heads * self.model.head_dim, self.config["run"])

    def plan_of(self, file: SessionFile) -> PrefixPlan:
        """The plan of the prefix, checked.

        Raises:
            CheckpointError: it is damaged.
        """
        plan, numbers = PrefixPlan.from_bytes(file.small("plan"), self.cells, self.records)
        list(plan.owners())
        if len(numbers) - 8 * (self.weights + self.price) not in range(8):
            raise file.damaged("its plan is longer than what it describes")
        return plan

    def config_of(self, file: SessionFile) -> dict[str, Any]:
        """The settings, complete."""
        if self.method != "jolt":
            return self.config
        return {**self.config, "weights": self._numbers(file)[: self.weights] or None}

    def price_of(self, file: SessionFile) -> tuple[float, ...]:
        return self._numbers(file)[self.weights :]

    def _numbers(self, file: SessionFile) -> tuple[float, ...]:
        rest = file.small("plan")
        if self.compressed:
            _, rest = PrefixPlan.from_bytes(rest, self.cells, self.records)
        count = self.weights + self.price
        if len(rest) < 8 * count:
            raise CheckpointError(f"The session {file.path} is damaged: it lacks numbers that it announces.")
        return struct.unpack(f"<{count}d", rest[: 8 * count])


def _check_jolt(file: SessionFile, config: dict[str, Any]) -> None:
    """The settings of JoltCache that reading the plan needs; the others are checked when the cache is made."""
    if config.get("levels") not in LEVEL_KINDS or not is_count(config.get("seed"), least=0):
        raise file.damaged("its settings name no codebook and seed")
    if not is_count(config.get("layer_group")):
        raise file.damaged("its settings name no layer group")


def _check_graded(file: SessionFile, fields: dict[str, Any]) -> None:
    """The same for GradedCache, and what only its sessions have."""
    if fields["method"] != "graded":
        raise file.damaged(f"its method is {fields['method']!r:.40}, which none of its format is")
    if not isinstance(fields["stats"], str) or not _DIGEST.fullmatch(fields["stats"]):
        raise file.damaged("it does not name its calibration statistics")
    if fields["weights"] or fields["price"]:
        raise file.damaged("it has weights or a price, and its method has none")
    if not is_count(fields["config"].get("run")):
        raise file.damaged("its settings name no run of channels")
