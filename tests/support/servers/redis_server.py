"""A real Redis for tests: its own process on a free port, no persistence unless asked for."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from services.common.net.ports import free_port
from tests.support.repository import ROOT

LOOPBACK = "127.0.0.1"
OPEN = ("--protected-mode", "no")
NO_PERSISTENCE = ("--save", "", "--appendonly", "no")
DURABLE = ("--save", "", "--appendonly", "yes", "--appendfsync", "always")
BUNDLED = ROOT / ".venv" / "opt" / "redis" / "bin" / "redis-server"


def redis_binary() -> str:
    """The redis-server to run; fails when there is none, because skipping would hide half of the router."""
    found = shutil.which("redis-server") or (str(BUNDLED) if BUNDLED.is_file() else None)
    if found is None:
        raise AssertionError("No redis-server on PATH or in .venv/opt/redis/bin: run scripts/redis.sh or install one.")
    return found


class RedisServer:
    """One redis-server; `stop`, `start` and `freeze` make it fail the way servers do.

    Args:
        folder: where it runs.
        options: more of its command line; the first may name a configuration file.
        durable: whether every write is on disk before it is answered.
        host: address on which it listens.
        prefix: what it is run by, such as `ip netns exec NAME`; it has to become the server.
    """

    def __init__(
        self, folder: Path, *options: str, durable: bool = False, host: str = LOOPBACK, prefix: Sequence[str] = ()
    ) -> None:
        self.host = host
        self._prefix = prefix
        self.home = folder
        self._persistence = DURABLE if durable else NO_PERSISTENCE
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self.port = free_port()

    @property
    def url(self) -> str:
        """For settings."""
        return f"redis://{self.host}:{self.port}/0"

    def start(self) -> None:
        """Starts and waits until it answers."""
        self._process = subprocess.Popen(
            [
                *(*self._prefix, redis_binary(), *self._options),
                *("--port", str(self.port), "--bind", self.host),
                *(() if self.host == LOOPBACK else OPEN),
                *self._persistence,
            ],
            cwd=self.home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 90
        while not self._answers():
            assert self._process.poll() is None, "redis-server ended at once"
            assert time.monotonic() < deadline, "redis-server did not start in 90 s"
            time.sleep(0.02)

    def stop(self) -> None:
        """Kills it; what it held is lost unless it is durable."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
            self._frozen = False

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Signals it and waits for its end."""
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(30)

    @property
    def running(self) -> bool:
        """Whether it answers; not while it is frozen."""
        return self._process is not None and not self._frozen

    @property
    def frozen(self) -> bool:
        """Whether it is frozen."""
        return self._frozen

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        """Undoes `freeze`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._frozen = False

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) in (b"+PONG\r\n", b"-NOAUTH")
        except OSError:
            return False
