"""Counts what one request of each kind costs: calls of Python functions, tasks, messages, Redis commands.

Times swing by more than a change is worth; counts do not. A suite with one worker over a Redis of its own serves one
request at a time, and what each process does in that window is counted (`counting/sitecustomize.py`). A window also has
what runs now and then, such as renewals, at another moment each time: a figure is the least over the tries. On a busy
machine windows last so long that all of them have some of it: what a window without a request has is counted too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
import redis
import typer
from count_kinds import KINDS, MODEL, PARSERS, Endpoints, endpoints_of, prompts
from processes import checkout, own_suite, suite_of
from rich.console import Console
from rich.table import Table

from services.common.net.ports import free_port
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_name("counts.json")
SERVICES = ("gateway", "preprocess", "router", "worker", "postprocess")
MARGIN, MORE = 0.02, 75
"""How far above a ceiling, as a part of it and as a number, a count may be without a new ceiling: a message more, which
depends on how fast the machine is, costs the gateway 60 calls."""
MARGIN_OF_MANY = 0.15
"""The same part for the kinds of 128 tokens, which come in more or fewer messages."""
UNBOUNDED = ("blocks", "bytes sent", "bytes received")
"""Counts without a ceiling: memory that awaits a collection, and what follows from the messages' content."""
QUIET_AFTER_S = 0.15
"""After an answer: reports to the router and KV events are sent within 20 ms."""
WITHOUT_REQUEST = "no request"
"""The kind of the windows without one, each as long as the longest of its turn."""
WARM_UPS = 3
_DONE_WITHIN_S = 30.0
_FLAGS = ("--model-name", MODEL)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Counted:
    """The least counts of a kind over its tries, with the owners and functions of each service's least calls."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    owners: dict[str, dict[str, int]] = field(default_factory=dict)
    functions: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, service: str, window: Mapping[str, Any]) -> None:
        """Takes what a service did in one try."""
        counts = window["counts"]
        known = self.counts.setdefault(service, dict(counts))
        if service not in self.owners or counts.get("calls", 0) < known.get("calls", 0):
            self.owners[service], self.functions[service] = window.get("owners", {}), window.get("functions", {})
        for name, count in counts.items():
            known[name] = min(known[name], count)

    def total(self, name: str) -> int:
        """Returns the sum of a count over all services."""
        return sum(counts.get(name, 0) for counts in self.counts.values())


class Windows:
    """Opens and closes the windows of a suite's processes.

    Args:
        processes: a suite's processes by name.
        folder: where they write.
        store: the suite's Redis.
    """

    def __init__(self, processes: Mapping[str, psutil.Process], folder: Path, store: redis.Redis) -> None:
        self._processes = processes
        self._folder = folder
        self._store = store

    def open(self) -> dict[str, int]:
        """Opens all; returns what Redis has counted so far."""
        for process in self._processes.values():
            (self._folder / f"{process.pid}.json").unlink(missing_ok=True)
            process.send_signal(signal.SIGUSR1)
        self._wait(".open")
        return self._redis()

    def close(self, before: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Closes all; returns what each service counted."""
        stored = {"counts": {name: count - before[name] for name, count in self._redis().items()}}
        for process in self._processes.values():
            process.send_signal(signal.SIGUSR2)
        self._wait(".json")
        windows = {"redis": stored}
        for name, process in self._processes.items():
            windows[name.partition("-")[0]] = json.loads((self._folder / f"{process.pid}.json").read_text())
        return windows

    def _wait(self, suffix: str) -> None:
        files = [self._folder / f"{process.pid}{suffix}" for process in self._processes.values()]
        wait_until(lambda: all(file.exists() for file in files), _DONE_WITHIN_S)

    def _redis(self) -> dict[str, int]:
        stats: dict[str, Any] = self._store.info("commandstats")
        return {"commands": sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")}


@contextmanager
def counted_suite(tree: Path | None = None) -> Iterator[tuple[Endpoints, Windows]]:
    """Runs a suite whose processes count, of another checkout if `tree` is one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = RedisServer(folder)
        server.start()
        path = [str(Path(__file__).with_name("counting")), str(tree or ROOT)]
        picker = f"127.0.0.1:{free_port()}"
        settings = {**PARSERS, "SLUICE_ROUTER_PICKER_LISTEN": picker}
        added = {**settings, "COUNTED": str(folder), "PYTHONPATH": os.pathsep.join(path)}
        try:
            with own_suite(1, 1000.0, (*_FLAGS, "--redis", server.url), tree, added) as url:
                address = urlsplit(url)
                processes = suite_of(address.port or 80)
                unready = [name for name, process in processes.items() if not (folder / str(process.pid)).exists()]
                if unready:
                    raise RuntimeError(f"these processes do not count: {', '.join(unready)}")
                command = processes["router"].cmdline()
                router = command[command.index("--listen") + 1]
                with redis.Redis.from_url(server.url) as store:
                    yield endpoints_of(address.netloc, router, picker), Windows(processes, folder, store)
        finally:
            server.stop()


def count_kinds(
    names: Sequence[str],
    tries: int,
    tree: Path | None = None,
    enough: Callable[[Mapping[str, Counted]], bool] = lambda counted: False,
) -> dict[str, Counted]:
    """Returns the least counts of each kind over `tries` requests, and of `WITHOUT_REQUEST`, in turns over the kinds.

    Args:
        enough: called after each turn with each kind alone; whether it needs no further try for now.
    """
    texts, moments = prompts(), random.Random(1)
    counted = {name: Counted() for name in (*names, WITHOUT_REQUEST)}
    with counted_suite(tree) as (endpoints, windows):
        for name in names:
            for _ in range(WARM_UPS):
                KINDS[name](endpoints, next(texts))
        remaining = list(names)
        for _ in range(tries):
            longest_s = 0.0
            for name in (*remaining, WITHOUT_REQUEST):
                time.sleep(moments.random() / 4)
                before, opened = windows.open(), time.monotonic()
                if name == WITHOUT_REQUEST:
                    time.sleep(longest_s)
                else:
                    KINDS[name](endpoints, next(texts))
                    time.sleep(QUIET_AFTER_S)
                longest_s = max(longest_s, time.monotonic() - opened)
                for service, window in windows.close(before).items():
                    counted[name].add(service, window)
            periodic = counted[WITHOUT_REQUEST]
            remaining = [name for name in names if not enough({name: counted[name], WITHOUT_REQUEST: periodic})]
            if not remaining:
                break
    return counted


def ceilings() -> dict[str, dict[str, dict[str, int]]]:
    """Returns the ceilings by kind, service and count."""
    kept: dict[str, dict[str, dict[str, int]]] = json.loads(CEILINGS.read_text())
    return kept


def above_ceilings(counted: Mapping[str, Counted]) -> list[str]:
    """Returns a sentence for each count above its ceiling and what a window without a request has, or without one."""
    kept, sentences = ceilings(), []
    periodic = counted.get(WITHOUT_REQUEST, Counted()).counts
    for kind, found in counted.items():
        if kind == WITHOUT_REQUEST:
            continue
        margin = MARGIN_OF_MANY if "128" in kind else MARGIN
        for service, counts in found.counts.items():
            for name, count in counts.items():
                if name in UNBOUNDED:
                    continue
                limit = kept.get(kind, {}).get(service, {}).get(name)
                if limit is None:
                    sentences.append(f"{kind}: {name} of {service}: {count:,}, no ceiling in counts.json")
                elif count > limit * (1 + margin) + MORE + periodic.get(service, {}).get(name, 0):
                    sentences.append(f"{kind}: {name} of {service}: {count:,} instead of {limit:,}")
    return sentences


@app.command()
def count(
    kind: Annotated[list[str] | None, typer.Option(help="only kinds whose name begins so; may be repeated")] = None,
    tries: Annotated[int, typer.Option(min=1, help="requests of each kind; the least counts")] = 8,
    owners: Annotated[int, typer.Option(min=0, help="modules to show of each service, those with most calls")] = 10,
    functions: Annotated[bool, typer.Option(help="show functions instead of modules")] = False,
    base: Annotated[str, typer.Option(metavar="REV", help="also count a commit, and show the difference")] = "",
    write: Annotated[bool, typer.Option("--write", help="keep what was counted as the ceilings")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of tables")] = False,
) -> None:
    """Count what one request of each kind costs in every service."""
    names = [name for name in KINDS if not kind or name.startswith(tuple(kind))]
    if not names:
        raise typer.BadParameter(f"no kind begins so; the kinds are: {'; '.join(KINDS)}", param_hint="--kind")
    counted = count_kinds(names, tries)
    earlier = {}
    if base:
        with checkout(base) as tree:
            earlier = count_kinds(names, tries, tree)
    if write:
        kept = {
            **(ceilings() if CEILINGS.exists() else {}),
            **{name: _bounded(found) for name, found in counted.items()},
        }
        CEILINGS.write_text(json.dumps({name: kept[name] for name in KINDS if name in kept}, indent=1) + "\n")
    if as_json:
        json.dump({name: found.counts for name, found in counted.items()}, sys.stdout, indent=1)
        return
    console = Console(width=160)  # all columns, in a file too
    for name, found in counted.items():
        console.print(_table(name, found, earlier.get(name)))
        for service in SERVICES if owners else ():
            by_owner = (found.functions if functions else found.owners)[service]
            console.print(f"{service}:", _heaviest(by_owner, owners), highlight=False, soft_wrap=True)
    for sentence in above_ceilings(counted) if CEILINGS.exists() else ():
        console.print(f"above the ceiling: {sentence}")


def _bounded(found: Counted) -> dict[str, dict[str, int]]:
    return {
        service: {name: count for name, count in counts.items() if name not in UNBOUNDED}
        for service, counts in found.counts.items()
    }


def _table(kind: str, found: Counted, earlier: Counted | None) -> Table:
    columns = [*found.counts["gateway"], "commands"]
    table = Table(title=kind, title_justify="left")
    table.add_column("service")
    for column in columns:
        table.add_column(column, justify="right")
    for service in (*SERVICES, "redis"):
        counts, before = found.counts[service], earlier.counts[service] if earlier else {}
        table.add_row(service, *(_cell(counts.get(column), before.get(column)) for column in columns))
    sums = [_cell(found.total(column), earlier.total(column) if earlier else None) for column in columns]
    table.add_row("all", *sums)
    return table


def _cell(count: int | None, before: int | None) -> str:
    if count is None:
        return ""
    return f"{count:,}" if before is None else f"{count:,} ({count - before:+,})"


def _heaviest(owners: Mapping[str, int], most: int) -> str:
    ordered = sorted(owners.items(), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {calls:,}" for name, calls in ordered)


if __name__ == "__main__":
    app()
