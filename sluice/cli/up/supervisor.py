"""Supervises the processes of a suite: starts, restarts and stops them together."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from services.common.net import ports
from services.common.net.addresses import join
from sluice.cli.up.engine_list import FollowedEngines
from sluice.cli.up.plan import Process
from sluice.cli.up.process import Child, exit_words
from sluice.cli.up.progress import View
from sluice.cli.up.ready import PROBE_EVERY_S, STARTING, Probe, reachable
from sluice.cli.up.tls import authority_of

KEYS_FILE, KEYS_FLAG = "SLUICE_GATEWAY_API_KEYS_FILE", "--api-keys-file"
KILL_AFTER_S = 4.0
_END_TIMEOUT_S = 1.0
MAX_RESTARTS = 3
"""Restarts of one process of `sluice up` within a minute; then the suite stops."""
RESTART_WINDOW_S = 60.0


class Restarts:
    """Limits how often each process is restarted.

    Args:
        most: restarts of one process within `within_s` seconds; 0 allows none.
        clock: returns seconds; replaced in tests.
    """

    def __init__(
        self,
        most: int = MAX_RESTARTS,
        within_s: float = RESTART_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._within_s = within_s
        self._clock = clock
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)

    def allow(self, name: str) -> bool:
        """Whether the process may be restarted now; if so, counts the restart."""
        times, now = self._restarts[name], self._clock()
        while times and now - times[0] > self._within_s:
            times.popleft()
        if len(times) >= self._most:
            return False
        times.append(now)
        return True


def taken(processes: Sequence[Process]) -> str:
    """Returns a message about the ports that cannot be used; empty if all can."""
    found = [
        f"{process.name} cannot listen on {process.address}: {problem}"
        for process in processes
        if (problem := ports.problem(process.host, process.port))
    ]
    if not found:
        return ""
    advice = ""
    if any(ports.TAKEN in one for one in found):
        advice = ' Choose others with --port and --base-grpc-port (with make: make run ARGS="--port 8080").'
    return f"{'; '.join(found)}.{advice}"


def invitation(gateway: Process, model: str) -> str:
    """Returns what to print when the suite serves: its address and an example command.

    Args:
        model: name of the model; empty: not known yet.
    """
    url = f"{'http' if gateway.tls is None else 'https'}://{join(reachable(gateway.host), gateway.port)}"
    trust = [] if gateway.tls is None else ["--cacert", str(authority_of(gateway.tls))]
    key = ' -H "Authorization: Bearer $SLUICE_API_KEY"' if _requires_keys(gateway) else ""
    if not model:
        return f"ready {url}\n{shlex.join(['curl', *trust, f'{url}/v1/models'])}{key}"
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Tell me about rivers."}]}
    command = ["curl", "-N", *trust, f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    return f"ready {url}\n{shlex.join(command)}{key} {shlex.join(['-d', json.dumps(body)])}"


def _requires_keys(gateway: Process) -> bool:
    """Whether clients of this gateway must send an API key."""
    return bool({**os.environ, **gateway.env}.get(KEYS_FILE)) or KEYS_FLAG in gateway.arguments


async def supervise(
    processes: Sequence[Process],
    view: View,
    on_ready: Callable[[], None],
    restarts: Restarts | None = None,
    engines: FollowedEngines | None = None,
) -> int:
    """Runs the processes until a signal arrives or one of them ends for good.

    Args:
        processes: the processes, in start order.
        view: shows progress and log lines.
        on_ready: called once all processes are ready.
        restarts: limits restarts after that point; None: the first process that ends stops all.
        engines: workers of running servers, which start and stop with the suite.

    Returns:
        The exit code: 0 after a signal, 1 after an unexpected exit.
    """
    stop = stop_on_signals()
    children = [Child(process, _line_of(view, process)) for process in processes]
    running: dict[asyncio.Task[int], Child] = {}
    becoming_ready: asyncio.Task[None] | None = None
    following = None if engines is None else asyncio.create_task(engines.run(), name="engines")
    stopping = asyncio.create_task(stop.wait())
    try:
        for child in children:
            running[await child.start()] = child
        becoming_ready = asyncio.create_task(_all_ready(children, view))
        await asyncio.wait({becoming_ready, stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
        if becoming_ready.done() and not stop.is_set():
            becoming_ready.result()
            on_ready()
            while not stop.is_set():
                await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set() or not await _restart_ended(running, restarts, view):
                    break
        return _exit_code(stop, running, view)
    finally:
        if becoming_ready is not None:
            becoming_ready.cancel()
        stopping.cancel()
        stop.clear()  # from here on, a signal kills at once
        if following is not None:
            following.cancel()
        await _stop_all(running, stop, view)
        if following is not None:
            await asyncio.wait({following})


async def _restart_ended(running: dict[asyncio.Task[int], Child], restarts: Restarts | None, view: View) -> bool:
    """Restarts the processes that have ended; returns False if one may not be restarted."""
    for task, child in [(task, child) for task, child in running.items() if task.done()]:
        name = child.process.name
        if restarts is None or not restarts.allow(name):
            return False
        view.report(f"{name} {exit_words(task.result())}; restarting it", "bold yellow")
        del running[task]
        running[await child.start()] = child
    return True


def stop_on_signals() -> asyncio.Event:
    """Returns an event that SIGINT, SIGTERM and SIGHUP set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    return stop


