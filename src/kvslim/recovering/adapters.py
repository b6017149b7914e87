"""LoRA adapters on a compressed model (Palu, Eq. 9), put in by peft, and either merged or taken out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvslim.attending.families import attention_modules, decoder_layers
from kvslim.attending.low_rank import LowRankProjection
from kvslim.errors import MissingDependencyError, NonFiniteError, UnsupportedModelError
from kvslim.recovery_config import RecoveryConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "recovery"


def require_peft() -> Any:
    """The module ``peft``.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            f"LoRA recovery trains with peft, which cannot be imported ({error}): pip install 'kvslim[recovery]'"
        ) from error
    return peft


def target_layers(model: PreTrainedModel, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers that get adapters, by their names in the model.

    Raises:
        UnsupportedModelError: there are none, or their weights are quantized or on several devices.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Linear] = {}
    for layer, attention in zip(decoder_layers(model), attention_modules(model), strict=True):
        projections = [part for part in attention.modules() if isinstance(part, LowRankProjection)]
        kinds = {id(part): "mlp" for part in layer.modules()}
        kinds |= {id(part): "attention" for part in attention.modules()}
        # Of a factored projection only ``down`` is adapted: what it puts out is the latent of Eq. 9.
        kinds |= {id(part): "" for projection in projections for part in projection.modules()}
        kinds |= {id(projection.down): "latents" for projection in projections}
        found |= {
            names[id(part)]: part
            for part in layer.modules()
            if isinstance(part, nn.Linear) and kinds[id(part)] in targets
        }
    if not found:
        raise UnsupportedModelError(f"The model has no linear layers for {', '.join(targets)}.")
    for name, part in found.items():
        if type(part) is not nn.Linear or not part.weight.is_floating_point() or part.weight.is_meta:
            raise UnsupportedModelError(
                f"{name} is a {type(part).__name__} with weights of type {part.weight.dtype} on "
                f"{part.weight.device}, not a plain linear layer in memory. Load the model without quantization."
            )
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise UnsupportedModelError("The model is spread over several devices. Move it to one with model.to().")
    return found


@contextmanager
def adapted(model: PreTrainedModel, config: RecoveryConfig) -> Iterator[dict[str, nn.Parameter]]:
    """Give ``model`` adapters for the length of the block; nothing else takes gradients meanwhile.

    If the block ends well the adapters are merged: ``W += alpha / rank · B' A'``. If it fails, or is interrupted, every
    weight is what it was. Either way the modules are the model's own again.

    Yields:
        The adapters in float32, ``LAYER.lora_A`` of shape ``(rank, in)`` and ``LAYER.lora_B`` of ``(out, rank)``.

    Raises:
        MissingDependencyError, UnsupportedModelError: see :func:`require_peft` and :func:`target_layers`.
        NonFiniteError: a merged weight is NaN or Inf.
    """
    peft, layers = require_peft(), target_layers(model, config.targets)
    required = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    training = [(module, module.training) for module in model.modules()]
    originals = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=list(layers), bias="none"
    )
    try:
        tuner = peft.LoraModel(model, settings, _ADAPTER)
        yield _parameters(model, layers)
        try:
            tuner.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise NonFiniteError(f"The trained adapters do not fit into the weights: {error}") from error
    except BaseException:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.weight.data.copy_(originals[name])
        raise
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        vars(model).pop("peft_config", None)
        for parameter, flag in required:
            parameter.requires_grad_(flag)
        for module, flag in training:
            module.training = flag


def _parameters(model: PreTrainedModel, layers: dict[str, nn.Linear]) -> dict[str, nn.Parameter]:
    """The adapters by name, made float32: steps of the optimizer are too small for 16 bits."""
    found: dict[str, nn.Parameter] = {}
    for name in layers:
        wrapper: Any = model.get_submodule(name)
        for part in ("lora_A", "lora_B"):
            found[f"{name}.{part}"] = getattr(wrapper, part)[_ADAPTER].float().weight
    others = {id(parameter) for parameter in found.values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in others)
    return found
