"""How to train adapters after a compression, and what was trained: settings and result of :mod:`kvslim.recovery`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvslim.config import JsonConfig, is_count, is_flag, is_list, is_number
from kvslim.errors import ConfigError

TARGETS = ("latents", "attention", "mlp")
TEMPLATES = ("alpaca", "chat")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class RecoveryConfig(JsonConfig):
    """How to train. Rank, alpha, learning rate and schedule are those of Palu, Appendix F.

    Attributes:
        rank: r', inner size of each adapter.
        alpha: the adapters' output is scaled by ``alpha / rank``.
        learning_rate: of AdamW, at its highest.
        epochs: passes over the data, unless ``steps`` is given.
        steps: optimizer steps; the data is gone through as often as that needs.
        batch_size: sequences per optimizer step.
        micro_batch: sequences in memory at once, ``None`` for the whole batch; only memory depends on it.
        max_length: tokens of the longest sequence.
        pack: join the rows, in an order drawn by the seed, and cut them into sequences of ``max_length``; otherwise
            each row is a sequence of its own, cut off at ``max_length``.
        template: how an instruction row becomes text: ``alpaca``, or ``chat`` for the tokenizer's own template.
        responses_only: learn to predict the responses, not the instructions.
        prepend_bos: start every row with the beginning-of-text token.
        warmup: share of the steps in which the learning rate rises.
        schedule: how it falls afterwards: ``cosine`` or ``linear`` to zero, or ``constant``.
        weight_decay: of AdamW, on the adapters.
        dropout: on the adapters' input.
        max_grad_norm: gradients of all adapters together are scaled down to this norm.
        targets: what gets adapters: ``latents``, the projections to key and value latents (Eq. 9); ``attention``, the
            other projections of the attention; ``mlp``, all other linear layers of the decoder layers.
        seed: of the adapters' start, the order of the data and dropout.
    """

    rank: int = 32
    alpha: float = 32.0
    learning_rate: float = 2e-4
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 4
    micro_batch: int | None = None
    max_length: int = 1024
    pack: bool = True
    template: str = "alpaca"
    responses_only: bool = False
    prepend_bos: bool = False
    warmup: float = 0.03
    schedule: str = "cosine"
    weight_decay: float = 0.01
    dropout: float = 0.05
    max_grad_norm: float = 1.0
    targets: tuple[str, ...] = ("latents",)
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("pack", "responses_only", "prepend_bos"):
            if not is_flag(getattr(self, name)):
                raise ConfigError(f"{name} is true or false, not {getattr(self, name)!r}.")
        for name, known in (("template", TEMPLATES), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}.")
        if not is_list(self.targets) or not self.targets or not all(name in TARGETS for name in self.targets):
            raise ConfigError(f"targets are one or more of {', '.join(TARGETS)}, not {self.targets!r}.")
        # In one order, so that equal settings are equal; JSON gives a list.
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in self.targets))

    def _check_numbers(self) -> None:
        for name, least in (("rank", 1), ("epochs", 1), ("batch_size", 1), ("max_length", 2), ("seed", 0)):
            _check_count(name, getattr(self, name), least)
        for name in ("steps", "micro_batch"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        for name in ("alpha", "learning_rate", "max_grad_norm"):
            if not is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ConfigError(f"{name} is a number above 0, not {getattr(self, name)!r}.")
        for name in ("warmup", "dropout"):
            if not is_number(getattr(self, name)) or not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is at least 0 and below 1, not {getattr(self, name)!r}.")
        if not is_number(self.weight_decay) or self.weight_decay < 0:
            raise ConfigError(f"weight_decay is a number of at least 0, not {self.weight_decay!r}.")


def _check_count(name: str, value: object, least: int = 1) -> None:
    if not is_count(value, least):
        raise ConfigError(f"{name} is a whole number of at least {least}, not {value!r}.")


@dataclass(frozen=True)
class RecoveryReport:
    """What a recovery did, as one entry of ``model.palu.recoveries``.

    Attributes:
        config: the request.
        sequences: token sequences trained on.
        tokens: tokens predicted in one pass over them.
        truncated: rows cut off at ``max_length``; 0 if packed.
        skipped: instruction rows left out because their output is empty.
        parameters: trained numbers, before they were merged.
        losses: mean next-token loss of each step's batch in nats, before the step.
        data_sha256: of the rows' token ids, in the order given.
    """

    config: RecoveryConfig
    sequences: int
    tokens: int
    truncated: int
    skipped: int
    parameters: int
    losses: tuple[float, ...]
    data_sha256: str

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def first_loss(self) -> float:
        """Mean over the first tenth of the steps."""
        return _mean(self.losses[: max(1, self.steps // 10)])

    @property
    def last_loss(self) -> float:
        """Mean over the last tenth of the steps."""
        return _mean(self.losses[-max(1, self.steps // 10) :])

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RecoveryReport:
        """Undo :meth:`to_dict`.

        Raises:
            ConfigError: a setting is unknown or out of range.
        """
        return cls(
            **{**data, "config": RecoveryConfig.from_dict(data["config"]), "losses": tuple(map(float, data["losses"]))}
        )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)
