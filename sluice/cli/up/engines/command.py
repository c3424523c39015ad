"""The command `follow`, which adds running servers to a suite."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from sluice.cli.flags import made, with_flags
from sluice.cli.up.engines import follow
from sluice.cli.up.engines.follow import FollowOptions
from sluice.cli.up.progress import View


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("follow")(follow_engines)


@with_flags(FollowOptions)
def follow_engines(**flags: Any) -> None:
    """Run a worker for each server of a list, beside routers that run elsewhere; Ctrl-C stops the workers.

    The list is followed while it changes, as by `sluice up --engines`. Set other settings of the workers through
    environment variables, such as SLUICE_WORKER_LOG_FORMAT=json.
    """
    raise typer.Exit(follow.run(made(FollowOptions, flags), View((), Console(stderr=True, highlight=False))))
