"""The same faults for NVIDIA Dynamo and for Sluice: processes that are killed or stopped under streams.

    python benchmarks/foreign_faults.py --seconds 12 --page docs/fault-matrix.md

Each system has two frontends and three workers with mock engines at the pace of an engine, and may migrate a request
three times. While 16 chats run without a pause, half of them streamed, one process is killed and started again three
seconds later, or stopped for five. The client sends a request whose connection is cut once more, to the other frontend.
`--page` puts the table at the end of the page of the fault matrix, whose columns it has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer
from peer_processes import (
    dynamo_environment,
    dynamo_frontend,
    dynamo_mocker,
    install,
    namespace,
    stop,
    wait_until_served,
)
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the support of the tests starts the suite

from tests.support.faults.outcome import Answer, Observation, Reference, full_service
from tests.support.servers.loose_suite import LooseSuite
from tests.support.servers.redis_server import RedisServer

HERE = Path(__file__).resolve().parent
PORTS = (8110, 8111)
WORKERS = 3
MIGRATIONS = "3"
"""Of a request, as Sluice's default."""
AT_S, AWAY_S, STOPPED_S = 3.0, 3.0, 5.0
FAULTS = {"killed": signal.SIGKILL, "stopped for 5 s": signal.SIGSTOP}
PARTS = ("worker", "frontend")
HEAD = (
    *("system", "part", "fault", "requests", "failed", "tokens lost", "doubled", "asked again"),
    *("longest pause, s", "full service, s", "files left", "memory, MiB", "why"),
)
HEADING = "## The same faults for NVIDIA Dynamo"
QUIET_S = 3.0
"""After the last answer, before what is left is counted."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class System:
    """A system whose processes can be ended and started.

    Attributes:
        urls: of its frontends.
        prefix: command that runs a client where the system can be reached.
        victims: a process of each part.
        pid: returns the process id of a process.
        start: starts a process that has ended.
        names: of all processes.
    """

    urls: Sequence[str]
    prefix: Sequence[str]
    victims: Mapping[str, str]
    pid: Callable[[str], int]
    start: Callable[[str], None]
    names: Sequence[str]

    def held(self) -> dict[int, tuple[int, float]]:
        """Returns the open files and the memory in MiB of every process, by process id."""
        processes = [psutil.Process(self.pid(name)) for name in self.names]
        return {process.pid: (process.num_fds(), process.memory_info().rss / 2**20) for process in processes}


@contextmanager
def dynamo_system(python: Path, model: Path) -> Iterator[System]:
    """Runs Dynamo's frontends and mockers in a network namespace."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prefix = stack.enter_context(namespace())
        environment, planes = dynamo_environment(state)
        commands = {f"worker-{number}": dynamo_mocker(model, 1, 1.0) for number in range(WORKERS)}
        for number, port in enumerate(PORTS):
            commands[f"frontend-{number}"] = dynamo_frontend(port, "--migration-limit", MIGRATIONS)
        processes: dict[str, subprocess.Popen[bytes]] = {}
        log = state / "log"

        def start(name: str) -> None:
            if name in processes:
                processes[name].wait(STOPPED_S)
            with log.open("ab") as output:
                command = [*prefix, str(python), "-m", *commands[name], *planes]
                processes[name] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)

        def stop_all() -> None:
            for process in processes.values():
                stop(process)

        stack.callback(stop_all)
        for name in commands:
            start(name)
        for port in PORTS:
            wait_until_served(prefix, port, log)
        urls = [f"http://127.0.0.1:{port}" for port in PORTS]
        victims = {"worker": "worker-0", "frontend": "frontend-0"}
        yield System(urls, prefix, victims, lambda name: processes[name].pid, start, [*commands])


@contextmanager
def sluice_system(model: Path) -> Iterator[System]:
    """Runs Sluice's services: two gateways as frontends, two routers over a Redis."""
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        try:
            with LooseSuite(
                model,
                workers=WORKERS,
                gateways=2,
                preprocess=2,
                routers=2,
                worker_flags=(),
                flags_of=dict.fromkeys(("router", "router-1"), ("--redis-url", redis.url)),
            ) as suite:
                urls = [f"http://{suite.address(name)}" for name in suite.gateways]
                victims = {"worker": "worker-0", "frontend": "gateway"}
                yield System(urls, (), victims, suite.pid, suite.start, suite.names)
        finally:
            redis.stop()


