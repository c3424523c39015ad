"""The command `up`, which starts a suite."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import typer
from rich.console import Console

from services.common.net.ports import free_port
from sluice.cli.flags import made, with_flags
from sluice.cli.up import supervisor
from sluice.cli.up.engine_list import engine_list
from sluice.cli.up.options import Options
from sluice.cli.up.plan import ListedEngine, Process, check, engine_process, plan, secured
from sluice.cli.up.progress import View

SWITCHES = ("migration", "migration-enabled", "native-parsers", "restart")
"""Flags of `sluice up` that are on or off, both of which can be given."""


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("up")(up_suite)


@with_flags(Options)
def up_suite(**flags: Any) -> None:
    """Start the whole suite as local processes; Ctrl-C stops it.

    A process that ends is restarted; when it ends too often, the others are stopped and the exit code is 1.
    The services print warnings and errors; --log-level info shows more. Set other settings of a service through
    environment variables, such as SLUICE_GATEWAY_LOG_FORMAT=json.
    """
    options = made(Options, flags)
    name = check(options).name
    listed = None if options.engines is None else engine_list(options.engines)
    if listed is not None:
        listed.check()
    processes = plan(options, free_port)
    if options.tls is not None:
        processes = secured(processes, options.tls)
    view = View(processes, Console(stderr=True, highlight=False))
    if note := options.processing.note(options.engine):
        view.report(note, "bold yellow")
    if listed is None:
        raise typer.Exit(supervisor.run(processes, view, name, options.restart))
    engine_workers = listed.workers(partial(_worker_of, options, processes), view)
    raise typer.Exit(supervisor.run(processes, view, "", options.restart, engine_workers))


def _worker_of(options: Options, processes: Sequence[Process], entry: ListedEngine, port: int) -> Process:
    routers = ",".join(process.address for process in processes if process.kind == "router")
    process = engine_process(options, entry, routers, port)
    return process if options.tls is None else secured([process], options.tls)[0]
