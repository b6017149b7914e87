"""The training loop: AdamW on adapters, next-token loss. A step depends on seed, step and weights alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvslim.errors import NonFiniteError
from kvslim.recovering.rows import IGNORED, TrainingSet
from kvslim.recovering.state import TrainingState
from kvslim.recovery_config import RecoveryConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def steps_of(config: RecoveryConfig, sequences: int) -> int:
    """Optimizer steps in all."""
    return config.steps or config.epochs * math.ceil(sequences / config.batch_size)


def rate_at(step: int, total: int, config: RecoveryConfig) -> float:
    """The learning rate of a step, counted from 0: it rises linearly for the warmup, then follows the schedule."""
    warm = round(config.warmup * total)
    if step < warm:
        return config.learning_rate * (step + 1) / (warm + 1)
    share = (step - warm) / max(1, total - warm)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1.0}
    return config.learning_rate * left[config.schedule]


def batch_at(step: int, sequences: int, config: RecoveryConfig) -> list[int]:
    """The sequences of a step: every epoch goes through all of them, in an order of its own."""
    per_epoch = math.ceil(sequences / config.batch_size)
    epoch, index = divmod(step, per_epoch)
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(_mixed(config.seed, epoch, 0)))
    return order[index * config.batch_size : (index + 1) * config.batch_size].tolist()


def own_randomness(device: torch.device) -> AbstractContextManager[Any]:
    """A block that leaves the global random state as it was."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that dropout and the start of the adapters draw from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class Training:
    """The steps of one recovery.

    Args:
        model: with adapters; put into training mode.
        parameters: the adapters by name.
        data: what to train on.
        config: how.
        state: where to go on, ``None`` for the start.

    Attributes:
        losses: of the steps done.
        total: steps in all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parameters: dict[str, nn.Parameter],
        data: TrainingSet,
        config: RecoveryConfig,
        state: TrainingState | None,
    ) -> None:
        self.model, self.parameters, self.data, self.config = model, parameters, data, config
        self.total = steps_of(config, len(data.ids))
        self.losses = list(state.losses if state else ())
        self.optimizer = torch.optim.AdamW(
            parameters.values(), lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay
        )
        if state is not None:
            self._take(state.tensors)
        model.train()

    @staticmethod
    def shapes(parameters: dict[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a state."""
        return {
            name + suffix: tuple(parameter.shape)
            for name, parameter in parameters.items()
            for suffix in ("", *(f".{moment}" for moment in _MOMENTS))
        }

    def state(self) -> TrainingState:
        """Where the training stands. The tensors are the live ones: write them before the next step."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            tensors[name] = parameter.detach()
            tensors |= {f"{name}.{moment}": self.optimizer.state[parameter][moment] for moment in _MOMENTS}
        return TrainingState(tuple(self.losses), tensors)

    def _take(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(len(self.losses))),
                    **{m: tensors[f"{name}.{m}"].clone().to(parameter.device) for m in _MOMENTS},
                }

    def run(self, after_step: Callable[[int], None]) -> None:
        """Do the steps that are left, and call ``after_step`` with the number done after each.

        Raises:
            NonFiniteError: loss or gradient is NaN or Inf.
        """
        while (step := len(self.losses)) < self.total:
            self.losses.append(self._step(step))
            after_step(step + 1)

    def _step(self, step: int) -> float:
        chosen = batch_at(step, len(self.data.ids), self.config)
        seed_all(_mixed(self.config.seed, step, 1), self.model.device)
        with torch.enable_grad():
            loss = self._backward(chosen)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        if not math.isfinite(loss) or not math.isfinite(float(norm)):
            raise NonFiniteError(
                f"Loss {loss} and gradient norm {float(norm)} in step {step + 1} of the recovery. The model is as it "
                f"was. Lower the learning rate, or load the model in float32 or bfloat16 instead of float16."
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(step, self.total, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _backward(self, chosen: Sequence[int]) -> float:
        """Add up the gradients of the mean loss over all tokens of the batch, and return it."""
        size = self.config.micro_batch or len(chosen)
        parts = [self._padded(chosen[start : start + size]) for start in range(0, len(chosen), size)]
        count = sum(int((labels[:, 1:] != IGNORED).sum()) for _, labels in parts)
        total = 0.0
        for ids, labels in parts:
            # Padding is on the right, where a causal model does not see it from any real token: no mask is needed.
            logits = self.model(input_ids=ids.to(self.model.device), use_cache=False).logits[:, :-1]
            goal = labels[:, 1:].to(logits.device).flatten()
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), goal, ignore_index=IGNORED, reduction="sum"
            )
            loss = loss / count
            loss.backward()
            total += float(loss.detach())
        return total

    def _padded(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids and labels of some sequences, ``(sequences, longest)``."""
        ids, labels = ([part[index] for index in chosen] for part in (self.data.ids, self.data.labels))
        pad = nn.utils.rnn.pad_sequence
        return pad(ids, batch_first=True), pad(labels, batch_first=True, padding_value=IGNORED)


def _mixed(seed: int, number: int, purpose: int) -> int:
    """A seed of its own for each number and purpose: neighbours must not share a stream."""
    return (seed * 1_000_003 + number * 2 + purpose) * 0x9E3779B97F4A7C15 % (1 << 63)
