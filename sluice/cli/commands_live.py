"""The commands for a suite that runs: `top`, `route`, `workers` and `doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.trust import Tls, TlsCa, TlsCert, TlsKey, Trust
from sluice.cli.up.plan import BadFlag

Gateway = Annotated[str, typer.Option(envvar="SLUICE_GATEWAY", metavar="URL", help="where the gateway is")]
Router = Annotated[
    str,
    typer.Option(envvar="SLUICE_ROUTER", metavar="HOST:PORT", help="where a router is; empty: as the gateway says"),
]
ApiKey = Annotated[str, typer.Option(envvar="SLUICE_API_KEY", help="key to show the gateway, if it wants one")]
RouterToken = Annotated[
    str, typer.Option(envvar="SLUICE_ROUTER_TOKEN", help="token to show to the router, if it wants one")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]

USUAL = "http://127.0.0.1:8000"
WIDE = 200


def add_to(app: typer.Typer) -> None:
    """Registers the commands."""
    for name, command in (("top", top), ("route", route), ("workers", workers), ("doctor", doctor)):
        app.command(name)(command)


def top(
    gateway: Gateway = USUAL,
    api_key: ApiKey = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    once: Annotated[bool, typer.Option("--once", help="one look, then it ends")] = False,
    as_json: AsJson = False,
) -> None:
    """Show rates, workers and recent requests of a running suite, once a second; Ctrl-C ends it."""
    from sluice.cli.live import top as command
    from sluice.cli.live.endpoint import Endpoint

    place = Endpoint(gateway, "", api_key, "", Trust(tls, tls_ca, tls_cert, tls_key))
    _end(lambda: command.run(place, once, as_json, console()))


def route(
    text: Annotated[str, typer.Argument(help="what a client would ask")],
    gateway: Gateway = USUAL,
    router: Router = "",
    model: Annotated[str, typer.Option(help="served name; empty: the only one there is")] = "",
    raw: Annotated[bool, typer.Option("--raw", help="a plain prompt, not a chat's message")] = False,
    tenant: Annotated[
        str, typer.Option(help="tenant in whose part of the prefix cache it is looked up; `sluice keys list` has them")
    ] = "",
    api_key: ApiKey = "",
    router_token: RouterToken = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Show where a prompt would go and why: the router's score of each worker. Books nothing."""
    from sluice.cli.live import route as command
    from sluice.cli.live.endpoint import Endpoint

    if not text:
        raise BadFlag("route needs a text that is not empty")
    place = Endpoint(gateway, router, api_key, router_token, Trust(tls, tls_ca, tls_cert, tls_key))
    _end(lambda: command.run(place, text, model, raw, tenant, as_json, console()))


def workers(
    gateway: Gateway = USUAL,
    router: Router = "",
    api_key: ApiKey = "",
    router_token: RouterToken = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """List the workers and how they are doing; exit code 1 when one does not serve."""
    from sluice.cli.live import workers as command
    from sluice.cli.live.endpoint import Endpoint

    place = Endpoint(gateway, router, api_key, router_token, Trust(tls, tls_ca, tls_cert, tls_key))
    _end(lambda: command.run(place, as_json, console()))


def doctor(
    gateway: Gateway = USUAL,
    router: Router = "",
    redis: Annotated[
        str,
        typer.Option(envvar="SLUICE_ROUTER_REDIS_URL", metavar="URL", help="the routers' Redis, to have it checked"),
    ] = "",
    api_key: ApiKey = "",
    router_token: RouterToken = "",
    tls: Tls = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Check a running suite and say what to do: addresses, versions, Redis, clocks, certificates, parity.

    Exit code 1 when something is wrong.
    """
    from sluice.cli.doctor import doctor as command
    from sluice.cli.live.endpoint import Endpoint

    place = Endpoint(gateway, router, api_key, router_token, Trust(tls, tls_ca, tls_cert, tls_key))
    _end(lambda: command.run(place, redis, as_json, console()))


def console() -> Console:
    """A console as wide as the terminal; where there is none, nothing has to be cut."""
    cut = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if cut else WIDE)


def _end(command: Callable[[], int]) -> None:
    """Ends with the command's exit code; whoever cannot be reached makes one sentence and exit code 2."""
    from sluice.cli.live.client import NotReached

    try:
        code = command()
    except NotReached as error:
        raise BadFlag(str(error)) from error
    raise typer.Exit(code)