def _line_of(view: View, process: Process) -> Callable[[str], None]:
    return lambda line: view.log(process.name, line)


def _exit_code(stop: asyncio.Event, running: dict[asyncio.Task[int], Child], view: View) -> int:
    if stop.is_set():
        view.settle()
        view.report("stopping")
        return 0
    view.settle()
    for task, child in running.items():
        if task.done():
            view.report(f"{child.process.name} {exit_words(task.result())}; stopping the others", "bold red")
    return 1


async def _all_ready(children: Sequence[Child], view: View) -> None:
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(_ready(child, view))


async def _ready(child: Child, view: View) -> None:
    probe = Probe(child.process, child.pid)
    try:
        while reason := await probe.check():
            view.wait(child.process.name, child.complaint or reason if reason != STARTING else child.complaint)
            await asyncio.sleep(PROBE_EVERY_S)
        view.ready(child.process.name)
    finally:
        await probe.close()


async def _stop_all(running: dict[asyncio.Task[int], Child], hurry: asyncio.Event, view: View) -> None:
    """Sends SIGTERM to all, then SIGKILL to those that take too long, or at once on a second signal."""
    for child in running.values():
        child.terminate()
    second_signal = asyncio.create_task(hurry.wait())
    ended = asyncio.create_task(_all_ended(running))
    await asyncio.wait([ended, second_signal], timeout=KILL_AFTER_S, return_when=asyncio.FIRST_COMPLETED)
    second_signal.cancel()
    for task, child in running.items():
        if not task.done():
            view.report(f"{child.process.name} did not stop in time; killing it", "bold red")
            child.kill()
    await asyncio.wait({ended}, timeout=_END_TIMEOUT_S)


async def _all_ended(running: dict[asyncio.Task[int], Child]) -> bool:
    await asyncio.gather(*running, return_exceptions=True)
    return True


def run(
    processes: Sequence[Process],
    view: View,
    model: str,
    restart: bool = False,
    engines: FollowedEngines | None = None,
) -> int:
    """Checks the ports, then supervises the processes; returns the exit code. Arguments as of `supervise`."""
    if problem := taken(processes):
        print(f"sluice up: {problem}", file=sys.stderr)
        return 1

    def on_ready() -> None:
        try:
            print(invitation(processes[-1], model), flush=True)
        except OSError:
            view.report("standard output is closed")

    view.open()
    try:
        return asyncio.run(supervise(processes, view, on_ready, Restarts() if restart else None, engines))
    finally:
        view.settle()
        view.close()
