"""The commands `up`, which starts a suite, and `follow`, which adds running servers to one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import typer
from rich.console import Console

from services.common.net.ports import free_port
from sluice.cli.flags import made, with_flags
from sluice.cli.up import follow, supervisor
from sluice.cli.up.engines.entries import EngineEntry
from sluice.cli.up.engines.file import EngineFile
from sluice.cli.up.engines.workers import EngineWorkers
from sluice.cli.up.follow import FollowOptions
from sluice.cli.up.options import Options
from sluice.cli.up.plan import Process, check, engine_process, plan, secured
from sluice.cli.up.progress import View

SWITCHES = ("migration", "migration-enabled", "native-parsers")
"""Flags of `sluice up` that are on or off, both of which can be given."""


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    app.command("up")(up_suite)
    app.command("follow")(follow_engines)


@with_flags(Options)
def up_suite(**flags: Any) -> None:
    """Start the whole suite as local processes; Ctrl-C stops it.

    When a process exits unexpectedly, the others are stopped and the exit code is 1, unless --restart is given.
    Set other settings of a service through environment variables, such as SLUICE_GATEWAY_LOG_FORMAT=json.
    """
    options = made(Options, flags)
    name = check(options).name
    processes = plan(options, free_port)
    if options.tls is not None:
        processes = secured(processes, options.tls)
    view = View(processes, Console(stderr=True, highlight=False))
    if note := options.processing.note(options.engine):
        view.report(note, "bold yellow")
    if options.engines is None:
        raise typer.Exit(supervisor.run(processes, view, name, options.restart))
    engine_workers = EngineWorkers(EngineFile(options.engines), partial(_worker_of, options, processes), view)
    raise typer.Exit(supervisor.run(processes, view, "", options.restart, engine_workers))


@with_flags(FollowOptions)
def follow_engines(**flags: Any) -> None:
    """Run a worker for each server of a list, beside routers that run elsewhere; Ctrl-C stops the workers.

    The list is followed while it changes, as by `sluice up --engines`. Set other settings of the workers through
    environment variables, such as SLUICE_WORKER_LOG_FORMAT=json.
    """
    raise typer.Exit(follow.run(made(FollowOptions, flags), View((), Console(stderr=True, highlight=False))))


def _worker_of(options: Options, processes: Sequence[Process], entry: EngineEntry, port: int) -> Process:
    routers = ",".join(process.address for process in processes if process.kind == "router")
    process = engine_process(options, entry, routers, port)
    return process if options.tls is None else secured([process], options.tls)[0]
