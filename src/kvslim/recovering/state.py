"""The state of an unfinished recovery as one safetensors file: adapters, the moments of AdamW, and what they are for.

The file is replaced as a whole, so a process that is killed leaves the last state or the one before. There is no random
state in it: order and dropout of each step follow from seed and step alone.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvslim.config import is_count, is_list, is_number
from kvslim.errors import CheckpointError
from kvslim.files import reason, replacing

FORMAT_VERSION = 1
_KEY = "kvslim_recovery"
_WORDS = {"config": "settings", "data_sha256": "data", "model": "model"}


@dataclass(frozen=True)
class TrainingState:
    """Where a training stands.

    Attributes:
        losses: of the steps done.
        tensors: float32 on the CPU: each adapter, and as ``NAME.exp_avg`` and ``NAME.exp_avg_sq`` its moments.
    """

    losses: tuple[float, ...]
    tensors: dict[str, Tensor]


def write_state(path: Path, purpose: dict[str, Any], state: TrainingState) -> None:
    """Write the state, atomically and durably.

    Args:
        path: the file.
        purpose: ``config``, ``data_sha256`` and ``model``, JSON values that must agree to go on from it.
        state: where the training stands.

    Raises:
        ConfigError: it cannot be written; what was at ``path`` is still there.
    """
    about = json.dumps({"purpose": purpose, "losses": state.losses})
    tensors = {name: value.detach().to("cpu").contiguous() for name, value in state.tensors.items()}
    metadata = {_KEY: str(FORMAT_VERSION), "about": about, "sha256": _digest(about, tensors)}
    with replacing(path, durable=True) as file:
        file.write(save(tensors, metadata))


def read_state(path: Path, purpose: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> TrainingState | None:
    """The state at ``path`` if there is one.

    Args:
        path: the file.
        purpose: as it was given to :func:`write_state`.
        shapes: of the tensors that it must have.

    Raises:
        CheckpointError: it is damaged, of a newer format, or of other settings, data or another model.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"The recovery state {path} cannot be read: {reason(error)}.") from error
    try:
        tensors, metadata = load(data), json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        version, about, digest = int(metadata[_KEY]), metadata["about"], metadata["sha256"]
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, f"it is no such file ({error})") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}; this kvslim reads up to {FORMAT_VERSION}.")
    if _digest(about, tensors) != digest:
        raise _damaged(path, "it was edited or truncated")
    stored = json.loads(about)
    for name, words in _WORDS.items():
        theirs, ours = stored["purpose"].get(name), purpose[name]
        if theirs != ours:
            raise CheckpointError(
                f"{path} is the state of a recovery with {_difference(words, theirs, ours)}. Give the same as then to "
                f"go on, or another place for the state."
            )
    losses = stored["losses"]
    if not is_list(losses) or not all(map(is_number, losses)) or not is_count(len(losses)):
        raise _damaged(path, "its losses are no numbers")
    if {name: tuple(value.shape) for name, value in tensors.items()} != shapes:
        raise _damaged(path, "its tensors are not those of the adapters")
    return TrainingState(tuple(losses), tensors)


def _difference(words: str, theirs: Any, ours: Any) -> str:
    """What is another, by name where there are names."""
    if not isinstance(theirs, dict) or not isinstance(ours, dict):
        return f"other {words}"
    names = [name for name in ours if theirs.get(name) != ours[name]]
    return f"another {words}" if words == "model" else f"other {words} ({', '.join(names)})"


def _digest(about: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode() + value.numpy().tobytes())
    return digest.hexdigest()


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"The recovery state {path} is damaged: {what}. Remove it to start again.")
