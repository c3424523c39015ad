"""`vllm serve --grpc` as a child process of the worker."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.errors import ErrorKind, SluiceError, invalid

STOP_S = 3.0


class Server:
    """Owns one server process and everything it starts."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self.folder = ""

    def make_folder(self) -> str:
        """A folder for sockets that only this user can read; goes with the server."""
        self.folder = tempfile.mkdtemp(prefix="sluice-vllm-")
        return self.folder

    async def start(self, command: Sequence[str]) -> None:
        """Starts it in a process group of its own; SluiceError(INVALID_ARGUMENT) when there is no such program."""
        environment = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            raise invalid(f"vLLM cannot be started as {command[0]}: {error}.", param="engine_args") from error

    async def wait(self) -> int:
        """Returns its exit code when it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends it and its children; may be called twice, and when it never started."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)
        if self.folder:
            await asyncio.to_thread(shutil.rmtree, self.folder, True)


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            continue
    # Its engine process may outlive it by a moment.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def find_program(named: str) -> str:
    """The `vllm` to run: as named, beside this interpreter, or on the PATH."""
    if named:
        return named
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if not found:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "No program vllm is here; name one with the option program, or a running server with address.",
            param="engine_args",
        )
    return found
