"""The model card of a compressed model: README.md, generated from its metadata alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CARD = "README.md"

_LOADING = """```python
import kvslim  # makes the architecture known; nothing else is needed
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY_OR_REPOSITORY")
```"""


@dataclass(frozen=True)
class Facts:
    """What the card is made of.

    Attributes:
        family: ``model_type`` of the original.
        about: the table ``kvslim`` of config.json.
    """

    family: str
    about: dict[str, Any]


def model_card(facts: Facts) -> str:
    """The text of README.md."""
    about = facts.about
    title = about["base_model"] or f"A {facts.family} model"
    parts = [
        _front_matter(about),
        f"# {title}, its KV cache compressed by Palu",
        "Keys and values are cached as low-rank latents (Chang et al., 2024, arXiv:2407.21118). Made with "
        f"kvslim {about['kvslim_version']}, which is needed to run it: `pip install kvslim`.",
        _LOADING,
        "## Size",
        _table(("", "compressed", "original"), _sizes(about)),
        "## Quality",
        _quality(about["quality"]),
        "## Settings",
        _table(("setting", "value"), _settings(about["report"])),
        "## Ranks",
        "Latent channels of each group of KV heads, and how their second factors are used.",
        _table(("layer", "keys", "values", "key factor", "value factor"), _ranks(about)),
        "## Check",
        f"Format version {about['version']}, content hash `{about['content_sha256']}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(about: dict[str, Any]) -> str:
    lines = ["---", "library_name: kvslim", "pipeline_tag: text-generation"]
    if about["base_model"]:
        lines.append(f"base_model: {about['base_model']}")
    return "\n".join([*lines, "tags:", "- kvslim", "- palu", "- kv-cache", "- low-rank", "---"])


def _sizes(about: dict[str, Any]) -> list[tuple[Any, ...]]:
    held, report = about["bytes_per_token"], about["report"]
    rows: list[tuple[Any, ...]] = [
        ("cache, bytes per token (16-bit)", f"{held['compressed']:,.0f}", f"{held['uncompressed_bf16']:,.0f}"),
        ("cache, times smaller", f"{held['uncompressed_bf16'] / held['compressed']:.2f}", 1),
    ]
    if "dense_parameters" in report:
        counts = (f"{report[name]:,}" for name in ("parameters", "dense_parameters"))
        rows.append(("parameters of the attention projections", *counts))
    return rows


def _quality(quality: dict[str, Any] | None) -> str:
    if not quality:
        return "Not measured when the model was saved."
    return _table(("measured", "value"), [(name, _plain(value)) for name, value in quality.items()])


def _settings(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The request and whatever else was reported in single values: the calibration among it."""
    rows = [(name, _plain(value)) for name, value in report.get("config", {}).items()]
    for name, value in report.items():
        if name == "rate":
            rows.append(("rate, achieved", _plain(value)))
        elif _is_plain(value) and "parameters" not in name:
            rows.append((name, _plain(value)))
        elif name == "recoveries" and value:
            rows.append((name, str(len(value))))
    return rows


def _ranks(about: dict[str, Any]) -> list[tuple[Any, ...]]:
    pairs = zip(about["ranks"], about["forms"], strict=True)
    return [
        (layer, " ".join(map(str, key)), " ".join(map(str, value)), *forms)
        for layer, ((key, value), forms) in enumerate(pairs)
    ]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _plain(value: Any) -> str:
    """One cell of a table."""
    text = f"{value:.6g}" if isinstance(value, float) else "none" if value is None else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
