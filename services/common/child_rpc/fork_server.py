"""The parent's side of a fork server: a process with everything imported, whose forks are children."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.common.child_rpc.process import Child, kill_session


class ForkServer:
    """Starts the server on first use, and again after `close`.

    Args:
        command: returns the server's command, given the descriptor of its control socket.
        max_frame_bytes: see Child.
        start_s: maximum time until a fork is ready, including the start of the server.
        single: its service is; then forks end with the server.
        quiet: discard its output.
        environment: None for that of this process.
        descriptors: further ones that the server inherits.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        max_frame_bytes: int,
        start_s: float,
        *,
        single: bool = False,
        quiet: bool = False,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        self._command = command
        self._max_frame_bytes = max_frame_bytes
        self._start_s = start_s
        self._single = single
        self._output = subprocess.DEVNULL if quiet else None
        self._environment = environment
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> socket.socket:
        """Starts the server if it does not run; returns its control socket. Raises OSError if it cannot start."""
        async with self._starting:
            if self._process is not None and self._process.poll() is not None:
                await self.close()
            if self._control is None:
                ours, theirs = socket.socketpair()
                try:
                    with theirs:
                        self._process = await asyncio.to_thread(self._popen, theirs.fileno())
                except BaseException:
                    ours.close()
                    raise
                self._control = ours
            return self._control

    def _popen(self, control: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command(control),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env=self._environment,
            pass_fds=(control, *self._descriptors),
            start_new_session=True,
        )

    async def fork(self, request: bytes = b"\0") -> tuple[Child | None, dict[str, Any]]:
        """Returns one more child and its greeting; no child if the greeting is an error.

        Raises:
            OSError, EOFError, ValueError: it did not start; TimeoutError: not in time. The server may be unusable.
        """
        control = await self.start()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [request], [theirs.fileno()])
                child = await Child.connect(ours, self._max_frame_bytes)
            except BaseException:
                ours.close()
                raise
        try:
            greeting: dict[str, Any] = await child.receive_json(self._start_s)
            if "error" in greeting:
                child.kill()
                return None, greeting
            child.identify(int(greeting["pid"]))
        except BaseException:
            child.kill()
            raise
        return child, greeting

    async def close(self) -> None:
        """Ends the server; forks end with their connections."""
        if self._control is not None:
            self._control.close()
            self._control = None
        process, self._process = self._process, None
        if process is not None:
            if self._single:
                kill_session(process)
            else:
                process.kill()
            await asyncio.to_thread(process.wait)
