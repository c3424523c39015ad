"""Runs one child process: starts it, forwards its log lines, and stops it with its own children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import sluice
from sluice.cli.up.plan import Process

_MAX_LINE_BYTES = 32 << 10
"""Bytes of a line that a process of `sluice up` prints; the rest is left out."""
_READ_BYTES = 64 << 10
_PUMP_TIMEOUT_S = 1.0
_WARNING_LINE = re.compile(r"^[\d:.]+ (?:WARNING|ERROR|CRITICAL) +\S+  (.+?)(?:  \w+=.*)?$")
_LOG_LINE = re.compile(r"^[\d:.]+ [A-Z]+ +\S+  ")

_ROOT = Path(sluice.__file__).resolve().parents[1]
# Only this project is importable from where the suite runs; all other packages come from the other interpreter.
_BOOTSTRAP = """\
import sys
from importlib.util import module_from_spec, spec_from_file_location
for name in ("services", "sluice"):
    folder = f"{sys.argv[1]}/{name}"
    spec = spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
del sys.argv[1]
from sluice.cli.up.child import main
main()
"""


def _interpreter(python: str) -> tuple[str, ...]:
    """Returns the command that runs `sluice.cli.up.child` in another interpreter; empty for this one."""
    if python:
        return (python, "-P", "-c", _BOOTSTRAP, str(_ROOT))
    return (sys.executable, "-P", "-m", "sluice.cli.up.child")


class Child:
    """Runs a process of the suite.

    Args:
        process: what to run.
        on_line: called with every line of its output, without the line end.

    Attributes:
        complaint: the message of its last warning or error.
    """

    def __init__(self, process: Process, on_line: Callable[[str], None]) -> None:
        self.process = process
        self.complaint = self._error = self._last_text = ""
        self._on_line = on_line
        self._running: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return 0 if self._running is None else self._running.pid

    @property
    def cause(self) -> str:
        """Why it may have ended: what it printed last, unless that is a line of its log, or its last error."""
        return self._last_text or self._error

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self._running is not None and self._running.returncode is None

    async def start(self) -> asyncio.Task[int]:
        """Starts it; the task ends, after its children have ended, with the exit code, negative for a signal."""
        process = self.process
        self.complaint = self._error = self._last_text = ""
        # With asyncio's own pipe, the process would count as ended only after its children have closed it, too.
        output, child_end = _pipe()
        try:
            self._running = running = await asyncio.create_subprocess_exec(
                *_interpreter(process.python),
                *(str(os.getpid()), process.module, *process.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=child_end,
                stderr=child_end,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **process.env},
                start_new_session=True,  # Ctrl-C must not reach it: a second signal would end its drain early
            )
        finally:
            os.close(child_end)
        return asyncio.create_task(self._wait_for_end(running, output), name=process.name)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        if self.is_running and self._running is not None:
            self._running.terminate()

    def kill(self) -> None:
        """Kills it and its children."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)

    async def _wait_for_end(self, running: asyncio.subprocess.Process, output: BinaryIO) -> int:
        pump = asyncio.create_task(self._pump(output))
        code = await running.wait()
        self.kill()  # the rest of its group
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PUMP_TIMEOUT_S):
                await pump
        return code

    async def _pump(self, pipe: BinaryIO) -> None:
        output = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), pipe
        )
        try:
            await self._lines(output)
        finally:
            transport.close()

    async def _lines(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while part := await output.read(_READ_BYTES):
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(line)
        if rest:
            self._line(rest)

    def _line(self, line: bytes) -> None:
        text = line[:_MAX_LINE_BYTES].decode(errors="replace").rstrip()
        self.complaint = complaint(text) or self.complaint
        if entered := is_log_line(text):
            self._error = error_of(text) or self._error
        self._last_text = "" if entered else text
        self._on_line(text)


def _pipe() -> tuple[BinaryIO, int]:
    read, write = os.pipe()
    return os.fdopen(read, "rb"), write


def complaint(line: str) -> str:
    """Returns the message of a log line that is a warning or worse; empty for every other line."""
    if not line.startswith("{"):
        found = _WARNING_LINE.match(line)
        return found.group(1) if found else ""
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    return str(entry.get("message", "")) if entry.get("level") in ("warning", "error", "critical") else ""


def is_log_line(line: str) -> bool:
    """Whether a line was written by a service's logger, in either format."""
    return line.startswith("{") or _LOG_LINE.match(line) is not None


def error_of(line: str) -> str:
    """Returns the message of a log line that is an error; empty for every other line."""
    return complaint(line) if re.match(r'[\d:.]+ (?:ERROR|CRITICAL) |\{.*"level": "(?:error|critical)"', line) else ""


def exit_words(code: int) -> str:
    """Describes how a process ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
