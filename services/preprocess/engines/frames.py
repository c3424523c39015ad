"""Length-prefixed frames over the pipes of an engine's tokenizer process, read and written without blocking."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Iterator, Sequence
from struct import Struct
from time import monotonic

LENGTH = Struct("<I")
READ_BYTES = 1 << 18
MAX_FRAME_BYTES = 256 << 20


class Child:
    """A process that exchanges frames on its standard input and output.

    Attributes:
        stdin, stdout: the parent's file descriptors.
        unsent: the part of the current frame not written yet.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self.stdin, self.stdout):
            os.set_blocking(pipe, False)
        self.unsent = memoryview(b"")
        self._received = bytearray()

    def put(self, data: bytes) -> None:
        """Sets the next frame to write; the previous one must be sent. Ignores empty data."""
        if data:
            self.unsent = memoryview(LENGTH.pack(len(data)) + data)

    def write(self) -> None:
        """Writes what the pipe accepts now; raises OSError when the process has exited."""
        self.unsent = self.unsent[os.write(self.stdin, self.unsent) :]

    def read(self) -> Iterator[bytes]:
        """Reads available data and yields complete frames; raises EOFError when the process has exited."""
        chunk = os.read(self.stdout, READ_BYTES)
        if not chunk:
            raise EOFError
        self._received += chunk
        yield from self._frames()

    def receive(self, deadline: float) -> bytes:
        """Returns the next frame; raises TimeoutError at the deadline, EOFError when the process has exited."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - monotonic())):
                for frame in self.read():
                    return frame
        raise TimeoutError

    def _frames(self) -> Iterator[bytes]:
        received = self._received
        while len(received) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(received)
            if size > MAX_FRAME_BYTES:
                raise EOFError
            if len(received) < LENGTH.size + size:
                return
            frame = bytes(received[LENGTH.size : LENGTH.size + size])
            del received[: LENGTH.size + size]
            yield frame

    def kill(self) -> None:
        """Kills the process and its descendants."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
