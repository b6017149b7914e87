"""A model without its weights, and the parts of it that are in memory for a while."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvslim.attending.families import base_model_of, decoder_layers, family_of, rotary_of
from kvslim.attending.projections import check_settings
from kvslim.errors import ModelSourceError, NonFiniteError, UnsupportedModelError
from kvslim.model_types import COMPRESSED
from kvslim.streaming.tensors import SourceWeights, Stored

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a decoder layer, the hidden states left out."""


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration of an uncompressed model of a supported family; no code from beside it is run.

    Raises:
        ModelSourceError: there is no model.
        UnsupportedModelError: it is of no supported family, compressed already or quantized.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelSourceError(f"{folder} is no model directory: config.json is missing there.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = content.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelSourceError(f"{path} is damaged: {error}. Copy the model again.") from error
    if str(kind).startswith(COMPRESSED):
        raise UnsupportedModelError(f"{folder} is compressed already. Give the original model.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModelError(
            f"transformers cannot read {path} without code from its repository, which kvslim never runs: "
            f"{str(error).splitlines()[0]}"
        ) from error
    family_of(config)
    check_settings(config)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(f"{folder} is quantized. Give the model before quantization.")
    return config


@dataclass(frozen=True)
class Skeleton:
    """A model whose parameters are on the meta device, and where their values are stored.

    Attributes:
        model: its buffers, such as rotary frequencies, are real.
        stored: the tensors by the model's names, tied ones under the first.
        layers: the names of the decoder layers, in order.
        dtype: of the model.
        device: where parts of it run.
    """

    model: PreTrainedModel
    stored: dict[str, Stored]
    layers: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, weights: SourceWeights, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Skeleton:
        """The skeleton of the model with this configuration and these weights.

        Raises:
            ModelSourceError: the stored tensors are missing or of other shapes.
            UnsupportedModelError: the architecture has no causal language model, or is not built as its family's row
                says, or its frequencies change with the sequence length.
        """
        model, folder = _on_meta(config, dtype), weights.folder
        if (folder / "generation_config.json").is_file():
            try:
                model.generation_config = GenerationConfig.from_pretrained(folder)
            except (OSError, ValueError, TypeError) as error:
                raise ModelSourceError(f"{folder}/generation_config.json is damaged: {error} Copy it again.") from error
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        rotary_of(model, all_layers=True)
        names = {id(module): name for name, module in model.named_modules()}
        layers = tuple(names[id(layer)] for layer in decoder_layers(model))
        return cls(model, _locate(model, weights), layers, dtype, device)

    def layer(self, index: int) -> nn.Module:
        """A copy of one decoder layer with its weights.

        Raises:
            NonFiniteError: they hold NaN or Inf.
            ModelSourceError: they cannot be read.
        """
        layer = copy.deepcopy(decoder_layers(self.model)[index])
        prefix = self.layers[index] + "."
        values = {name.removeprefix(prefix): self._read(name) for name in self.stored if name.startswith(prefix)}
        layer.load_state_dict(values, assign=True)
        return layer.requires_grad_(False).eval()

    def outside(self) -> dict[str, Stored]:
        """The tensors that belong to no decoder layer."""
        prefixes = tuple(name + "." for name in self.layers)
        return {name: stored for name, stored in self.stored.items() if not name.startswith(prefixes)}

    def front(self, windows: Tensor) -> Front:
        """What runs before the layers, with the embeddings of the tokens in ``windows`` alone."""
        base = copy.deepcopy(base_model_of(self.model))
        embedding: Any = base.get_input_embeddings()  # type: ignore[operator]
        prefix = _base_prefix(self.model)
        used = windows.unique()
        for name, stored in self.outside().items():
            owner, _, leaf = name.removeprefix(prefix).rpartition(".")
            if not name.startswith(prefix):
                continue
            module = base.get_submodule(owner)
            value = stored.rows(used, self.dtype) if module is embedding else self._read(name).cpu()
            target = module._buffers if leaf in module._buffers else module._parameters
            target[leaf] = nn.Parameter(value.to(self.device), requires_grad=False)
        embedding.padding_idx = None  # it need not be among the tokens, and says nothing without gradients
        return Front(base.eval(), family_of(self.model).layers, torch.searchsorted(used, windows), self.device)

    def _read(self, name: str) -> Tensor:
        value = self.stored[name].read(self.dtype)
        if not torch.isfinite(value).all():
            raise NonFiniteError(f"{name} in {self.stored[name].path} holds NaN or Inf. Copy the model again.")
        return value.to(self.device)


class _EnoughError(Exception):
    """Ends a forward pass whose rest is not needed."""


class Front:
    """The base model without its decoder layers: it makes their inputs.

    Args:
        base: the base model; its layers are on the meta device.
        layers: the path of their list.
        windows: ``(windows, length)`` rows of its embedding.
        device: where it runs.
    """

    def __init__(self, base: nn.Module, layers: str, windows: Tensor, device: torch.device) -> None:
        self._base, self._windows, self._device = base, windows, device
        self._layers: Any = attrgetter(layers)(base)

    def hidden(self) -> Iterator[Tensor]:
        """The input of the first layer for each window, ``(1, length, hidden)``."""
        kept: list[Tensor] = []

        def keep(hidden: Tensor, _: Call) -> Any:
            kept.append(hidden)
            raise _EnoughError

        self._layers[0] = _Stand(self._layers[0], keep)
        for window in self._windows:
            until_enough(lambda window=window: self._run(window))  # type: ignore[misc]
            yield kept.pop()

    def calls(self, first: nn.Module) -> list[Call]:
        """What each layer is called with, the same for all windows: they are of one length and without padding.

        Args:
            first: the first layer, with its weights. What it puts out tells what the model expects of a layer.
        """
        found: list[Call] = []
        wrap: list[Callable[[Tensor], Any]] = []

        def run(hidden: Tensor, call: Call) -> Any:
            found.append(call)
            output: Any = first(hidden, *call[0], **call[1])
            more = (None,) * (len(output) - 1) if isinstance(output, tuple) else None
            wrap.append(lambda passed: passed if more is None else (passed, *more))
            return output

        def record(hidden: Tensor, call: Call) -> Any:
            found.append(call)
            return wrap[0](hidden)

        for index, layer in enumerate(self._layers):
            self._layers[index] = _Stand(layer, record if index else run)
        self._run(self._windows[0])
        return found

    def _run(self, window: Tensor) -> None:
        self._base(input_ids=window[None].to(self._device), use_cache=False)


class _Stand(nn.Module):
    """Stands where a decoder layer was and hands on what it is called with."""

    def __init__(self, layer: nn.Module, act: Callable[[Tensor, Call], Any]) -> None:
        super().__init__()
        self.__dict__["_stands_for"], self._act = layer, act

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads from its layers, such as the type of their attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            return self._act(args[0], (args[1:], kwargs))
        rest = dict(kwargs)
        return self._act(rest.pop("hidden_states"), ((), rest))


def run_layer(layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """What a decoder layer makes of hidden states ``(1, length, hidden)``."""
    output: Any = layer(hidden, *call[0], **call[1])
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def until_enough(run: Callable[[], Any]) -> None:
    """Run until the end, or until somebody calls :func:`enough`."""
    try:
        run()
    except _EnoughError:
        return


def enough() -> None:
    """End the run of :func:`until_enough`."""
    raise _EnoughError


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model with real buffers: parameters are sent to the meta device as soon as a module takes them."""
    here = get_ident()

    def to_meta(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or get_ident() != here:  # other threads may be making other models
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # torch's annotation is wrong: what it returns takes the parameter's place
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UnsupportedModelError(f"config.json does not describe a causal language model: {error}") from error
    finally:
        handle.remove()
    return model.eval()


def _base_prefix(model: PreTrainedModel) -> str:
    base = base_model_of(model)
    name: str = next(name for name, module in model.named_modules() if module is base)
    return name + "."


def _locate(model: PreTrainedModel, weights: SourceWeights) -> dict[str, Stored]:
    """Where each parameter and persistent buffer is stored."""
    prefix = _base_prefix(model)
    names: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    located = {}
    for first, *others in names.values():
        found = [stored for name in (first, *others) if (stored := weights.find(name, prefix)) is not None]
        if not found:
            raise ModelSourceError(f"The weights in {weights.folder} lack {first}. Copy the model again.")
        if found[0].shape != tuple(state[first].shape):
            raise ModelSourceError(
                f"config.json and the weights in {weights.folder} do not fit: {first} is {found[0].shape}, not "
                f"{tuple(state[first].shape)}."
            )
        if any(not _equal(found[0], other) for other in found[1:]):
            raise UnsupportedModelError(
                f"config.json says that {first} and {', '.join(others)} are one tensor, but they are stored with other "
                f"values. Set tie_word_embeddings to false there."
            )
        located[first] = found[0]
    return located


def _equal(one: Stored, other: Stored) -> bool:
    if one == other:
        return True
    same = one.shape == other.shape and one.kind == other.kind
    return same and all(map(torch.equal, one.blocks(torch.float32), other.blocks(torch.float32)))