def run_fault(system: System, part: str, how: signal.Signals, seconds: float) -> dict[str, Any]:
    """Runs the load while a process of a part is killed or stopped; returns what became of the requests."""
    command = [*system.prefix, sys.executable, str(HERE / "foreign_client.py"), "--seconds", str(seconds)]
    for url in system.urls:
        command += ["--url", url]
    before = system.held()
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    victim = system.victims[part]
    time.sleep(AT_S)
    injected = time.monotonic()
    os.kill(system.pid(victim), how)
    if how is signal.SIGSTOP:
        time.sleep(STOPPED_S)
        os.kill(system.pid(victim), signal.SIGCONT)
    else:
        time.sleep(AWAY_S)
        system.start(victim)
    output, _ = client.communicate(timeout=seconds + 180)
    seen: dict[str, Any] = json.loads(output)
    seen["full_service_s"] = full_service_of(seen.pop("ended"), injected)
    time.sleep(QUIET_S)
    after = system.held()
    seen["files_left"] = max(after[pid][0] - before[pid][0] for pid in after if pid in before)
    seen["memory_mib"] = max(after[pid][1] - before[pid][1] for pid in after if pid in before)
    return seen


def full_service_of(ended: Sequence[tuple[float, float, bool]], injected: float) -> float | None:
    """Returns the seconds from a fault until requests are served in normal time, as in the fault matrix."""
    undisturbed = [seconds for began, seconds, answered in ended if answered and began + seconds < injected]
    reference = Reference({}, {0: median(undisturbed)})
    answers = {True: Answer(()), False: None}
    seen = [Observation("chat", 0, began, began + seconds, answers[answered]) for began, seconds, answered in ended]
    return full_service(seen, injected, reference)


def row_of(name: str, part: str, fault: str, seen: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a row of the table."""
    counts = (f"{seen[key]:,}" for key in ("requests", "failed", "lost", "doubled", "retried"))
    full = "not reached" if seen["full_service_s"] is None else f"{seen['full_service_s']:.1f}"
    left = (f"{max(0, seen['files_left'])}", f"{seen['memory_mib']:.0f}")
    why = "; ".join(f"{count} × {' '.join(text.split())[:90]}" for text, count in seen["why"].items())
    return (name, part, fault, *counts, f"{seen['longest_pause_s']:.1f}", full, *left, why.replace("|", "/"))


def section(rows: Sequence[Sequence[str]], command: str) -> str:
    """Returns the rows as a section of the page in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    table = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    about = (
        "Dynamo 1.6.1's frontend and mocker beside Sluice's gateway and mock engine: two frontends, three workers, 16 "
        "chats of 100 tokens at a time, half of them streamed, at the pace of an engine; a request may be migrated "
        "three times. A killed process is started again after 3 s. The mocker's text is random, so tokens are counted "
        "by the usage. A client whose connection is cut asks the other frontend once; **files left** and **memory** "
        f"are of the process that has most. Command: `{command}`, on the machine above."
    )
    return f"{HEADING}\n\n{about}\n\n{table}\n"


@app.command()
def main(
    folder: Annotated[Path, typer.Option(help="where Dynamo is installed")] = HERE.parent / "build/peers",
    seconds: Annotated[float, typer.Option(min=8.0, help="time of the load of each fault")] = 12.0,
    runs: Annotated[int, typer.Option(min=1, help="of each fault")] = 1,
    page: Annotated[Path | None, typer.Option(help="page of the fault matrix, at whose end the table is put")] = None,
) -> None:
    """Kill and stop processes of Dynamo and of Sluice under the same load."""
    python, model = install(folder.resolve())
    systems = {"Dynamo": dynamo_system(python, model), "Sluice": sluice_system(model)}
    rows: list[tuple[str, ...]] = []
    for name, running in systems.items():
        with running as system:
            for part in PARTS:
                for fault, how in FAULTS.items():
                    for _ in range(runs):
                        seen = run_fault(system, part, how, seconds)
                        rows.append(row_of(name, part, fault, seen))
                        print(name, part, fault, seen, file=sys.stderr, flush=True)
                        time.sleep(AWAY_S)
    table = Table(*HEAD, title="16 chats of 100 tokens")
    for row in rows:
        table.add_row(*row)
    Console(width=200).print(table)
    if page is not None:
        kept = page.read_text().partition(f"\n{HEADING}\n")[0].rstrip()
        page.write_text(f"{kept}\n\n{section(rows, 'python benchmarks/foreign_faults.py')}")


if __name__ == "__main__":
    app()
