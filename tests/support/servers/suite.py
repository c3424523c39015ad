"""A running suite for end-to-end tests: `sluice up` as a user starts it, on free ports."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.support.data.small_tekken import small_tekken

SLUICE = Path(sys.executable).with_name("sluice")
MODULE = re.compile(r"services\.(gateway|preprocess|router|postprocess|worker)")
READY = re.compile(r"^ready (https?://\S+)")


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty when it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Suite:
    """`sluice up` with the given flags, from `ready` to Ctrl-C.

    Unless a flag or `env` sets the model, it serves `tekken` with a small vocabulary.
    """

    def __init__(self, *flags: str, env: dict[str, str] | None = None, ready_within_s: float = 240) -> None:
        if not any("model" in each for each in (*flags, *map(str.lower, env or {}))):
            flags = ("--model", str(small_tekken()), "--model-name", "tekken", *flags)
        if not any(flag.endswith("restart") for flag in flags):
            flags = ("--no-restart", *flags)  # a service that ends is a failure of the test
        if "--log-level" not in flags and not any(name.endswith("_LOG_LEVEL") for name in env or {}):
            flags = (*flags, "--log-level", "info")
        self._process = subprocess.Popen(
            [str(SLUICE), "up", "--port", "0", "--base-grpc-port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_ready(ready_within_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _wait_ready(self, within_s: float) -> str:
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                break
            if found := READY.match(line):
                return found[1]
        self.stop()
        raise AssertionError("the suite did not become ready:\n" + "".join(self.output))

    @property
    def pid(self) -> int:
        """Of `sluice up` itself."""
        return self._process.pid

    def processes(self, service: str = "") -> list[psutil.Process]:
        """The services' processes, of one kind or all."""
        found = []
        for child in psutil.Process(self.pid).children(recursive=True):
            kind = MODULE.search(" ".join(command_of(child)))
            if kind and service in ("", kind[1]):
                found.append(child)
        return found

    def address(self, service: str, index: int = 0) -> str:
        """host:port of a service's server."""
        command = self.processes(service)[index].cmdline()
        return command[command.index("--listen") + 1]

    def addresses(self, service: str) -> Sequence[str]:
        """host:port of every replica of a service."""
        return [self.address(service, index) for index in range(len(self.processes(service)))]

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """Ends the suite; its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(how)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                for process in [*self.processes(), psutil.Process(self.pid)]:
                    process.kill()
                self._process.wait(5)
        self._reader.join(5)
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            sys.stderr.write("--- output of the suite ---\n" + "".join(self.output[-200:]))
