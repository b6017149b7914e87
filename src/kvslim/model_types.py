"""The model types of compressed models. A module of its own, since it is needed before torch and transformers are."""

from __future__ import annotations

COMPRESSED = "kvslim_palu_"
"""What ``config.model_type`` of a compressed model that was loaded begins with; the original's follows."""

ORIGINALS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "gpt_neox", "opt", "gpt2", "bloom", "mpt",
)  # fmt: skip
"""The model types that have a row in :data:`kvslim.attending.families.FAMILIES`."""
