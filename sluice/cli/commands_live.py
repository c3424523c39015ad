"""The commands for a running suite: `ps`, `top`, `route`, `workers` and `doctor`."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from sluice.cli.errors import BadFlag
from sluice.cli.flags import made, with_flags
from sluice.cli.live.endpoint import Endpoint

AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]

UNLIMITED_WIDTH = 200


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    for name, command in (("ps", ps), ("top", top), ("route", route), ("workers", workers), ("doctor", doctor)):
        app.command(name)(command)


def ps(
    pid: Annotated[
        str, typer.Option(metavar="NAME", help="print only the id of this process, such as worker-0, for `kill`")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the suites that run on this machine, with their processes; exit code 1 if none does."""
    from sluice.cli.live import ps as command

    if pid:
        typer.echo(command.pid_of(pid))
        return
    raise typer.Exit(command.run(as_json, console()))


@with_flags(Endpoint, without=("router", "router_token"))
def top(
    once: Annotated[bool, typer.Option("--once", help="print one snapshot and exit")] = False,
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Show rates, workers and recent requests of a running suite, updated every second; Ctrl-C exits."""
    from sluice.cli.live import top as command

    raise typer.Exit(command.run(made(Endpoint, flags).located(), once, as_json, console()))


@with_flags(Endpoint)
def route(
    text: Annotated[str, typer.Argument(help="text of the prompt")],
    model: Annotated[str, typer.Option(help="served name of the model; may be omitted if there is only one")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="treat the text as a plain prompt, not as a chat message")] = False,
    tenant: Annotated[
        str, typer.Option(help="tenant whose part of the prefix cache is searched; see `sluice keys list`")
    ] = "",
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Show where a prompt would be routed and why: the router's score of each worker. Makes no reservation."""
    from sluice.cli.live import route as command

    if not text:
        raise BadFlag("TEXT must not be empty; pass the prompt to route")
    raise typer.Exit(command.run(made(Endpoint, flags).located(), text, model, raw, tenant, as_json, console()))


@with_flags(Endpoint)
def workers(as_json: AsJson = False, **flags: Any) -> None:
    """List the workers with their health and load; exit code 1 if one does not serve."""
    from sluice.cli.live import workers as command

    raise typer.Exit(command.run(made(Endpoint, flags).located(), as_json, console()))


@with_flags(Endpoint)
def doctor(
    redis: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_ROUTER_REDIS_URL",
            metavar="URL",
            help="URL of the routers' Redis, which is then checked as well",
        ),
    ] = "",
    as_json: AsJson = False,
    **flags: Any,
) -> None:
    """Check a running suite and suggest fixes: addresses, versions, Redis, clocks, certificates, parity.

    Exit code 1 if a check fails.
    """
    from sluice.cli.doctor import doctor as command

    raise typer.Exit(command.run(made(Endpoint, flags).located(), redis, as_json, console()))


def console() -> Console:
    """Returns a console as wide as the terminal, or one that cuts nothing if there is no terminal."""
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if limited else UNLIMITED_WIDTH)
