"""What asking for needles found: as JSON, as a table, and as a map of length and depth."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvslim.errors import ConfigError
from kvslim.evaluating.method_forms import CacheMethod
from kvslim.evaluating.needle import NeedleConfig, NeedleTrial
from kvslim.evaluating.plots import new_figure, save_png
from kvslim.evaluating.results import SCHEMA, Environment, ModelFingerprint, parse_results
from kvslim.files import write_atomically

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class NeedleScore:
    """One method's needles.

    Attributes:
        method: its name.
        family: what it belongs to.
        settings: every setting, defaults included.
        trials: one per length, depth and seed.
    """

    method: str
    family: str
    settings: dict[str, Any]
    trials: tuple[NeedleTrial, ...]

    def found(self, length: int | None = None, depth: float | None = None) -> float:
        """Share of needles found, of all or of those at this length and depth."""
        chosen = [
            one.found
            for one in self.trials
            if (length is None or one.length == length) and (depth is None or one.depth == depth)
        ]
        return sum(chosen) / len(chosen)

    @property
    def ratio(self) -> float:
        """Mean measured ratio of the caches."""
        return sum(one.ratio for one in self.trials) / len(self.trials)


@dataclass(frozen=True)
class NeedleResults:
    """All methods on the same needles.

    Attributes:
        model: which.
        text: origin of the haystack.
        settings: of the needles.
        scores: one entry per method, in the order asked.
        environment: where and how.
        schema: version of the layout.
    """

    model: ModelFingerprint
    text: str
    settings: NeedleConfig
    scores: tuple[NeedleScore, ...]
    environment: Environment = field(default_factory=Environment.now)
    schema: int = SCHEMA

    @classmethod
    def of(
        cls,
        model: ModelFingerprint,
        text: str,
        settings: NeedleConfig,
        methods: list[CacheMethod],
        trials: dict[str, list[NeedleTrial]],
    ) -> Self:
        """Put together what :func:`~kvslim.evaluating.needle.run_needles` found."""
        scores = tuple(NeedleScore(m.name, m.family, m.settings, tuple(trials[m.name])) for m in methods)
        return cls(model, text, settings, scores)

    def to_json(self) -> str:
        """All fields, and the share found per method and length."""
        data = dataclasses.asdict(self)
        for entry, score in zip(data["scores"], self.scores, strict=True):
            entry["found"] = score.found()
            entry["found_by_length"] = {str(length): score.found(length) for length in self.settings.lengths}
            entry["ratio"] = score.ratio
        return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: it is no such JSON, or of another schema version.
        """
        try:
            data = parse_results(text)
            names = [one.name for one in dataclasses.fields(NeedleScore)]
            scores = [
                NeedleScore(**{name: entry[name] for name in names} | {"trials": _trials(entry)})
                for entry in data["scores"]
            ]
            parts = {
                "model": ModelFingerprint(**data["model"]),
                "environment": Environment(**data["environment"]),
                "settings": NeedleConfig.from_dict(data["settings"]),
            }
            return cls(**{**data, **parts, "scores": tuple(scores)})
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"These are no needle results of kvslim: {error}") from error

    def save(self, path: Path) -> None:
        """Write the JSON to ``path``, atomically. Errors as :func:`write_atomically`."""
        write_atomically(path, self.to_json().encode())

    def table(self) -> Table:
        """A rich table: per method its ratio and the needles found at each length."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", no_wrap=True)
        for name in ("ratio", *(f"{length} tokens" for length in self.settings.lengths), "all"):
            table.add_column(name, justify="right", no_wrap=True)
        for score in self.scores:
            shares = [f"{score.found(length):.0%}" for length in self.settings.lengths]
            table.add_row(score.method, f"{score.ratio:.2f}x", *shares, f"{score.found():.0%}")
        return table


def _trials(entry: dict[str, Any]) -> tuple[NeedleTrial, ...]:
    return tuple(NeedleTrial(**trial) for trial in entry["trials"])


def plot_needles(results: NeedleResults, path: Path) -> None:
    """Draw a map per method: share found, by length and depth, written into each field."""
    lengths, depths = results.settings.lengths, results.settings.places
    figure, panels = new_figure(
        2 + 1.1 * len(lengths) * len(results.scores), 1.6 + 0.45 * len(depths), columns=len(results.scores)
    )
    for axes, score in zip(panels, results.scores, strict=True):
        shares = [[score.found(length, depth) for length in lengths] for depth in depths]
        axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for row, line in enumerate(shares):
            for column, share in enumerate(line):
                colour = "black" if share > 0.5 else "white"
                axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=colour, fontsize=8)
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_title(f"{score.method} ({score.ratio:.2f}x)", fontsize=9)
        axes.set_xlabel("tokens in the cache", fontsize=8)
    panels[0].set_ylabel("depth of the needle", fontsize=8)
    figure.suptitle(f"{results.model.name}: needles found", fontsize=10)
    save_png(figure, path)
