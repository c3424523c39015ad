"""A line at the bottom of the terminal that says what a starting worker is doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from services.worker.serving import status as phases


@contextmanager
def shown(terminal: bool) -> Iterator[None]:
    """Shows phases while the block runs, if there is a terminal to show them on."""
    if not terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Log lines go straight to standard error: the line is drawn anew below them.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stderr=False) as progress:
        task = progress.add_task("starting", total=None)

        def show(name: str, share: float | None) -> None:
            if name:
                progress.update(task, description=name, total=1.0 if share is not None else None, completed=share or 0)
            else:
                progress.stop()

        phases.on_change = show
        try:
            yield
        finally:
            phases.on_change = phases.silent
