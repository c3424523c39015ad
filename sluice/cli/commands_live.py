"""The commands for a running suite: `top`, `route`, `workers` and `doctor`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.errors import BadFlag
from sluice.cli.trust import Tls, TlsCa, TlsCert, TlsKey, Trust

Gateway = Annotated[str, typer.Option(envvar="SLUICE_GATEWAY", metavar="URL", help="URL of the gateway")]
Router = Annotated[
    str,
    typer.Option(
        envvar="SLUICE_ROUTER", metavar="HOST:PORT", help="address of a router; empty: the one that the gateway reports"
    ),
]
ApiKey = Annotated[str, typer.Option(envvar="SLUICE_API_KEY", help="API key for the gateway, if it requires one")]
RouterToken = Annotated[
    str, typer.Option(envvar="SLUICE_ROUTER_TOKEN", help="token for the router, if it requires one")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]

DEFAULT_GATEWAY = "http://127.0.0.1:8000"
UNLIMITED_WIDTH = 200


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    for name, command in (("top", top), ("route", route), ("workers", workers), ("doctor", doctor)):
        app.command(name)(command)


def top(
    gateway: Gateway = DEFAULT_GATEWAY,
    api_key: ApiKey = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    once: Annotated[bool, typer.Option("--once", help="print one snapshot and exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Show rates, workers and recent requests of a running suite, updated every second; Ctrl-C exits."""
    from sluice.cli.live import top as command
    from sluice.cli.live.endpoint import Endpoint

    endpoint = Endpoint(gateway, "", api_key, "", Trust(tls, tls_ca, tls_cert, tls_key))
    raise typer.Exit(command.run(endpoint, once, as_json, console()))


def route(
    text: Annotated[str, typer.Argument(help="text of the prompt")],
    gateway: Gateway = DEFAULT_GATEWAY,
    router: Router = "",
    model: Annotated[str, typer.Option(help="served name of the model; may be omitted if there is only one")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="treat the text as a plain prompt, not as a chat message")] = False,
    tenant: Annotated[
        str, typer.Option(help="tenant whose part of the prefix cache is searched; see `sluice keys list`")
    ] = "",
    api_key: ApiKey = "",
    router_token: RouterToken = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Show where a prompt would be routed and why: the router's score of each worker. Makes no reservation."""
    from sluice.cli.live import route as command
    from sluice.cli.live.endpoint import Endpoint

    if not text:
        raise BadFlag("TEXT must not be empty; pass the prompt to route")
    endpoint = Endpoint(gateway, router, api_key, router_token, Trust(tls, tls_ca, tls_cert, tls_key))
    raise typer.Exit(command.run(endpoint, text, model, raw, tenant, as_json, console()))


def workers(
    gateway: Gateway = DEFAULT_GATEWAY,
    router: Router = "",
    api_key: ApiKey = "",
    router_token: RouterToken = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """List the workers with their health and load; exit code 1 if one does not serve."""
    from sluice.cli.live import workers as command
    from sluice.cli.live.endpoint import Endpoint

    endpoint = Endpoint(gateway, router, api_key, router_token, Trust(tls, tls_ca, tls_cert, tls_key))
    raise typer.Exit(command.run(endpoint, as_json, console()))


def doctor(
    gateway: Gateway = DEFAULT_GATEWAY,
    router: Router = "",
    redis: Annotated[
        str,
        typer.Option(
            envvar="SLUICE_ROUTER_REDIS_URL",
            metavar="URL",
            help="URL of the routers' Redis, which is then checked as well",
        ),
    ] = "",
    api_key: ApiKey = "",
    router_token: RouterToken = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Check a running suite and suggest fixes: addresses, versions, Redis, clocks, certificates, parity.

    Exit code 1 if a check fails.
    """
    from sluice.cli.doctor import doctor as command
    from sluice.cli.live.endpoint import Endpoint

    endpoint = Endpoint(gateway, router, api_key, router_token, Trust(tls, tls_ca, tls_cert, tls_key))
    raise typer.Exit(command.run(endpoint, redis, as_json, console()))


def console() -> Console:
    """Returns a console as wide as the terminal, or one that cuts nothing if there is no terminal."""
    limited = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if limited else UNLIMITED_WIDTH)
