"""One child process: started, its log lines passed on, stopped with everything it started itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

from sluice.cli.up.plan import Process

_LONGEST_LINE = 32 << 10
_READ_BYTES = 64 << 10
_PUMP_ENDS_WITHIN_S = 1.0
_COMPLAINT = re.compile(r"^[\d:.]+ (?:WARNING|ERROR|CRITICAL) +\S+  (.+?)(?:  \w+=.*)?$")


class Child:
    """A process of the suite while it runs.

    Args:
        process: what to run.
        on_line: takes every line it writes, without the line's end.
    """

    def __init__(self, process: Process, on_line: Callable[[str], None]) -> None:
        self.process = process
        self.complaint = ""
        self._on_line = on_line
        self._running: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 before it was started."""
        return 0 if self._running is None else self._running.pid

    async def start(self) -> asyncio.Task[int]:
        """Starts it; the task ends with the exit code, negative for a signal, when it and its own children are gone."""
        process = self.process
        # A pipe of our own: with asyncio's, the end of the process counts only when its children have closed it too.
        output, theirs = _pipe()
        try:
            self._running = running = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-m",
                    "sluice.cli.up.child",
                    str(os.getpid()),
                    process.module,
                    *process.arguments,
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **process.env},
                start_new_session=True,  # Ctrl-C reaches us alone: a second signal would cut its drain short
            )
        finally:
            os.close(theirs)
        return asyncio.create_task(self._until_gone(running, output), name=process.name)

    def terminate(self) -> None:
        """Asks it to finish."""
        if self._running is not None and self._running.returncode is None:
            self._running.terminate()

    def kill(self) -> None:
        """Ends it and everything it started, now."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)

    async def _until_gone(self, running: asyncio.subprocess.Process, output: BinaryIO) -> int:
        pump = asyncio.create_task(self._pump(output))
        code = await running.wait()
        self.kill()  # what is left of its group
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pump, _PUMP_ENDS_WITHIN_S)
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
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._line(line)
        if rest:
            self._line(rest)

    def _line(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="replace").rstrip()
        self.complaint = complaint(text) or self.complaint
        self._on_line(text)


def _pipe() -> tuple[BinaryIO, int]:
    read, write = os.pipe()
    return os.fdopen(read, "rb"), write


def complaint(line: str) -> str:
    """The message of a log line that is a warning or worse; empty for every other line."""
    if not line.startswith("{"):
        found = _COMPLAINT.match(line)
        return found.group(1) if found else ""
    try:
        entry = json.loads(line)
    except ValueError:
        return ""
    return str(entry.get("message", "")) if entry.get("level") in ("warning", "error", "critical") else ""


def exit_words(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
