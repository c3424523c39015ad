"""Runs `vllm serve --grpc` as a child process of the worker."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.common.base.errors import ErrorKind, SluiceError, invalid

STOP_TIMEOUT_S = 3.0


class Server:
    """Owns one server process, its child processes and its folder."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self.folder = ""

    def make_folder(self) -> str:
        """Creates a folder that only this user can read; `stop` removes it."""
        self.folder = tempfile.mkdtemp(prefix="sluice-vllm-")
        return self.folder

    async def start(self, command: Sequence[str]) -> None:
        """Starts the server in a new session; raises SluiceError(INVALID_ARGUMENT) when the program cannot run."""
        environment = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=sys.stderr, start_new_session=True
            )
        except OSError as error:
            raise invalid(f"vLLM cannot be started as {command[0]}: {error}.", param="engine_args") from error

    async def wait(self) -> int:
        """Waits for the server to exit and returns its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Ends the server and its child processes; may be called twice, and before `start`."""
        process, self._process = self._process, None
        if process is not None:
            await _terminate(process)
        if self.folder:
            await asyncio.to_thread(shutil.rmtree, self.folder, True)


async def _terminate(process: asyncio.subprocess.Process) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            continue
    # The engine process may outlive the server briefly.
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def find_program(configured: str) -> str:
    """Returns the `vllm` program: the configured one, else the one next to this interpreter, else from the PATH."""
    if configured:
        return configured
    sibling = Path(sys.executable).with_name("vllm")
    program = str(sibling) if sibling.exists() else shutil.which("vllm")
    if not program:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "The program vllm was not found; set the option program, or address for a running server.",
            param="engine_args",
        )
    return program
