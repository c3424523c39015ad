"""Reading from connections in small steps, so that what one of them holds unparsed stays small."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl

READ_BYTES = 64 << 10
"""Most that is read from a connection at once. Event loops by themselves read 256 KiB, which is then held or parsed in
one go."""

_buffer = memoryview(bytearray(READ_BYTES))  # shared: between a read and `buffer_updated` nothing else runs


class BoundedReader(asyncio.BufferedProtocol):
    """Passes on what a transport does to a protocol of streams, with at most `READ_BYTES` in each `data_received`."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol

    def connection_lost(self, exc: Exception | None) -> None:
        """Passed on."""
        self._protocol.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Passed on."""
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Passed on."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Passed on."""
        self._protocol.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns where the next read goes."""
        return _buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Called when `nbytes` have been read."""
        self._protocol.data_received(bytes(_buffer[:nbytes]))


class PausedFlowControl(FlowControl):
    """Flow control of a connection that is not read while `held`, whatever requests and responses want.

    Attributes:
        held: more was received than may be parsed now.
    """

    held = False

    def hold(self) -> None:
        """Stops reading until `release`."""
        self.held = True
        self.pause_reading()

    def release(self, read: bool) -> None:
        """Ends `hold`; reads on if `read`."""
        self.held = False
        if read and not self._transport.is_closing():
            self.resume_reading()

    def resume_reading(self) -> None:
        """Reads on, unless held."""
        if not self.held:
            super().resume_reading()
