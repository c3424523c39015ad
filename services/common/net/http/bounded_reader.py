"""Reads from connections in small steps, to bound the unparsed data of each."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

READ_BYTES = 64 << 10
"""Maximum number of bytes per read; event loops read 256 KiB by default."""

_buffer = memoryview(bytearray(READ_BYTES))  # shared, because nothing else runs between a read and `buffer_updated`


class BoundedReader(asyncio.BufferedProtocol):
    """Adapts a streaming protocol, with at most `READ_BYTES` in each `data_received`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer for the next read."""
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Passes on the `nbytes` that have been read."""
        self._protocol.data_received(bytes(_buffer[:nbytes]))


class PausedFlowControl(FlowControl):
    """Flow control that does not resume reading while `held`.

    Attributes:
        held: whether more was received than may be parsed now.
    """

    held = False

    def hold(self) -> None:
        """Pauses reading until `release`."""
        self.held = True
        self.pause_reading()

    def release(self, read: bool) -> None:
        """Ends `hold`; resumes reading if `read`."""
        self.held = False
        if read and not self._transport.is_closing():
            self.resume_reading()

    def resume_reading(self) -> None:
        """Resumes reading unless held."""
        if not self.held:
            super().resume_reading()
