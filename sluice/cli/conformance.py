"""`sluice conformance`: whether a worker keeps its contract, rule by rule."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.common.errors import ErrorKind, SluiceError
from services.common.settings import TlsSettings
from services.common.tls import channel_credentials
from services.worker import conformance
from services.worker.conformance import Patience, Report, Result, Rule, Target, Verdict, Watcher, junit
from sluice.cli.plan import BadFlag

Stop = Callable[[], Awaitable[None]]
KEPT, BROKEN = 0, 1
STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CLAIMED: "dim",
    Verdict.NOT_CHECKED: "yellow",
}


@dataclass(frozen=True)
class Options:
    """What to test and how; as the flags of the same names."""

    address: str
    junit: Path | None = None
    rules: Sequence[str] = ()
    patience: float = 1.0
    router_listen: str = ""
    prefill_peer: str = ""
    stop_command: str = ""
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


def list_rules(console: Console) -> None:
    """Prints every rule."""
    table = Table("rule", "what it proves", "where the contract says so")
    for rule in conformance.select():
        table.add_row(rule.name, escape(rule.proves), escape(rule.clause))
    console.print(table)


def markdown() -> str:
    """Every rule as a table for the documentation."""
    rows = [f"| `{rule.name}` | {rule.proves} | {rule.clause} |" for rule in conformance.select()]
    return "\n".join(["| rule | what it proves | clause |", "| --- | --- | --- |", *rows, ""])


def run(options: Options, console: Console) -> int:
    """Tests and prints; the exit code: 0 when no rule was broken, 1 when one was.

    Raises:
        BadFlag: the worker cannot be asked, or a flag does not fit.
    """
    if ":" not in options.address:
        raise BadFlag(f"{options.address} is no host:port of a worker's gRPC server")
    if not options.patience > 0:
        raise BadFlag("--patience must be above 0")
    chosen, stop = _chosen(options.rules), _stopper(options.stop_command)
    try:
        with _quiet_services():
            report = asyncio.run(_run(options, chosen, stop, console))
    except SluiceError as error:
        raise BadFlag(f"{options.address}: {error.message}") from error
    console.print(_table(report))
    console.print(_summary(report), style=STYLES[Verdict.FAILED if report.failed else Verdict.PASSED])
    if options.junit is not None:
        _write(report, options.junit)
    return BROKEN if report.failed else KEPT


@contextmanager
def _quiet_services() -> Iterator[None]:
    """What a rule finds is in the table; the log of the kit's own router is not for its readers."""
    services = logging.getLogger("services")
    level = services.level
    services.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        services.setLevel(level)


def _chosen(names: Sequence[str]) -> Sequence[Rule]:
    try:
        return conformance.select(names)
    except SluiceError as error:
        raise BadFlag(error.message) from error


async def _run(options: Options, chosen: Sequence[Rule], stop: Stop | None, console: Console) -> Report:
    async with AsyncExitStack() as opened:
        watcher = None
        if options.router_listen:
            watcher = Watcher(options.router_listen)
            await watcher.start()
            opened.push_async_callback(watcher.close)
        target = Target(
            options.address,
            _credentials(options),
            watcher,
            prefill_peer=options.prefill_peer,
            stop=stop,
        )
        status = opened.enter_context(console.status("asking the worker"))
        names = iter([*(rule.name for rule in chosen[1:]), "the end"])

        def show(result: Result) -> None:
            status.update(next(names))

        return await conformance.run(target, chosen, Patience().times(options.patience), show)


def _credentials(options: Options) -> grpc.ChannelCredentials | None:
    return channel_credentials(TlsSettings(tls_ca=options.tls_ca, tls_cert=options.tls_cert, tls_key=options.tls_key))


def _stopper(command: str) -> Stop | None:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadFlag(f"--stop-command cannot be read: {error}") from error
    if not words:
        return None

    async def stop() -> None:
        try:
            child = await asyncio.create_subprocess_exec(*words)
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION, f"The stop command cannot be run: {error.strerror}."
            ) from error
        if await child.wait() != 0:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"The stop command ended with {child.returncode}.")

    return stop


def _table(report: Report) -> Table:
    table = Table("rule", "what it proves", "", "seconds", "what was seen", title=f"{report.address}  {report.worker}")
    table.columns[3].justify = "right"
    for result in report.results:
        style = STYLES[result.verdict]
        table.add_row(
            result.rule.name,
            escape(result.rule.proves),
            f"[{style}]{result.verdict}[/]",
            f"{result.seconds:.2f}",
            escape(result.seen),
            style="red" if result.verdict is Verdict.FAILED else "",
        )
    return table


def _summary(report: Report) -> str:
    counts = ", ".join(f"{len(report.with_verdict(verdict))} {verdict}" for verdict in Verdict)
    broken = f" Not kept: {', '.join(report.failed)}." if report.failed else ""
    return f"{len(report.results)} rules: {counts}.{broken}"


def _write(report: Report, path: Path) -> None:
    try:
        junit.write(report, path)
    except OSError as error:
        raise BadFlag(f"--junit {path} cannot be written: {error.strerror}") from error
