"""Where the query, key and value weights of an attention module are: three projections, or one fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvslim.attending.families import Family, attention_modules, family_of, kv_shape_of
from kvslim.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REFUSED_SETTINGS = {
    "add_cross_attention": "attends to an encoder",
    "reorder_and_upcast_attn": "upcasts inside its attention",
    "use_bidirectional_attention": "attends in both directions",
}
"""Settings of a configuration under which the attention is another one than its row describes."""


@dataclass(frozen=True)
class Part:
    """The query, key or value rows of a projection.

    Attributes:
        module: the linear layer (``nn.Linear``, or transformers' ``Conv1D``, which keeps the transposed weight).
        rows: which of its output features, in the order of heads: an int64 tensor on the CPU; ``None``: all of them.
    """

    module: nn.Module
    rows: Tensor | None

    @property
    def weight(self) -> Tensor:
        """``(in_features, out_features)``, detached: a view, or a copy where the rows lie apart."""
        return self.of(self.parameter.detach())

    @property
    def parameter(self) -> nn.Parameter:
        """The module's own weight, with the rows of all parts."""
        parameter: Any = self.module.weight
        return parameter  # type: ignore[no-any-return]

    @property
    def bias(self) -> Tensor | None:
        """``(out_features,)``, detached, or ``None``."""
        bias: Any = self.module.bias
        if bias is None:
            return None
        return bias.detach() if self.rows is None else bias.detach()[self.rows.to(bias.device)]  # type: ignore[no-any-return]

    def of(self, weight: Tensor) -> Tensor:
        """This part of a tensor shaped as the module's weight (a gradient): ``(in_features, out_features)``."""
        weight = weight if isinstance(self.module, Conv1D) else weight.T
        return weight if self.rows is None else weight[:, self.rows.to(weight.device)]

    def of_output(self, output: Tensor) -> Tensor:
        """This part of the module's output: ``(..., out_features)``."""
        return output if self.rows is None else output[..., self.rows.to(output.device)]


@dataclass(frozen=True)
class Projections:
    """The parts of one attention module, and its output projection."""

    query: Part
    key: Part
    value: Part
    output: nn.Module


def projections_of(model: PreTrainedModel) -> list[Projections]:
    """The projections of each decoder layer, in order.

    Raises:
        UnsupportedModelError: the family is unknown, the attention is not the one its row describes, or the
            projections are no plain linear layers with float weights of their own (already compressed, quantized,
            adapted or shared).
    """
    check_settings(model.config)
    found = [layer_projections(model, attention) for attention in attention_modules(model)]
    for layer, parts in enumerate(found):
        for module in (parts.query.module, parts.key.module, parts.value.module, parts.output):
            _check_plain(module, layer)
    owners = [id(part.parameter) for parts in found for part in (parts.key, parts.value)]
    fused = family_of(model).fused is not None
    if len(set(owners)) < (1 if fused else 2) * len(found):
        raise UnsupportedModelError(
            "Key or value projections share one weight between layers or with each other, so they cannot be factored "
            "apart. Untie them first (give each its own copy)."
        )
    return found


def layer_projections(model: PreTrainedModel, attention: nn.Module) -> Projections:
    """The projections of one attention module of ``model``, unchecked."""
    family = family_of(model)
    query, key, value, output = (getattr(attention, name, None) for name in _names(family))
    missing: Any = nn.Identity()
    rows = _fused_rows(model, family) if family.fused else (None, None, None)
    q, k, v = (Part(module or missing, which) for module, which in zip((query, key, value), rows, strict=True))
    return Projections(query=q, key=k, value=v, output=output or missing)


def check_settings(config: Any) -> None:
    """Refuse settings under which a known family attends in another way.

    Raises:
        UnsupportedModelError: such a setting is on; the message names it.
    """
    for name, what in _REFUSED_SETTINGS.items():
        if getattr(config, name, False):
            raise UnsupportedModelError(f"This model {what} ({name}=True in its configuration); Palu does not.")


def _names(family: Family) -> tuple[str, str, str, str]:
    return family.query, family.key, family.value, family.output


def _fused_rows(model: PreTrainedModel, family: Family) -> tuple[Tensor, Tensor, Tensor]:
    """Which output features of a fused projection are queries, keys and values."""
    shape = kv_shape_of(model)
    heads, kv_heads, width = int(model.config.num_attention_heads), shape.kv_heads, shape.head_dim
    if family.fused == "heads":  # such families have as many KV heads as heads
        rows = torch.arange(3 * heads * width).view(heads, 3, width)
        return rows[:, 0].flatten(), rows[:, 1].flatten(), rows[:, 2].flatten()
    query, key, value = torch.arange((heads + 2 * kv_heads) * width).split(
        [heads * width, kv_heads * width, kv_heads * width]
    )
    return query, key, value


def _check_plain(module: nn.Module, layer: int) -> None:
    if isinstance(module, nn.Identity):
        raise UnsupportedModelError(
            f"Layer {layer} has not the projections of its family. The model is compressed already, or its projections "
            f"were fused; load the original model."
        )
    weight: Any = getattr(module, "weight", None)
    plain = type(module) in (nn.Linear, Conv1D) and weight.is_floating_point() and weight.element_size() >= 2
    if not plain or weight.is_meta:
        raise UnsupportedModelError(
            f"The projections of layer {layer} are {type(module).__name__} with weights of type "
            f"{getattr(weight, 'dtype', None)}, not plain linear layers in memory with float weights. Load the model "
            f"without quantization (dequantize it) and merge adapters first."
        )
