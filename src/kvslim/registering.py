"""Compressed models become known to transformers when kvslim is imported, whichever of the two is imported first.

``AutoConfig`` needs a class per compressed family. Making it loads transformers, which takes seconds, and
``import kvslim`` is to be quick. So if ``AutoConfig`` is not there yet, a finder waits for its module to be imported,
lets the usual machinery load it, registers, and is gone. Nothing of transformers is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from kvslim.model_types import COMPRESSED, ORIGINALS

_AWAITED = "transformers.models.auto.configuration_auto"


def register_models() -> None:
    """Make ``AutoConfig`` and ``AutoModelForCausalLM`` know compressed models: now, or once they are imported."""
    if _AWAITED in sys.modules and hasattr(sys.modules[_AWAITED], "AutoConfig"):
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def model_classes(model_type: str) -> tuple[type, type]:
    """The configuration and model class of a compressed family, for the file ``kvslim_palu.py`` in a checkpoint.

    Args:
        model_type: such as ``kvslim_palu_llama``.

    Raises:
        UnsupportedModelError: this kvslim does not know the family.
    """
    from kvslim.attending.latent_config import latent_config_class
    from kvslim.attending.latent_model import causal_class
    from kvslim.errors import UnsupportedModelError

    family = model_type.removeprefix(COMPRESSED)
    if family not in ORIGINALS:
        raise UnsupportedModelError(f"This kvslim does not know the model type {model_type!r}. Update kvslim.")
    return latent_config_class(family), causal_class(family)


def _register() -> None:
    """Register, for each family, a door to its configuration class.

    The classes themselves derive from modules of transformers that cannot be imported while ``AutoConfig`` is.
    """
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.models.auto.configuration_auto import AutoConfig

    for family in ORIGINALS:
        body = {"__module__": __name__, "model_type": COMPRESSED + family, **_door_methods(COMPRESSED + family)}
        AutoConfig.register(COMPRESSED + family, type("PaluConfigDoor", (PreTrainedConfig,), body), exist_ok=True)


def _door_methods(model_type: str) -> dict[str, Any]:
    def new(_: type, /, *args: Any, **kwargs: Any) -> Any:
        return model_classes(model_type)[0](*args, **kwargs)

    def from_dict(_: type, /, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        config_class: Any = model_classes(model_type)[0]
        return config_class.from_dict(config_dict, **kwargs)

    return {"__new__": new, "from_dict": classmethod(from_dict)}


class _Finder(MetaPathFinder):
    """Finds one module as everybody would, once, and has its loader register afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module under its own loader, as if nobody had waited for it, then register."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register()
