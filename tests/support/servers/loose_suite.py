"""A suite of processes without a supervisor: tests kill some of them and start them again."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from services.common.net.ports import free_port

READY_S = 240
LOOPBACK = "127.0.0.1"


class LooseSuite:
    """Gateway, preprocess, router, and any number of postprocess replicas and workers, with a model of a test's own.

    Args:
        model: folder of the model, served as `tiny`.
        worker_flags: of every worker; by default a step takes as long as on hardware.
        prefill: workers that only begin requests; with some, the others only go on with them.
        gateway: the module that is run as one.
        through: module that runs each service, given the service's module and flags; empty: each runs by itself.
        preprocess, routers: number of replicas; the first has no number in its name.
        flags_of: further flags of single processes, by name.
        code_of: Python code that single processes run, by name, given the service's module and flags.
        gateways: number of gateways; the first has no number in its name.
        host: address on which processes listen.
        host_of: addresses on which single processes listen instead, by name.
        known_as: names of hosts by which processes know single others, by name of the process.
        prefix_of: what runs single processes, by name, such as `ip netns exec NAME`; it has to become the process.
        logs: folder that gets a log of each process; None: they write where this process does.
        trust: with which gateways are asked over HTTPS; None: over HTTP.
    """

    def __init__(
        self,
        model: Path,
        workers: int = 2,
        postprocess: int = 2,
        gateway_flags: tuple[str, ...] = (),
        worker_flags: tuple[str, ...] = ("--engine-args", "timing=fixed,fixed_step_ms=10", "--drain-s", "1"),
        prefill: int = 0,
        gateway: str = "services.gateway",
        through: str = "",
        preprocess: int = 1,
        routers: int = 1,
        flags_of: Mapping[str, Sequence[str]] | None = None,
        code_of: Mapping[str, str] | None = None,
        gateways: int = 1,
        host: str = LOOPBACK,
        host_of: Mapping[str, str] | None = None,
        known_as: Mapping[str, str] | None = None,
        prefix_of: Mapping[str, Sequence[str]] | None = None,
        logs: Path | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._code_of = code_of or {}
        self._host, self._host_of = host, host_of or {}
        self._known_as = known_as or {}
        self._prefix_of = prefix_of or {}
        self._logs = logs
        self._trust = trust
        self._runner = [sys.executable, "-m", *([through] if through else [])]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._told_to_end: set[str] = set()
        self._commands: dict[str, list[str]] = {}
        self.ports: dict[str, int] = {}
        served = ("--model", f"tiny={model}")
        several = ("--models", f"tiny={model}")
        preprocesses = _numbered("preprocess", preprocess)
        for name in preprocesses:
            self._add(name, "services.preprocess", *several)
        self.routers = _numbered("router", routers)
        for name in self.routers:
            self._add(name, "services.router", "--preprocess", self._addresses(preprocesses))
        replicas = [f"postprocess-{number}" for number in range(postprocess)]
        for name in replicas:
            self._add(name, "services.postprocess", *several)
        self.prefill = [f"prefill-{number}" for number in range(prefill)]
        self.workers = [*(f"worker-{number}" for number in range(workers)), *self.prefill]
        for name in self.workers:
            role = ("--role", "prefill" if name in self.prefill else "decode") if prefill else ()
            attached = ("--routers", self._addresses(self.routers))
            self._add(name, "services.worker", "--worker-id", name, *role, *served, *attached, *worker_flags)
        self.gateways = _numbered("gateway", gateways)
        for name in self.gateways:
            self._add(
                name,
                gateway,
                *("--preprocess", self._addresses(preprocesses)),
                *("--router", self._addresses(self.routers)),
                *("--postprocess", self._addresses(replicas)),
                *gateway_flags,
            )
        for name, flags in (flags_of or {}).items():
            self._commands[name] += flags

    @property
    def url(self) -> str:
        """Of the first gateway."""
        return self._url("gateway")

    def _url(self, gateway: str) -> str:
        return f"{'http' if self._trust is None else 'https'}://{self.address(gateway)}"

    @property
    def names(self) -> list[str]:
        """Names of all processes, in the order in which they start."""
        return list(self._commands)

    def address(self, name: str) -> str:
        """host:port of one process."""
        return f"{self._host_of.get(name, self._host)}:{self.ports[name]}"

    def _addresses(self, names: Sequence[str]) -> str:
        hosts = {name: self._known_as.get(name, self._host_of.get(name, self._host)) for name in names}
        return ",".join(f"{host}:{self.ports[name]}" for name, host in hosts.items())

    def _add(self, name: str, module: str, *flags: str) -> None:
        self.ports[name] = free_port()
        listen = ("--listen", self.address(name))
        runner = [sys.executable, "-c", self._code_of[name]] if name in self._code_of else self._runner
        self._commands[name] = [*self._prefix_of.get(name, ()), *runner, module, *listen, *flags]

    def start(self, name: str, folder: Path | None = None) -> None:
        """Starts one process, on the port it had; an earlier one that is about to end may do so first.

        Args:
            folder: where it runs, whose packages precede all others; None: where this process does.
        """
        if (earlier := self._processes.get(name)) is not None:
            earlier.wait(30)
        self._told_to_end.discard(name)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self._logs / f"{name}.log").open("ab")) if self._logs is not None else None
            self._processes[name] = subprocess.Popen(
                self._commands[name],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT if log else None,
            )

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Signals one process and does not wait."""
        self._told_to_end.add(name)
        self._processes[name].send_signal(how)

    def pid(self, name: str) -> int:
        """Returns the process id of one process."""
        return self._processes[name].pid

    def ended(self, name: str) -> int:
        """Waits for the end of a process that was told to; its exit code."""
        return self._processes[name].wait(READY_S)

    def wait_ready(self, workers: int) -> None:
        """Waits until every gateway has everything and is connected to so many workers."""
        for name in self.gateways:
            self._wait_ready(name, workers)

    def _wait_ready(self, gateway: str, workers: int) -> None:
        deadline = time.monotonic() + READY_S
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            self.check_live()
            with contextlib.suppress(httpx.TransportError):
                verify = True if self._trust is None else self._trust
                answer = httpx.get(f"{self._url(gateway)}/ready?workers=0", timeout=5, verify=verify)
                state = answer.json()
                if answer.status_code == 200 and state["workers"] >= workers and self._replicas_are_there(state):
                    return
            time.sleep(0.1)
        raise AssertionError(f"the suite did not become ready: {state}")

    def check_live(self) -> None:
        """Raises AssertionError if a process has ended that was not told to."""
        for name in self._processes.keys() - self._told_to_end:
            code = self._processes[name].poll()
            assert code is None, f"{name} ended by itself with code {code}"

    def _replicas_are_there(self, state: dict[str, Any]) -> bool:
        if "services" not in state:  # the gateway has API keys, and this question came without one
            return True
        wanted = sum(name.startswith("postprocess") for name in self._commands)
        return int(state["services"]["postprocess"]) >= wanted

    def __enter__(self) -> Self:
        for name in self._commands:
            self.start(name)
        try:
            self.wait_ready(len(self.workers))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends them all."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait(20)


def _numbered(name: str, count: int) -> list[str]:
    return [name if number == 0 else f"{name}-{number}" for number in range(count)]
