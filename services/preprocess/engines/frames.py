"""The pipes to an engine's tokenizer: frames of a length and as many bytes, written and read as far as they go."""

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
    """A process with a frame protocol on its standard input and output.

    Attributes:
        stdin, stdout: file descriptors of this end.
        unsent: what is put and not written yet.
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
        """Makes `data` the next frame; nothing may be unsent. Empty data is no frame."""
        if data:
            self.unsent = memoryview(LENGTH.pack(len(data)) + data)

    def write(self) -> None:
        """Writes what the pipe takes now; OSError when the process is gone."""
        self.unsent = self.unsent[os.write(self.stdin, self.unsent) :]

    def read(self) -> Iterator[bytes]:
        """Reads what is there and gives the frames that are complete; EOFError when the process is gone."""
        piece = os.read(self.stdout, READ_BYTES)
        if not piece:
            raise EOFError
        self._received += piece
        yield from self._frames()

    def receive(self, deadline: float) -> bytes:
        """The next frame; TimeoutError at the deadline, EOFError when the process is gone."""
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
        """Ends the process and whatever it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
