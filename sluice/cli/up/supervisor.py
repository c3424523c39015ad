"""Supervises the processes of a suite: starts, restarts and stops them together."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from services.common.net import ports
from services.common.net.addresses import join
from sluice.cli.suites import RunningSuite, SuiteFile
from sluice.cli.up.engine_list import FollowedEngines
from sluice.cli.up.plan import Process
from sluice.cli.up.process import Child, exit_words
from sluice.cli.up.progress import View
from sluice.cli.up.ready import PROBE_EVERY_S, STARTING, Probe, reachable
from sluice.cli.up.restarts import Restarts
from sluice.cli.up.tls import authority_of

KEYS_FILE, KEYS_FLAG = "SLUICE_GATEWAY_API_KEYS_FILE", "--api-keys-file"
KILL_AFTER_S = 4.0
_END_TIMEOUT_S = 1.0


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
    url = url_of(gateway)
    trust = [] if gateway.tls is None else ["--cacert", str(authority_of(gateway.tls))]
    key = ' -H "Authorization: Bearer $SLUICE_API_KEY"' if _requires_keys(gateway) else ""
    if not model:
        return f"ready {url}\n{shlex.join(['curl', *trust, f'{url}/v1/models'])}{key}"
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Tell me about rivers."}]}
    command = ["curl", "-N", *trust, f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    return f"ready {url}\n{shlex.join(command)}{key} {shlex.join(['-d', json.dumps(body)])}"


def url_of(gateway: Process) -> str:
    """Returns the URL under which clients on this machine reach the gateway."""
    return f"{'http' if gateway.tls is None else 'https'}://{join(reachable(gateway.host), gateway.port)}"


def _requires_keys(gateway: Process) -> bool:
    """Whether clients of this gateway must send an API key."""
    return bool({**os.environ, **gateway.env}.get(KEYS_FILE)) or KEYS_FLAG in gateway.arguments


class Supervisor:
    """Runs the processes of a suite until a signal arrives or one of them ends for good.

    A child runs, or has ended and waits for its restart, or is being probed after one; `_running`, `_restarting` and
    `_probing` hold the tasks of these states, and only `run` moves a child between them.

    Args:
        processes: the processes, in start order.
        view: shows progress and log lines.
        restarts: limits restarts once all processes were ready; None: the first process that ends stops all.
        engines: workers of running servers, which start and stop with the suite.
        on_change: called with the process ids by name when all processes are ready, and after each restart.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        view: View,
        restarts: Restarts | None = None,
        engines: FollowedEngines | None = None,
        on_change: Callable[[Mapping[str, int]], None] = lambda pids: None,
    ) -> None:
        self._view, self._restarts, self._engines, self._on_change = view, restarts, engines, on_change
        self._children = [Child(process, _line_of(view, process)) for process in processes]
        self._running: dict[asyncio.Task[int], Child] = {}
        self._restarting: dict[asyncio.Task[asyncio.Task[int]], Child] = {}
        self._probing: set[asyncio.Task[None]] = set()
        self.cause = ""

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Runs until the end and stops every process; returns 0 after a signal, 1 after an unexpected exit.

        Then `cause` says why the suite ended; it is empty after a signal.

        Args:
            on_ready: called once all processes are ready.
        """
        stop = stop_on_signals()
        following = None if self._engines is None else asyncio.create_task(self._engines.run(), name="engines")
        stopping = asyncio.create_task(stop.wait())
        becoming_ready: asyncio.Task[None] | None = None
        try:
            for child in self._children:
                self._running[await child.start()] = child
            becoming_ready = asyncio.create_task(_all_ready(self._children, self._view))
            await asyncio.wait({becoming_ready, stopping, *self._running}, return_when=asyncio.FIRST_COMPLETED)
            if becoming_ready.done() and not stop.is_set():
                becoming_ready.result()
                on_ready()
                self._changed()
                await self._keep_running(stopping)
            return self._exit_code(stop)
        finally:
            if becoming_ready is not None:
                becoming_ready.cancel()
            stopping.cancel()
            stop.clear()  # from here on, a signal kills at once
            if following is not None:
                following.cancel()
            await self._cancel_restarts()
            await _stop_all(self._running, stop, self._view)
            if following is not None:
                await asyncio.wait({following})

    async def _keep_running(self, stopping: asyncio.Task[bool]) -> None:
        """Restarts processes that end, until a signal arrives or one may not be restarted."""
        while not stopping.done() and self._plan_restarts():
            await asyncio.wait({stopping, *self._running, *self._restarting}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self._restarting if task.done()]:
                child = self._restarting.pop(task)
                self._running[task.result()] = child
                probing = asyncio.create_task(_ready_again(child, self._view))
                self._probing.add(probing)
                probing.add_done_callback(self._probing.discard)
                self._changed()

    def _plan_restarts(self) -> bool:
        """Plans the restart of the processes that have ended; returns False if one may not be restarted."""
        for task, child in [(task, child) for task, child in self._running.items() if task.done()]:
            name = child.process.name
            pause_s = None if self._restarts is None else self._restarts.allow(name)
            if pause_s is None:
                return False
            when = f"restarting it in {pause_s:g} s" if pause_s else "restarting it"
            self._view.report(f"{name} {exit_words(task.result())}; {when}", "bold yellow")
            del self._running[task]
            self._restarting[asyncio.create_task(_start_after(pause_s, child))] = child
        return True

    async def _cancel_restarts(self) -> None:
        """Cancels restarts and probes; a process that was just started is stopped with the others."""
        for task in (*self._restarting, *self._probing):
            task.cancel()
        if tasks := {*self._restarting, *self._probing}:
            await asyncio.wait(tasks)
        for task, child in self._restarting.items():
            if not task.cancelled() and task.exception() is None:
                self._running[task.result()] = child

    def _exit_code(self, stop: asyncio.Event) -> int:
        self._view.settle()
        if stop.is_set():
            self._view.report("stopping")
            return 0
        for task, child in self._running.items():
            if task.done():
                how = f"{child.process.name} {exit_words(task.result())}"
                self._view.report(f"{how}; stopping the others", "bold red")
                self.cause = self.cause or (f"{how}: {child.cause}" if child.cause and task.result() >= 0 else how)
        return 1

    def _changed(self) -> None:
        self._on_change({child.process.name: child.pid for child in self._children})


async def _start_after(pause_s: float, child: Child) -> asyncio.Task[int]:
    await asyncio.sleep(pause_s)
    return await child.start()


def stop_on_signals() -> asyncio.Event:
    """Returns an event that SIGINT, SIGTERM and SIGHUP set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    return stop


