"""Launches children, and exchanges frames with each over a socket of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import Any, cast

from services.common.child_rpc.framing import FrameReader, frame

MAX_UNREAD_FRAMES = 16
"""Frames of a child that wait until they are received; a child that sends more is killed."""

_SERVICES = Path(__file__).resolve().parents[2]
# Only `services` is importable from this project; all other packages come from the child's own interpreter.
_BOOTSTRAP = (
    "import sys, types, importlib; services = types.ModuleType('services'); services.__path__ = [sys.argv[1]]; "
    "sys.modules['services'] = services; importlib.import_module(sys.argv[2]).main(sys.argv[3:])"
)


def engine_command(python: str, module: str, *arguments: object) -> list[str]:
    """Returns the command that calls `main(arguments)` of a module of `services` in another interpreter.

    Args:
        python: the interpreter; empty for this one.
    """
    return [python or sys.executable, "-P", "-c", _BOOTSTRAP, str(_SERVICES), module, *map(str, arguments)]


def module_command(module: str, *arguments: object) -> list[str]:
    """Returns the command that runs a module in this interpreter."""
    return [sys.executable, "-m", module, *map(str, arguments)]


def bare_environment() -> dict[str, str]:
    """Returns an environment without this process's variables, which may hold secrets."""
    return {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}


class Child(asyncio.Protocol):
    """One child process and its frames.

    Args:
        max_frame_bytes: maximum size of a frame; a child that announces a larger one is killed.

    Attributes:
        pid: its process id; 0 while unknown.
        on_frame: called with each frame; None to keep them for `receive`.
        on_lost: called once when the child has ended, unless it was killed here.
        reaped: done when no process is left; None for a fork, which its server reaps.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.pid = 0
        self.on_frame: Callable[[bytes], None] | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.reaped: asyncio.Future[int] | None = None
        self._reader = FrameReader(max_frame_bytes)
        self._frames: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None  # unlike a pid, it is never reused
        self._ended = False

    @classmethod
    async def connect(cls, connection: socket.socket, max_frame_bytes: int) -> Child:
        """Returns the child at the other end of a socket."""
        connection.setblocking(False)
        _, child = await asyncio.get_running_loop().create_unix_connection(
            lambda: cls(max_frame_bytes), sock=connection
        )
        return child

    @classmethod
    async def launch(
        cls,
        command: Sequence[str],
        max_frame_bytes: int,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> Child:
        """Starts a process whose standard input and output are the connection; raises OSError if it cannot start.

        Args:
            environment: None for that of this process.
            descriptors: further ones that the process inherits.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.to_thread(_start, command, theirs.fileno(), environment, descriptors)
            child = await cls.connect(ours, max_frame_bytes)
        except BaseException:
            ours.close()
            raise
        child._process, child.pid = process, process.pid
        return child

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        max_frame_bytes: int,
        start_s: float,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        first: bytes | None = None,
    ) -> tuple[Child, Any]:
        """Launches a process; returns it and its greeting, which is JSON.

        Args:
            start_s: maximum time until the greeting.
            first: sent before the greeting; None for nothing.

        Raises:
            OSError: it cannot start; TimeoutError, EOFError, ValueError: it did not become ready.
        """
        child = await cls.launch(command, max_frame_bytes, environment, descriptors)
        try:
            if first is not None:
                child.send(first)
            return child, await child.receive_json(start_s)
        except BaseException:
            await child.end()
            raise

    def identify(self, pid: int) -> None:
        """Sets the pid of a fork, so that it can be killed."""
        self.pid = pid
        with contextlib.suppress(OSError):  # it has already ended: connection_lost follows
            self._pidfd = os.pidfd_open(pid)

    async def receive(self) -> bytes:
        """Returns the next frame; raises EOFError when the child has ended."""
        while not self._frames:
            if self._ended:
                raise EOFError("the process ended")
            self._arrived.clear()
            await self._arrived.wait()
        return self._frames.popleft()

    async def receive_json(self, timeout_s: float) -> Any:
        """Returns the next frame's JSON; raises TimeoutError, EOFError, or ValueError if it is not JSON."""
        async with asyncio.timeout(timeout_s):
            return json.loads(await self.receive())

    def send(self, *bodies: bytes) -> None:
        """Sends a frame for each body, in one write."""
        assert self._transport is not None
        self._transport.write(b"".join(map(frame, bodies)))

    def kill(self) -> None:
        """Kills the process with its descendants; no callback is called afterwards."""
        self._ended = True
        self._arrived.set()
        if self._transport is not None:
            self._transport.abort()
        if self._pidfd is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None
        if self._process is not None and self.reaped is None:
            kill_session(self._process)
            self.reaped = asyncio.get_running_loop().run_in_executor(None, self._process.wait)

    async def end(self) -> None:
        """Kills the process and waits until it is gone."""
        self.kill()
        if self.reaped is not None:
            await self.reaped

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not a subclass

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                if self._ended:
                    return
                if self.on_frame is not None:
                    self.on_frame(body)
                elif len(self._frames) == MAX_UNREAD_FRAMES:
                    raise ValueError("frames that were not requested")
                else:
                    self._frames.append(body)
                    self._arrived.set()
        except ValueError:
            self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended:
            self.kill()
            self.on_lost()


def _start(
    command: Sequence[str], connection: int, environment: Mapping[str, str] | None, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=connection, stdout=connection, env=environment, pass_fds=descriptors, start_new_session=True
    )


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session, and its descendants."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


_lock = Lock()
_loop: asyncio.AbstractEventLoop | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all children whose callers are threads; it runs on a thread of its own."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            Thread(target=_loop.run_forever, name="child-rpc", daemon=True).start()
        return _loop
