"""The command `follow`, which adds running servers to a suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from sluice.cli.up.engines import follow
from sluice.cli.up.engines.follow import FollowOptions
from sluice.cli.up.progress import View


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("follow")(follow_engines)


def follow_engines(
    engines: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="YAML list of running vLLM and SGLang servers, or where Kubernetes lists them"
        ),
    ],
    routers: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_WORKER_ROUTERS", help="host:port of the routers, separated by commas; names resolve to all"
        ),
    ],
    host: Annotated[
        str, typer.Option(help="address on which the workers listen; in a container 0.0.0.0")
    ] = FollowOptions.host,
    base_port: Annotated[
        int, typer.Option(help="port of the first worker, the next has the next one; 0: any free ports")
    ] = FollowOptions.base_port,
    health_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="serve gRPC health here: ready once the list was read")
    ] = FollowOptions.health_listen,
    drain_s: Annotated[
        float, typer.Option(help="seconds that the requests of a removed engine have to finish")
    ] = FollowOptions.drain_s,
    tls: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder of `sluice certs`: the workers use its worker certificate"),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option(help="log level of the workers")
    ] = None,
) -> None:
    """Run a worker for each server of a list, beside routers that run elsewhere; Ctrl-C stops the workers.

    The list is followed while it changes, as by `sluice up --engines`. Set other settings of the workers through
    environment variables, such as SLUICE_WORKER_LOG_FORMAT=json.
    """
    options = FollowOptions(engines, routers, host, base_port, health_listen, drain_s, tls, log_level)
    raise typer.Exit(follow.run(options, View((), Console(stderr=True, highlight=False))))
