"""Supervises the suite: all processes come up together, run together and end together."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from services.common.net import ports
from services.common.net.addresses import join
from sluice.cli.up.plan import Process
from sluice.cli.up.process import Child, exit_words
from sluice.cli.up.progress import View
from sluice.cli.up.ready import ASK_EVERY_S, STARTING, Probe, reachable
from sluice.cli.up.restarts import Restarts
from sluice.cli.up.tls import authority_of

KEYS_FILE, KEYS_FLAG = "SLUICE_GATEWAY_API_KEYS_FILE", "--api-keys-file"
KILL_AFTER_S = 4.0
_GONE_WITHIN_S = 1.0


def taken(processes: Sequence[Process]) -> str:
    """A sentence about every port that cannot be used; empty when all can."""
    found = [
        f"{process.name} cannot listen on {process.address}: {problem}"
        for process in processes
        if (problem := ports.problem(process.host, process.port))
    ]
    if not found:
        return ""
    advice = ""
    if any(ports.TAKEN in one for one in found):
        advice = ' --port and --base-grpc-port choose others (with make: make run ARGS="--port 8080").'
    return f"{'; '.join(found)}.{advice}"


def invitation(gateway: Process, model: str) -> str:
    """What to print when the suite serves: the address, and a command to paste."""
    url = f"{'http' if gateway.tls is None else 'https'}://{join(reachable(gateway.host), gateway.port)}"
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Tell me about rivers."}]}
    trust = [] if gateway.tls is None else ["--cacert", str(authority_of(gateway.tls))]
    command = ["curl", "-N", *trust, f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    key = ' -H "Authorization: Bearer $SLUICE_API_KEY"' if _wants_keys(gateway) else ""
    return f"ready {url}\n{shlex.join(command)}{key} {shlex.join(['-d', json.dumps(body)])}"


def _wants_keys(gateway: Process) -> bool:
    """Whether clients of this gateway must send an API key."""
    return bool({**os.environ, **gateway.env}.get(KEYS_FILE)) or KEYS_FLAG in gateway.arguments


async def supervise(
    processes: Sequence[Process], view: View, on_ready: Callable[[], None], restarts: Restarts | None = None
) -> int:
    """Runs the processes until a signal comes or one of them ends for good.

    Args:
        processes: what to run, in the order of starting.
        view: shows progress and log lines.
        on_ready: called once, when every process is ready.
        restarts: of processes that end after that; None: the first one that ends is the end.

    Returns:
        The exit code: 0 after a signal, 1 when a process ended by itself.
    """
    stop = _stop_on_signals()
    children = [Child(process, _line_of(view, process)) for process in processes]
    running: dict[asyncio.Task[int], Child] = {}
    coming_up: asyncio.Task[None] | None = None
    stopping = asyncio.create_task(stop.wait())
    try:
        for child in children:
            running[await child.start()] = child
        coming_up = asyncio.create_task(_all_ready(children, view))
        await asyncio.wait({coming_up, stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
        if coming_up.done() and not stop.is_set():
            coming_up.result()
            on_ready()
            while not stop.is_set():
                await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set() or not await _started_again(running, restarts, view):
                    break
        return _verdict(stop, running, view)
    finally:
        if coming_up is not None:
            coming_up.cancel()
        stopping.cancel()
        stop.clear()  # from here on a signal means: at once
        await _stop_all(running, stop, view)


async def _started_again(running: dict[asyncio.Task[int], Child], restarts: Restarts | None, view: View) -> bool:
    """Whether every process that has ended is started again."""
    for task, child in [(task, child) for task, child in running.items() if task.done()]:
        name = child.process.name
        if restarts is None or not restarts.allow(name):
            return False
        view.say(f"{name} {exit_words(task.result())}; starting it again", "bold yellow")
        del running[task]
        running[await child.start()] = child
    return True


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    return stop


def _line_of(view: View, process: Process) -> Callable[[str], None]:
    return lambda line: view.log(process.name, line)


def _verdict(stop: asyncio.Event, running: dict[asyncio.Task[int], Child], view: View) -> int:
    if stop.is_set():
        view.settle()
        view.say("stopping")
        return 0
    view.settle()
    for task, child in running.items():
        if task.done():
            view.say(f"{child.process.name} {exit_words(task.result())}; stopping the others", "bold red")
    return 1


async def _all_ready(children: Sequence[Child], view: View) -> None:
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(_ready(child, view))


async def _ready(child: Child, view: View) -> None:
    probe = Probe(child.process, child.pid)
    try:
        while reason := await probe.ask():
            view.wait(child.process.name, child.complaint or reason if reason != STARTING else child.complaint)
            await asyncio.sleep(ASK_EVERY_S)
        view.ready(child.process.name)
    finally:
        await probe.close()


async def _stop_all(running: dict[asyncio.Task[int], Child], hurry: asyncio.Event, view: View) -> None:
    """SIGTERM to all, SIGKILL to those that take too long or when a second signal comes."""
    for child in running.values():
        child.terminate()
    hurried = asyncio.create_task(hurry.wait())
    gone = asyncio.create_task(_all_gone(running))
    await asyncio.wait([gone, hurried], timeout=KILL_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    for task, child in running.items():
        if not task.done():
            view.say(f"{child.process.name} does not stop; killing it", "bold red")
            child.kill()
    await asyncio.wait({gone}, timeout=_GONE_WITHIN_S)


async def _all_gone(running: dict[asyncio.Task[int], Child]) -> bool:
    await asyncio.gather(*running, return_exceptions=True)
    return True


def run(processes: Sequence[Process], view: View, model: str, restart: bool = False) -> int:
    """Checks the ports, then supervises; returns the exit code."""
    if problem := taken(processes):
        print(f"sluice up: {problem}", file=sys.stderr)
        return 1

    def on_ready() -> None:
        try:
            print(invitation(processes[-1], model), flush=True)
        except OSError:
            view.say("standard output is closed")

    view.open()
    try:
        return asyncio.run(supervise(processes, view, on_ready, Restarts() if restart else None))
    finally:
        view.settle()
        view.close()
