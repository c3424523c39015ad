"""The child's side: blocking frames, limits, the main loop, and the server that forks children."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from services.common.child_rpc.framing import HEADER, frame

MAX_FORK_REQUEST_BYTES = 1 << 20
"""Bytes of a request to a fork server."""


class Channel:
    """The child's end of the connection with its parent.

    Args:
        source, sink: blocking descriptors, which are duplicated.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source = os.fdopen(os.dup(source), "rb")
        self._sink = os.fdopen(os.dup(sink), "wb", buffering=0)

    @classmethod
    def of_stdio(cls) -> Channel:
        """Takes over standard input and output; libraries read nothing, and print to standard error instead."""
        channel = cls(0, 1)
        os.dup2(2, 1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        return channel

    def receive(self) -> bytes | None:
        """Returns the next frame; None once the parent has closed the connection."""
        header = self._source.read(HEADER.size)
        return self._source.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None

    def send(self, body: bytes) -> None:
        """Sends one frame."""
        unsent = memoryview(frame(body))
        while unsent:
            unsent = unsent[self._sink.write(unsent) :]

    def send_json(self, message: Any) -> None:
        """Sends one frame of JSON."""
        self.send(json.dumps(message, separators=(",", ":")).encode())


def serve(
    channel: Channel,
    handle: Callable[[bytes], bytes],
    alarm_s: float = 0.0,
    is_last: Callable[[bytes], bool] = lambda reply: False,
) -> None:
    """Answers requests in order until the parent closes the connection.

    Replies are sent one by one: the parent blames the first request without a reply for a hang or crash.

    Args:
        handle: returns the reply to a request; must not raise.
        alarm_s: time after which a request ends this process, even if the parent has ended; 0 for none.
        is_last: whether this process ends after a reply.
    """
    while (request := channel.receive()) is not None:
        signal.setitimer(signal.ITIMER_REAL, alarm_s)  # the default action of the alarm ends the process
        reply = handle(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.send(reply)
        if is_last(reply):
            return


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Bounds of a child that runs foreign code, the same for all children of a pool.

    Attributes:
        call_s: maximum time of a call, seconds; then its parent kills it.
        memory_mb: memory that it may allocate beside what it has at the start, MiB; 0 for any.
        absolute: `memory_mb` counts what it has at the start too.
        alarm_s: time of a call after which it ends itself, even without its parent, seconds; 0 for none.
        files: descriptors that it may have open, and it may write no file; 0 for no limit.
        niceness: added to that of its parent: the parent goes first while all processors are busy.
        silent: what it prints is discarded.
    """

    call_s: float = 0.0
    memory_mb: int = 0
    absolute: bool = False
    alarm_s: float = 0.0
    files: int = 0
    niceness: int = 0
    silent: bool = False

    def __str__(self) -> str:
        """Returns the argument of the child's command that `read` reverses."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, argument: str) -> ChildLimits:
        """Returns the limits of an argument."""
        return cls(**json.loads(argument))

    def apply(self) -> None:
        """Lowers the limits of this process; they cannot be raised again."""
        if self.niceness:
            os.nice(self.niceness)
        if self.silent:
            with open(os.devnull, "r+b") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(nothing.fileno(), 2)
        if self.memory_mb:
            self.apply_memory()
        if self.files:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, self.files))

    def apply_memory(self, factor: int = 1, final: bool = True) -> None:
        """Limits the memory; beyond it, allocations raise MemoryError.

        Args:
            factor: multiplies the limit.
            final: the limit cannot be raised later, and the process leaves no core dump.
        """
        if sys.platform != "linux":
            return
        pages = 0 if self.absolute else int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (factor * self.memory_mb << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most if final else resource.RLIM_INFINITY))
        if final:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class ForkedService(ABC):
    """What a fork server prepares, and its forks serve.

    Args:
        limits: of each fork.

    Attributes:
        single: at most one fork runs at a time; the next one replaces it, and none outlives the server.
    """

    single = False

    def __init__(self, limits: ChildLimits) -> None:
        self.limits = limits

    def prepare(self, request: bytes) -> dict[str, Any]:
        """Runs in the server; returns the fork's greeting. With an "error" in it, no fork is made."""
        return {}

    @abstractmethod
    def handle(self, request: bytes) -> bytes:
        """Returns the reply to a request; runs in the fork and must not raise."""

    def is_last(self, reply: bytes) -> bool:
        """Whether a fork ends after a reply."""
        return False

    def serve(self, channel: Channel) -> None:
        """Runs in the fork until the parent closes the connection."""
        serve(channel, self.handle, self.limits.alarm_s, self.is_last)


def serve_forks(control: socket.socket, service: ForkedService) -> None:
    """Forks a child for each connection received on the control socket, until that is closed.

    A fork takes milliseconds and starts with everything the server has imported. It has no other descriptors than its
    connection and those the service opened, and its greeting carries its pid.
    """
    if not service.single:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap ended forks automatically
    previous = 0
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, MAX_FORK_REQUEST_BYTES if service.single else 1, 1)
        if previous:
            os.kill(previous, signal.SIGKILL)  # not reaped yet, so its pid has not been reused
            os.waitpid(previous, 0)
        if not request or not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            greeting = service.prepare(request)
            previous = 0
            if "error" in greeting:
                Channel(connection.fileno(), connection.fileno()).send_json(greeting)
            elif not (pid := os.fork()):
                control.close()
                _run_fork(connection, service, greeting)
            elif service.single:
                previous = pid


def _run_fork(connection: socket.socket, service: ForkedService, greeting: dict[str, Any]) -> NoReturn:
    """Serves one connection and exits; never returns to the server's code."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        service.limits.apply()
        channel = Channel(connection.fileno(), connection.fileno())
        channel.send_json({**greeting, "pid": os.getpid()})
        service.serve(channel)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
