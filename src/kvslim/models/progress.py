"""Named steps with a progress bar on standard error, or in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[float], None]
"""Called with how much of the current step is done, in the units of its total."""


class Steps:
    """A context manager under which each :meth:`step` gets one line.

    Args:
        show: draw the lines; ``False`` makes every call a no-op.
    """

    def __init__(self, show: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not show,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, name: str, total: float | None = None) -> Iterator[Report]:
        """Show a step called ``name``; a ``total`` of ``None`` draws a bar without a length."""
        task = self._progress.add_task(name, total=total)

        def report(done: float) -> None:
            self._progress.update(task, completed=done if total is None else min(done, total))

        yield report
        end = 1.0 if total is None else total
        self._progress.update(task, total=end, completed=end)
