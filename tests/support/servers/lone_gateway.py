"""A gateway process without the services behind it, for what is decided before any of them is asked."""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType
from typing import Self

import httpx
import psutil

from services.common.net.ports import free_port

NO_HINTS = "127.0.0.1:1"
START_S = 60


class LoneGateway:
    """`python -m services.gateway` with the given flags; nothing serves a model.

    Attributes:
        url: of its HTTP server.
    """

    def __init__(self, *flags: str, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = free_port()
        self.url = f"http://{host}:{self.port}"
        services = (each for name in ("preprocess", "router", "postprocess") for each in (f"--{name}", NO_HINTS))
        command = [sys.executable, "-m", "services.gateway", "--listen", f"{host}:{self.port}", *services, *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._wait_until_it_serves()

    def rss_mib(self) -> float:
        """Memory that the process holds now."""
        return psutil.Process(self._process.pid).memory_info().rss / (1 << 20)

    def _wait_until_it_serves(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                httpx.get(f"{self.url}/health", timeout=5)
                return
            except httpx.HTTPError:
                time.sleep(0.05)
        self.stop()
        assert self._process.stdout is not None
        raise AssertionError("the gateway did not start:\n" + self._process.stdout.read())

    def stop(self) -> None:
        """Ends the process."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
