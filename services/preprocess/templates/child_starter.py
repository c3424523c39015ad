"""Starts the limited processes of `templates.child` and communicates with each over its own socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from services.common.errors import ErrorKind, SluiceError
from services.preprocess.templates.child import HELLO, REPLY

START_S = 30.0
"""Maximum time for the first process to load Jinja; generous, for busy machines."""


@dataclass(frozen=True)
class ChildLimits:
    """Limits of a template.

    Attributes:
        limit_s: maximum run time, seconds.
        max_chars: maximum length of its output.
        memory_mb: address space of its process, MiB.
    """

    limit_s: float
    max_chars: int
    memory_mb: int


class Child(asyncio.Protocol):
    """One limited process.

    Args:
        most: maximum size of a reply, bytes; a process that announces more is terminated.

    Attributes:
        on_reply: called with the kind and the content of each reply.
        on_lost: called once when the process has ended, unless it was killed here.
    """

    def __init__(self, most: int) -> None:
        self.on_reply: Callable[[int, bytes], None] = lambda kind, content: None
        self.on_lost: Callable[[], None] = lambda: None
        self._max_reply_bytes = most
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._process: int | None = None  # a pidfd: unlike its pid, it is never reused
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._killed = False

    async def ready(self) -> None:
        """Waits until the process accepts requests; raises OSError when it ends before."""
        async with asyncio.timeout(START_S):
            await self._hello

    def send(self, frames: bytes) -> None:
        """Sends requests."""
        assert self._transport is not None
        self._transport.write(frames)

    def kill(self) -> None:
        """Kills the process; no callback is called afterwards."""
        self._killed = True
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while len(received) >= REPLY.size and not self._killed:
            size, kind = REPLY.unpack_from(received)
            if size > self._max_reply_bytes:
                self._lost()
                return
            if len(received) < REPLY.size + size:
                return
            content = bytes(received[REPLY.size : REPLY.size + size])
            del received[: REPLY.size + size]
            if self._process is None:
                self._on_hello(kind, content)
            else:
                self.on_reply(kind, content)

    def _on_hello(self, kind: int, content: bytes) -> None:
        """Handles the first message, sent before the process has seen any template."""
        if kind != HELLO or not content.isdigit():
            self._lost()
            return
        with contextlib.suppress(OSError):  # it has already ended: connection_lost follows
            self._process = os.pidfd_open(int(content))
        if not self._hello.done():
            self._hello.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()

    def _lost(self) -> None:
        if self._killed:
            return
        self.kill()
        if not self._hello.done():
            self._hello.set_exception(ConnectionResetError("the process ended during startup"))
            self._hello.exception()  # mark as retrieved, in case nothing awaits it
        self.on_lost()


class ChildStarter:
    """The process with Jinja loaded, from which the others are forked; started on first use, and restarted if it ended.

    Args:
        limits: limits of each fork.
    """

    def __init__(self, limits: ChildLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def child(self) -> Child:
        """Starts one more process; raises SluiceError(INTERNAL) when that fails."""
        try:
            for attempt in range(2):
                control = await self._control_socket()
                try:
                    return await self._fork(control)
                except OSError:
                    await self.close()
                    if attempt:
                        raise
        except (OSError, TimeoutError) as error:
            raise SluiceError(
                ErrorKind.INTERNAL, "No process for chat templates could be started; see the service's log."
            ) from error
        raise AssertionError("unreachable")

    async def _fork(self, control: socket.socket) -> Child:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                socket.send_fds(control, [b"\0"], [theirs.fileno()])
                most = 4 * self._limits.max_chars + (1 << 16)
                _, child = await loop.create_unix_connection(lambda: Child(most), sock=ours)
            except BaseException:
                ours.close()
                raise
        try:
            await child.ready()
        except BaseException:
            child.kill()
            raise
        return child

    async def _control_socket(self) -> socket.socket:
        async with self._starting:
            if self._control is None:
                ours, theirs = socket.socketpair()
                with theirs:
                    ours.setblocking(False)
                    try:
                        self._process = await asyncio.to_thread(self._start, theirs.fileno())
                        async with asyncio.timeout(START_S):
                            if not await asyncio.get_running_loop().sock_recv(ours, 1):
                                raise ConnectionResetError("the process ended during startup")
                    except BaseException:
                        ours.close()
                        await self._end()
                        raise
                self._control = ours
            return self._control

    def _start(self, control: int) -> subprocess.Popen[bytes]:
        limits = self._limits
        arguments = (control, limits.limit_s, limits.max_chars, limits.memory_mb)
        return subprocess.Popen(
            [sys.executable, "-m", "services.preprocess.templates.child", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            pass_fds=(control,),
            start_new_session=True,
        )

    async def close(self) -> None:
        """Ends the process; forks end with their connections."""
        if self._control is not None:
            self._control.close()
            self._control = None
        await self._end()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
