"""kvslim: the KV cache of large language models several times smaller, with the loss measured and shown.

The two methods read top to bottom in :mod:`kvslim.palu` (offline, by the weights) and :mod:`kvslim.jolt` (at run time,
on the filled cache). Names are loaded on first use, so that ``import kvslim`` itself is quick.

``import kvslim`` makes compressed checkpoints known to transformers, so that ``AutoModelForCausalLM.from_pretrained``
loads them.

``register()`` makes the attention implementation ``kvslim`` known to transformers. Loading a run-time cache, such as
``kvslim.JoltCache``, does so too; call it yourself if the implementation is set before that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvslim.errors import KvslimError
from kvslim.registering import register_models
from kvslim.version import __version__

if TYPE_CHECKING:
    from kvslim.attending.handle_attention import register
    from kvslim.caching.latent import LatentCache
    from kvslim.graded import GradedCache, GradedCalibration, GradedConfig, GradedStats, calibrate
    from kvslim.jolt import JoltCache, JoltConfig
    from kvslim.palu import PaluConfig, compress
    from kvslim.recovery import recover
    from kvslim.recovery_config import RecoveryConfig
    from kvslim.registering import model_classes
    from kvslim.session_store import SessionStore
    from kvslim.sessions import load_cache, load_session, session_info

_HOMES = {
    "GradedCache": "kvslim.graded",
    "GradedCalibration": "kvslim.graded",
    "GradedConfig": "kvslim.graded",
    "GradedStats": "kvslim.graded",
    "calibrate": "kvslim.graded",
    "JoltCache": "kvslim.jolt",
    "JoltConfig": "kvslim.jolt",
    "LatentCache": "kvslim.caching.latent",
    "PaluConfig": "kvslim.palu",
    "compress": "kvslim.palu",
    "RecoveryConfig": "kvslim.recovery_config",
    "recover": "kvslim.recovery",
    "SessionStore": "kvslim.session_store",
    "register": "kvslim.attending.handle_attention",
    "load_cache": "kvslim.sessions",
    "load_session": "kvslim.sessions",
    "model_classes": "kvslim.registering",
    "session_info": "kvslim.sessions",
}

__all__ = [
    "GradedCache",
    "GradedCalibration",
    "GradedConfig",
    "GradedStats",
    "JoltCache",
    "JoltConfig",
    "KvslimError",
    "LatentCache",
    "PaluConfig",
    "RecoveryConfig",
    "SessionStore",
    "__version__",
    "calibrate",
    "compress",
    "load_cache",
    "load_session",
    "model_classes",
    "recover",
    "register",
    "session_info",
]

register_models()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvslim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
