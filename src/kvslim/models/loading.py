"""From the name of a model to the model: nothing is executed that did not come with transformers or kvslim."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not in __all__
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvslim.errors import ConfigError, KvslimError, ModelSourceError, UnsupportedModelError
from kvslim.models.embedded import default

DEFAULT = "default"
_UNREACHABLE = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)


def resolve(name: str, *, progress: bool = True) -> str:
    """Return what ``from_pretrained`` understands: a directory, or a hub id that is not looked up yet.

    Args:
        name: ``"default"`` for the embedded model, a Hugging Face directory, or a hub id such as ``"org/model"``. A
            directory of one's own called ``default`` is ``"./default"``.
        progress: show the steps of preparing the embedded model.

    Raises:
        ModelSourceError: the path is no model directory, the name cannot be a hub id, or the default model cannot be
            obtained.
    """
    if name == DEFAULT:
        return str(default(progress=progress))
    path = Path(name).expanduser() if name else None
    if path is not None and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelSourceError(f"{name} is a directory but no model: config.json is missing there.")
        return str(path)
    if path is not None and path.exists():
        raise ModelSourceError(
            f"{name} is a file. Give the directory that holds config.json and the safetensors weights."
        )
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelSourceError(
            f"{name!r} is neither an existing directory nor a possible hub id. Give '{DEFAULT}', the directory of a "
            "Hugging Face model, or an id such as 'org/model'."
        ) from error
    return name


def load(
    name: str = DEFAULT,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str | None = None,
    *,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Only safetensors weights are read and no code from a model's repository runs.

    Args:
        name: as for :func:`resolve`.
        dtype: of the weights in memory.
        device: where the weights go.
        attn_implementation: as in ``from_pretrained``; ``None`` takes the model's own choice.
        progress: show the steps of preparing the embedded model.

    Raises:
        ModelSourceError: the model cannot be obtained or is incomplete; the message names the fix.
        UnsupportedModelError: the installed transformers has no causal language model for it.
        ConfigError: ``device`` is not there.
    """
    device = checked_device(device)
    source = resolve(name, progress=progress)
    with _errors_in_words(name):
        config = _config(name, source)
        tokenizer = _tokenizer(name, source)
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ModelSourceError(
            f"The weights of {name} lack {len(missing)} tensors, the first is {missing[0]}; they would be random. "
            "Download or save the model again."
        )
    return model.to(device).eval(), tokenizer


def _config(name: str, source: str) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (ValueError, KeyError) as error:  # transformers raises these for an unknown or missing model_type
        raise UnsupportedModelError(
            f"transformers cannot read the config of {name} without code from its repository, which kvslim never runs: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(f"{name} is of type {config.model_type!r}, which is no causal language model.")
    return config


def _tokenizer(name: str, source: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except ValueError as error:  # transformers raises it when the files of a tokenizer are missing or unusable
        raise ModelSourceError(
            f"The tokenizer of {name} cannot be loaded: {str(error).splitlines()[0]} "
            "Save it beside the model, with tokenizer.json."
        ) from error


def checked_device(device: str | torch.device) -> torch.device:
    """``device``, if something can be put there.

    Raises:
        ConfigError: there is no such device here.
    """
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError) as error:  # an unknown name, and a backend that is not there
        raise ConfigError(f"Device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return checked


@contextmanager
def _errors_in_words(name: str) -> Iterator[None]:
    try:
        yield
    except KvslimError:
        raise
    except SafetensorError as error:
        raise ModelSourceError(f"The weights of {name} are damaged ({error}). Download or save them again.") from error
    except OSError as error:  # all errors of the hub derive from it, and transformers raises it for missing files
        raise ModelSourceError(_explain(name, error)) from error


def _explain(name: str, error: OSError) -> str:
    """Say why a model could not be loaded, and what to do."""
    chain = list(_chain(error))
    if any(isinstance(link, GatedRepoError) for link in chain):
        return f"{name} is gated on the hub. Accept its terms there and log in with 'hf auth login'."
    if any(isinstance(link, RepositoryNotFoundError) for link in chain):
        return (
            f"There is neither a directory nor a model on the hub called {name!r}. Check the spelling; if the model is "
            "private, run 'hf auth login'."
        )
    if "safetensors" in str(error):
        return f"{name} has no safetensors weights, and kvslim does not load pickled ones. Convert them first."
    if any(isinstance(link, _UNREACHABLE) for link in chain) or "couldn't connect" in str(error):
        return (
            f"There is no directory called {name!r}, the local hub cache has no such model, and the hub cannot be "
            f"reached. Connect to the network, or give the directory of a model, or '{DEFAULT}'."
        )
    return f"{name} could not be loaded: {error}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
