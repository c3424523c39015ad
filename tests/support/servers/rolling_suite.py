"""Two of every service, without a supervisor, so that each can be restarted while the other one serves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from services.common.net.ports import free_port
from tests.support.servers.redis_server import RedisServer

READY_S = 120
DRAIN_S = "5"


class RollingSuite:
    """Starts gateway-0, gateway-1, preprocess-0, … and a Redis for the routers; `tiny` is the model."""

    def __init__(self, model: Path, count: int = 2) -> None:
        self._count = count
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._redis = RedisServer(model.parent)
        services = ("preprocess", "router", "postprocess", "worker", "gateway")
        self.ports = {f"{service}-{number}": free_port() for service in services for number in range(count)}
        self._flags = {
            "preprocess": ("--models", f"tiny={model}"),
            "router": (),
            "postprocess": ("--models", f"tiny={model}"),
            "worker": (
                *("--model", f"tiny={model}", "--routers", self._addresses("router")),
                *("--engine-args", "timing=fixed,fixed_step_ms=5"),
            ),
            "gateway": (
                *("--preprocess", self._addresses("preprocess"), "--router", self._addresses("router")),
                *("--postprocess", self._addresses("postprocess")),
            ),
        }

    def of(self, service: str) -> list[str]:
        """Names of a service's processes."""
        return [f"{service}-{number}" for number in range(self._count)]

    def restart(self, name: str, how: signal.Signals) -> None:
        """Ends one process, waits until it is gone, starts it again and waits until every gateway knows it."""
        self._processes[name].send_signal(how)
        self._processes[name].wait(60)
        self._start(name)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Waits until every gateway has everything."""
        deadline = time.monotonic() + READY_S
        states: dict[str, object] = {}
        for name in self.of("gateway"):
            while not self._complete(name, states):
                assert time.monotonic() < deadline, f"not ready: {states}"
                time.sleep(0.05)

    def _complete(self, gateway: str, states: dict[str, object]) -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{self.ports[gateway]}/ready", timeout=5)
            state = states[gateway] = answer.json()
            there = {**state["services"], "workers": state["workers"]}
            return answer.status_code == 200 and all(number >= self._count for number in there.values())
        return False

    def _addresses(self, service: str) -> str:
        return ",".join(f"127.0.0.1:{self.ports[name]}" for name in self.of(service))

    def _start(self, name: str) -> None:
        service = name.partition("-")[0]
        command = [sys.executable, "-m", f"services.{service}", "--listen", f"127.0.0.1:{self.ports[name]}"]
        command += [*self._flags[service], "--drain-s", DRAIN_S, "--log-level", "warning"]
        if service == "worker":
            command += ["--worker-id", name]
        environment = {**os.environ, "SLUICE_ROUTER_REDIS_URL": self._redis.url}
        self._processes[name] = subprocess.Popen(command, env=environment)

    def __enter__(self) -> Self:
        self._redis.start()
        try:
            for name in self.ports:
                self._start(name)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(20)
        self._redis.stop()
