"""`sluice conformance`: tests a worker against its contract, rule by rule."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from services.common.base.errors import ErrorKind, SluiceError
from sluice import conformance
from sluice.cli.errors import BadFlag
from sluice.cli.trust import Trust
from sluice.conformance import Patience, Report, Result, Rule, Target, Verdict, Watcher, junit

Stop = Callable[[], Awaitable[None]]
PASSED, VIOLATED = 0, 1
NARROW = 120
QUIET = (Verdict.PASSED, Verdict.NOT_CLAIMED)
STYLES = {
    Verdict.PASSED: "green",
    Verdict.FAILED: "bold red",
    Verdict.NOT_CLAIMED: "dim",
    Verdict.NOT_CHECKED: "yellow",
}


@dataclass(frozen=True)
class Options:
    """Holds the flags of the same names."""

    address: str
    junit: Path | None = None
    rules: Sequence[str] = ()
    patience: float = 1.0
    router_listen: str = ""
    prefill_peer: str = ""
    stop_command: str = ""
    trust: Trust = field(default_factory=Trust)
    as_json: bool = False


def list_rules(console: Console, as_json: bool = False) -> None:
    """Prints every rule, as a table or as JSON."""
    rules = conformance.select()
    if as_json:
        print(json.dumps([_of_rule(rule) for rule in rules]))
        return
    table = Table(Column("rule", no_wrap=True), "what it proves", box=None, pad_edge=False, header_style="dim")
    wide = console.width >= NARROW
    if wide:
        table.add_column("clause of the contract")
    for rule in rules:
        table.add_row(rule.name, *map(escape, (rule.proves, rule.clause) if wide else (rule.proves,)))
    console.print(table)


def markdown() -> str:
    """Returns every rule as a Markdown table for the documentation."""
    rows = [f"| `{rule.name}` | {rule.proves} | {rule.clause} |" for rule in conformance.select()]
    return "\n".join(["| rule | what it proves | clause |", "| --- | --- | --- |", *rows, ""])


def run(options: Options, console: Console) -> int:
    """Tests and prints; returns exit code 0 if no rule was violated, else 1.

    Raises:
        BadFlag: the worker cannot be tested, or a flag is invalid.
    """
    if ":" not in options.address:
        raise BadFlag(f"{options.address} is not a host:port of a worker's gRPC server")
    if not options.patience > 0:
        raise BadFlag("--patience must be above 0")
    chosen, stop = _chosen(options.rules), _stopper(options.stop_command)
    try:
        with _quiet_services():
            report = asyncio.run(_run(options, chosen, stop, console))
    except SluiceError as error:
        raise BadFlag(f"{options.address}: {error.message}") from error
    if options.as_json:
        print(json.dumps(_document(report)))
    else:
        console.print(_table(report, console.width))
        console.print(_summary(report), style=STYLES[Verdict.FAILED if report.failed else Verdict.PASSED])
    if options.junit is not None:
        _write(report, options.junit)
    return VIOLATED if report.failed else PASSED


@contextmanager
def _quiet_services() -> Iterator[None]:
    """Suppresses the log of the kit's own router; the findings of the rules are in the table."""
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
            options.trust.credentials(),
            watcher,
            prefill_peer=options.prefill_peer,
            stop=stop,
        )
        progress = Console(stderr=True, highlight=False)  # standard output is for the results
        status = opened.enter_context(progress.status("connecting to the worker"))
        names = iter([*(rule.name for rule in chosen[1:]), "the end"])

        def show(result: Result) -> None:
            status.update(next(names))

        return await conformance.run(target, chosen, Patience().times(options.patience), show)


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
                ErrorKind.FAILED_PRECONDITION, f"--stop-command cannot be run: {error.strerror}."
            ) from error
        if await child.wait() != 0:
            raise SluiceError(ErrorKind.FAILED_PRECONDITION, f"--stop-command exited with code {child.returncode}.")

    return stop


def _table(report: Report, width: int) -> Table:
    """Returns a table with one line per rule; in a narrow terminal, only failures use more than one."""
    table = Table(box=None, pad_edge=False, header_style="dim", title=f"{report.address}  {report.worker}")
    wide = width >= NARROW
    for title in ("rule", *(("what it proves",) if wide else ()), "verdict", "seconds", "observed"):
        table.add_column(title, no_wrap=title in ("rule", "verdict"), justify="right" if title == "seconds" else "left")
    for result in report.results:
        style = STYLES[result.verdict]
        observed = Text(result.seen, overflow="ellipsis", no_wrap=not wide and result.verdict in QUIET)
        table.add_row(
            result.rule.name,
            *((escape(result.rule.proves),) if wide else ()),
            f"[{style}]{result.verdict}[/]",
            f"{result.seconds:.2f}",
            observed,
            style="red" if result.verdict is Verdict.FAILED else "",
        )
    return table


def _of_rule(rule: Rule) -> dict[str, str]:
    return {"rule": rule.name, "proves": rule.proves, "clause": rule.clause}


def _document(report: Report) -> dict[str, Any]:
    """Returns the report as JSON fields."""
    rules = [
        {**_of_rule(result.rule), "verdict": str(result.verdict), "seconds": result.seconds, "seen": result.seen}
        for result in report.results
    ]
    return {"address": report.address, "worker": report.worker, "failed": report.failed, "rules": rules}


def _summary(report: Report) -> str:
    counts = ", ".join(f"{len(report.with_verdict(verdict))} {verdict}" for verdict in Verdict)
    violated = f" Not kept: {', '.join(report.failed)}." if report.failed else ""
    return f"{len(report.results)} rules: {counts}.{violated}"


def _write(report: Report, path: Path) -> None:
    try:
        junit.write(report, path)
    except OSError as error:
        raise BadFlag(f"--junit {path} cannot be written: {error.strerror}") from error