def _line_of(view: View, process: Process) -> Callable[[str], None]:
    return lambda line: view.log(process.name, line)


async def _all_ready(children: Sequence[Child], view: View) -> None:
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(_ready(child, view))


async def _ready(child: Child, view: View) -> None:
    """Shows why a process is not ready until it is; the end of one that never is ends the suite."""
    probe = Probe(child.process, child.pid)
    try:
        while reason := await probe.check():
            view.wait(child.process.name, child.complaint or reason if reason != STARTING else child.complaint)
            await asyncio.sleep(PROBE_EVERY_S)
        view.ready(child.process.name)
    finally:
        await probe.close()


async def _ready_again(child: Child, view: View) -> None:
    """Reports when a restarted process serves, unless it ends before."""
    began, pid = time.monotonic(), child.pid
    probe = Probe(child.process, pid)
    try:
        while await probe.check():
            await asyncio.sleep(PROBE_EVERY_S)
            if not child.is_running or child.pid != pid:
                return
        view.report(f"{child.process.name} is ready again after {time.monotonic() - began:.1f} s")
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
    restart: bool = True,
    engines: FollowedEngines | None = None,
) -> int:
    """Checks the ports, then supervises the processes; returns the exit code.

    Args:
        model: name of the model; empty: not known yet.
        restart: whether processes that end are restarted.
        engines: as of `Supervisor`.
    """
    if problem := taken(processes):
        print(f"sluice up: {problem}", file=sys.stderr)
        return 1

    def on_ready() -> None:
        try:
            print(invitation(processes[-1], model), flush=True)
        except OSError:
            view.report("standard output is closed")

    file = SuiteFile()

    def record(pids: Mapping[str, int]) -> None:
        _record(file, processes, model, pids, view)

    supervisor = Supervisor(processes, view, Restarts() if restart else None, engines, record)
    view.open()
    try:
        code = asyncio.run(supervisor.run(on_ready))
        view.report(f"stopped: {supervisor.cause}" if supervisor.cause else "stopped", "bold red" if code else "bold")
        return code
    finally:
        file.remove()
        view.settle()
        view.close()


def _record(file: SuiteFile, processes: Sequence[Process], model: str, pids: Mapping[str, int], view: View) -> None:
    """Writes where the suite listens, for other commands."""
    gateway = processes[-1]
    listed = [{"name": process.name, "address": process.address, "pid": pids[process.name]} for process in processes]
    tls = "" if gateway.tls is None else str(gateway.tls.resolve())
    try:
        file.write(RunningSuite(os.getpid(), url_of(gateway), model, tls, listed))
    except OSError as error:
        view.report(f"{error}: other commands do not find this suite; pass them --gateway {url_of(gateway)}.", "yellow")
