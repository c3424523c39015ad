"""`sluice follow`: runs the workers of listed servers beside routers that run elsewhere."""

from __future__ import annotations

import asyncio
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
import typer
from pydantic_settings import BaseSettings
from rich.console import Console

from services.common.base.budgets import BudgetPool
from services.common.net.addresses import HIGHEST_PORT, host_port, is_reachable, join
from services.common.rpc.health import Health
from services.worker.settings import WorkerSettings
from sluice.cli.errors import BadFlag
from sluice.cli.flags import flag, made, with_flags
from sluice.cli.up import tls as tls_flags
from sluice.cli.up.engines.entries import MAX_ENGINES, BadRegistry, EngineEntry, RegistryUnavailable
from sluice.cli.up.engines.file import EngineFile
from sluice.cli.up.engines.workers import EngineWorkers, WorkerPorts
from sluice.cli.up.options import LOOPBACK
from sluice.cli.up.plan import Process
from sluice.cli.up.progress import View
from sluice.cli.up.supervisor import stop_on_signals

KILL_AFTER_DRAIN_S = 10.0
"""Seconds in addition to its drain after which a worker that still runs is killed."""
MAX_WATCHES = 16
"""Open health streams of `sluice follow`; further callers are refused, budget `health_watches`."""


@dataclass(frozen=True)
class FollowOptions:
    """Holds the flags of `sluice follow`; None leaves the workers their own settings."""

    SETTINGS: ClassVar[type[BaseSettings]] = WorkerSettings

    engines: Path = flag(
        MISSING, "YAML list of running vLLM and SGLang servers, or where Kubernetes lists them", metavar="FILE"
    )
    routers: str = flag(
        MISSING, "host:port of the routers, separated by commas; names resolve to all", envvar="SLUICE_WORKER_ROUTERS"
    )
    host: str = flag(LOOPBACK, "address on which the workers listen; in a container 0.0.0.0")
    base_port: int = flag(0, "port of the first worker, the next has the next one; 0: any free ports")
    health_listen: str = flag("", "serve gRPC health here: ready once the list was read", metavar="HOST:PORT")
    drain_s: float = flag(10.0, "seconds that the requests of a removed engine have to finish")
    tls: Path | None = flag(None, "folder of `sluice certs`: the workers use its worker certificate", metavar="DIR")
    log_level: str | None = None


def check(options: FollowOptions) -> None:
    """Raises BadFlag for the first invalid flag, or a mistake in the list."""
    routers = [router.strip() for router in options.routers.split(",")]
    if wrong := [router for router in routers if not is_reachable(router)]:
        raise BadFlag(f"--routers is {wrong[0]!r}; expected host:port, or several separated by commas.")
    if not options.host:
        raise BadFlag("--host must not be empty; use 0.0.0.0 or :: for every address of this machine.")
    if options.base_port and not 1024 <= options.base_port <= HIGHEST_PORT - MAX_ENGINES:
        raise BadFlag(f"--base-port must be 0, or between 1024 and {HIGHEST_PORT - MAX_ENGINES}.")
    if options.health_listen and host_port(options.health_listen) is None:
        raise BadFlag(f"--health-listen is {options.health_listen!r}; expected host:port.")
    if not 0 <= options.drain_s <= 3600:
        raise BadFlag("--drain-s must be between 0 and 3600.")
    if options.tls is not None and not (options.tls / "worker.pem").is_file():
        raise BadFlag(
            f"--tls {options.tls} has no worker.pem; create the certificates with `sluice certs {options.tls}`."
        )
    try:
        EngineFile(options.engines).entries()
    except RegistryUnavailable:
        return  # reported, and tried again, while following
    except BadRegistry as error:
        raise BadFlag(str(error)) from error


def worker_process(options: FollowOptions, entry: EngineEntry, port: int) -> Process:
    """Returns the worker of a running server."""
    arguments = (
        *("--listen", join(options.host, port), "--routers", options.routers),
        *entry.worker_arguments(),
        *("--drain-s", f"{options.drain_s:g}"),
        *(("--log-level", options.log_level) if options.log_level else ()),
        *(tls_flags.flags("worker", options.tls) if options.tls is not None else ()),
    )
    return Process(entry.name, "services.worker", arguments, options.host, port, tls=options.tls)


async def follow(options: FollowOptions, view: View) -> int:
    """Runs the workers until a signal arrives; a second one kills those that still stop. Returns the exit code."""
    stop = stop_on_signals()
    health = Health(BudgetPool("health_watches", MAX_WATCHES, "--health-listen"))
    health.set("", False)
    server = await _health_server(options.health_listen, health) if options.health_listen else None
    engines = EngineWorkers(
        EngineFile(options.engines),
        lambda entry, port: worker_process(options, entry, port),
        view,
        WorkerPorts(options.base_port),
        options.drain_s + KILL_AFTER_DRAIN_S,
        lambda: health.set("", True),
    )
    view.report(f"following {options.engines}; the workers register with {options.routers}")
    following = asyncio.create_task(engines.run(), name="engines")
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        return 0
    finally:
        stopping.cancel()
        health.close()
        stop.clear()
        following.cancel()
        view.report("stopping")
        second_signal = asyncio.create_task(stop.wait())
        await asyncio.wait({following, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            engines.kill()
            await asyncio.wait({following})
        second_signal.cancel()
        if server is not None:
            await server.stop(0)


async def _health_server(listen: str, health: Health) -> grpc.aio.Server:
    from grpc_health.v1 import health_pb2_grpc

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        server.add_insecure_port(listen)
    except RuntimeError as error:
        raise BadFlag(f"--health-listen {listen} cannot be used; choose another port.") from error
    await server.start()
    return server


def run(options: FollowOptions, view: View) -> int:
    """Checks the flags, then follows the list; returns the exit code."""
    check(options)
    view.open()
    view.settle()
    try:
        return asyncio.run(follow(options, view))
    finally:
        view.close()


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    app.command("follow")(follow_engines)


@with_flags(FollowOptions)
def follow_engines(**flags: Any) -> None:
    """Run a worker for each server of a list, beside routers that run elsewhere; Ctrl-C stops the workers.

    The list is followed while it changes, as by `sluice up --engines`. Set other settings of the workers through
    environment variables, such as SLUICE_WORKER_LOG_FORMAT=json.
    """
    raise typer.Exit(run(made(FollowOptions, flags), View((), Console(stderr=True, highlight=False))))
