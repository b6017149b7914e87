"""The typed errors of kvslim. Each message says what is wrong and what to do about it."""

from __future__ import annotations


class KvslimError(Exception):
    """Base of every error that kvslim raises on purpose."""


class ConfigError(KvslimError, ValueError):
    """A configuration value is out of range, or a field is unknown."""


class UnsupportedModelError(KvslimError, TypeError):
    """The architecture, layer type or attention implementation has no row in the family table."""


class BudgetError(KvslimError, ValueError):
    """The byte budget cannot be met; the message names the least budget that can."""


class NonFiniteError(KvslimError, ValueError):
    """A cached or calibrated tensor holds NaN or Inf; the message names the layer."""


class CacheStateError(KvslimError, RuntimeError):
    """A cache was used in a state, or with a model, that does not allow the call."""


class CalibrationError(KvslimError, ValueError):
    """The calibration data is too short, empty or otherwise unusable."""


class ModelSourceError(KvslimError, OSError):
    """A model could not be obtained: no such path, no network, or a download that fails its checksum."""


class CheckpointError(KvslimError, ValueError):
    """A stored file or directory is damaged, of another format, or of a newer version."""


class TrainingDataError(KvslimError, ValueError):
    """The rows to train on are missing, malformed or too short."""


class MissingDependencyError(KvslimError, ImportError):
    """An optional package is needed and not installed; the message names the command that installs it."""
