"""`sluice worker`: runs one worker in this process, with the flags of `python -m services.worker`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from services.common.rpc.runner import run
from services.worker.__main__ import serve
from services.worker.serving import status
from services.worker.settings import WorkerSettings
from sluice.cli.errors import BadFlag
from sluice.cli.up import tls as tls_flags

FLAG = "--tls"


def _with_tls(arguments: Sequence[str]) -> list[str]:
    """Replaces --tls DIR by the service's TLS flags; raises BadFlag for a folder without the worker's certificate."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    replaced: list[str] = []
    words = iter(arguments[:end])
    for word in words:
        name, equals, value = word.partition("=")
        if name != FLAG:
            replaced.append(word)
            continue
        folder = Path(value if equals else next(words, ""))
        if not (folder / "worker.pem").is_file():
            raise BadFlag(f"--tls {folder} has no worker.pem; create the certificates with `sluice certs {folder}`")
        replaced += tls_flags.flags("worker", folder)
    return [*replaced, *arguments[end:]]


def run_worker(arguments: Sequence[str]) -> None:
    """Serves until a stop signal; does not return."""
    settings = WorkerSettings.load(_with_tls(arguments))
    with _phases_shown(sys.stderr.isatty() and settings.log_format == "text"):
        run("worker", settings, lambda stop: serve(settings, stop))


@contextmanager
def _phases_shown(terminal: bool) -> Iterator[None]:
    """Shows the phases of the start in a line at the bottom of the terminal, if there is one."""
    if not terminal:
        yield
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Log lines go directly to standard error: the progress line is redrawn below them.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stderr=False) as progress:
        task = progress.add_task("starting", total=None)

        def show(name: str, share: float | None) -> None:
            if name:
                progress.update(task, description=name, total=1.0 if share is not None else None, completed=share or 0)
            else:
                progress.stop()

        status.on_change = show
        try:
            yield
        finally:
            status.on_change = status.silent
