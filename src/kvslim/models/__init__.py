"""Where models come from: the embedded default model, Hugging Face directories, and hub ids."""

from kvslim.models.embedded import default
from kvslim.models.loading import load, resolve

__all__ = ["default", "load", "resolve"]
