"""The same faults for NVIDIA Dynamo and for Sluice: processes that are killed or stopped under streams.

    python benchmarks/foreign_faults.py --seconds 12

Each system has two frontends and three workers with mock engines at the pace of an engine, and may migrate a request
three times. While 16 streams run without a pause, one process is killed and started again three seconds later, or
stopped for five. The client sends a request whose connection is cut once more, to the other frontend.
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
from typing import Annotated, Any

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
    """

    urls: Sequence[str]
    prefix: Sequence[str]
    victims: Mapping[str, str]
    pid: Callable[[str], int]
    start: Callable[[str], None]


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
        yield System(urls, prefix, victims, lambda name: processes[name].pid, start)


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
                yield System(urls, (), {"worker": "worker-0", "frontend": "gateway"}, suite.pid, suite.start)
        finally:
            redis.stop()


def run_fault(system: System, part: str, how: signal.Signals, seconds: float) -> dict[str, Any]:
    """Runs the load while a process of a part is killed or stopped; returns what became of the requests."""
    command = [*system.prefix, sys.executable, str(HERE / "foreign_client.py"), "--seconds", str(seconds)]
    for url in system.urls:
        command += ["--url", url]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    victim = system.victims[part]
    time.sleep(AT_S)
    os.kill(system.pid(victim), how)
    if how is signal.SIGSTOP:
        time.sleep(STOPPED_S)
        os.kill(system.pid(victim), signal.SIGCONT)
    else:
        time.sleep(AWAY_S)
        system.start(victim)
    output, _ = client.communicate(timeout=seconds + 180)
    seen: dict[str, Any] = json.loads(output)
    return seen


@app.command()
def main(
    folder: Annotated[Path, typer.Option(help="where Dynamo is installed")] = HERE.parent / "build/peers",
    seconds: Annotated[float, typer.Option(min=8.0, help="time of the load of each fault")] = 12.0,
    runs: Annotated[int, typer.Option(min=1, help="of each fault")] = 1,
) -> None:
    """Kill and stop processes of Dynamo and of Sluice under the same load."""
    python, model = install(folder.resolve())
    systems = {"Dynamo": dynamo_system(python, model), "Sluice": sluice_system(model)}
    table = Table(title="16 streams of 100 tokens")
    for column in ("system", "fault", "requests", "failed", "sent again", "other length", "longest pause s", "why"):
        table.add_column(column)
    for name, running in systems.items():
        with running as system:
            for part in PARTS:
                for fault, how in FAULTS.items():
                    for _ in range(runs):
                        seen = run_fault(system, part, how, seconds)
                        counts = [f"{seen[key]:,}" for key in ("requests", "failed", "retried", "other_length")]
                        why = "; ".join(f"{count} × {text[:90]}" for text, count in seen["why"].items())
                        table.add_row(name, f"{part} {fault}", *counts, f"{seen['longest_pause_s']:.1f}", why)
                        print(name, part, fault, seen, file=sys.stderr, flush=True)
                        time.sleep(AWAY_S)
    Console(width=180).print(table)


if __name__ == "__main__":
    app()
