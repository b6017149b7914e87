"""What a session file says of itself, read without its tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from kvslim.caching.cells import KINDS
from kvslim.checkpointing.fingerprint import ModelIdentity
from kvslim.checkpointing.session_about import About
from kvslim.checkpointing.session_file import SessionFile
from kvslim.checkpointing.session_plan import PrefixPlan, Record
from kvslim.types import KVShape


@dataclass(frozen=True)
class SessionInfo:
    """A session file. Bytes add up to the size of the file.

    Attributes:
        path: where it is.
        format_version: of the file.
        kvslim: version that wrote it.
        method: ``jolt`` or ``graded``.
        stats: digest of the calibration statistics that it was made with, or None.
        model: what the model must be.
        tokenizer: a tokenizer is recorded, to be compared.
        config: settings of the cache.
        dtype: of keys and values.
        rows: batch rows.
        columns: positions cached per row, padding included.
        prefix_tokens: real tokens in the compressed prefix, rows that share storage once.
        coded_tokens: those of them that are compressed.
        tail_tokens: exact tokens per row behind the prefix.
        id_tokens: token ids per row, or None if none were saved.
        description_bytes: JSON and plan.
        arena_bytes: tensors of the compressed prefix, its exact sinks and window included.
        id_bytes: token ids and attention mask.
        tail_bytes: exact tokens behind the prefix.
        sliding_bytes: sliding-window layers.
        dense_bytes: the prefix in bf16.
        key_error, value_error: relative error of the compressed tokens, measured when they were coded.
        plans: for keys and values what was chosen, in words, with the number of cells.
        note: what stays exact and why.
    """

    path: Path
    format_version: int
    kvslim: str
    method: str
    stats: str | None
    model: ModelIdentity
    tokenizer: bool
    config: dict[str, Any]
    dtype: str
    rows: int
    columns: int
    prefix_tokens: int
    coded_tokens: int
    tail_tokens: int
    id_tokens: int | None
    description_bytes: int
    arena_bytes: int
    id_bytes: int
    tail_bytes: int
    sliding_bytes: int
    dense_bytes: int
    key_error: float
    value_error: float
    plans: dict[str, tuple[tuple[str, int], ...]]
    note: str

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        apart = self.id_bytes + self.tail_bytes + self.sliding_bytes
        return self.description_bytes + self.arena_bytes + apart

    @property
    def ratio(self) -> float:
        """bf16 bytes of the prefix over what it takes in the file, description included; 1.0 without a prefix."""
        stored = self.description_bytes + self.arena_bytes
        return self.dense_bytes / stored if self.dense_bytes else 1.0

    def __str__(self) -> str:
        ids = "no token ids" if self.id_tokens is None else f"{self.id_tokens} token ids per row"
        tokenizer = "tokenizer recorded" if self.tokenizer else "no tokenizer recorded"
        lines = [
            f"{self.path}: {self.columns} tokens × {self.rows} row(s), {self.total_bytes / 1e6:.2f} MB",
            f"  model: {self.model.summary()}; {tokenizer}",
            f"  written by kvslim {self.kvslim}, format {self.format_version}; keys and values in {self.dtype}",
        ]
        if self.stats is not None:
            lines.append(f"  method: {self.method}, with the statistics {self.stats[:12]}…")
        if self.dense_bytes:
            lines += [
                f"  compressed prefix: {self.coded_tokens} of {self.prefix_tokens} tokens coded, "
                f"{self.dense_bytes / 1e6:.2f} MB in bf16, {self.ratio:.2f}x smaller in this file",
                f"  relative error: keys {self.key_error:.4f}, values {self.value_error:.4f}",
            ]
        lines.append(
            f"  bytes: {self.arena_bytes} prefix, {self.description_bytes} description, {self.tail_bytes} exact tail "
            f"({self.tail_tokens} tokens per row), {self.sliding_bytes} sliding-window layers, {self.id_bytes} ids"
        )
        lines.append(f"  {ids}" + (f"; {self.note}" if self.note else ""))
        for kind, plans in self.plans.items():
            most = "; ".join(f"{count} × {words}" for words, count in plans[:4])
            lines.append(f"  {kind}: {most}" + (f"; and {len(plans) - 4} other plans" if len(plans) > 4 else ""))
        return "\n".join(lines)


def info(path: str | PathLike[str]) -> SessionInfo:
    """What the session at ``path`` holds. Its description is checked against its hash; its tensors are not read.

    Raises:
        CheckpointError: it is missing, truncated, its description was edited, it is no session or of a newer format.
    """
    with SessionFile(Path(path)) as file:
        about = About.of_file(file)
        plan = about.plan_of(file) if about.compressed else None
        sizes = {name: part.nbytes for name, part in file.parts.items()}
        tail, ids = file.parts.get("tail"), file.parts.get("input_ids")
        if tail is None or len(tail.shape) != 6 or (ids is not None and len(ids.shape) != 2):
            raise file.damaged("it has no exact tokens, or no token ids")
        cells = [cell for part in plan.stretches for cell in part.cells] if plan is not None else []
        tokens, model = plan.tokens if plan is not None else 0, about.model
        shape = KVShape(model.layers - model.sliding, model.kv_heads, model.head_dim)
        return SessionInfo(
            path=file.path,
            format_version=file.format_version,
            kvslim=about.kvslim,
            method=about.method,
            stats=about.stats,
            model=model,
            tokenizer=about.tokenizer is not None,
            config=about.config_of(file),
            dtype=about.dtype,
            rows=tail.shape[2],
            columns=tail.shape[4] + (plan.columns if plan is not None else 0),
            prefix_tokens=tokens,
            coded_tokens=_coded(plan) if plan is not None else 0,
            tail_tokens=tail.shape[4],
            id_tokens=ids.shape[1] if ids is not None else None,
            description_bytes=file.json_bytes + sizes.get("plan", 0),
            arena_bytes=sizes.get("arena", 0),
            id_bytes=sizes.get("input_ids", 0) + sizes.get("attention_mask", 0),
            tail_bytes=sizes["tail"],
            sliding_bytes=sizes.get("sliding", 0),
            dense_bytes=shape.dense_bytes(tokens),
            key_error=_pooled(cells[::2]),
            value_error=_pooled(cells[1::2]),
            plans={
                kind: tuple(Counter(cell.words(shape.head_dim) for cell in cells[at::2]).most_common())
                for at, kind in enumerate(KINDS if cells else ())
            },
            note=about.note,
        )


def _coded(plan: PrefixPlan) -> int:
    parts = (plan.stretches[number] for row in plan.rows for number in row.stretches)
    return sum(part.tokens for part in parts if part.cells)


def _pooled(cells: Sequence[Record]) -> float:
    energy = sum(cell.energy for cell in cells)
    return math.sqrt(sum(cell.error**2 * cell.energy for cell in cells) / energy) if energy else 0.0
