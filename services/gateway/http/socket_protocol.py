"""uvicorn's WebSocket protocol with bounds on what it reads ahead, parses in a turn, answers and leaves open."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto import events
from wsproto.connection import ConnectionState

from services.common.base.budgets import Budget
from services.common.net.http.connection import ABORT_KEY
from services.gateway.http.socket_frames import MAX_FRAGMENTS, POLICY_VIOLATION, Allowance, FrameSlicer, SocketViolation
from services.gateway.http.socket_pace import SocketPace, WaitingSlice

PART = "websocket.receive"
DRAIN = "websocket.drain"
"""Type of the ASGI message that asks for the end of the connection once its current message is answered."""
ABORT_AFTER_S = 15.0
"""Longest time that a connection stays open after its application has ended."""
LINGER_S = 1.0
"""How long a violating connection is read on, unparsed: closing at once would reset it, and lose the close frame."""
MAX_CONTROL_BURST = 64
"""Pings and pongs of one WebSocket at once; with more it is closed, budget `socket_frames`."""
MAX_CONTROL_PER_S = 16.0
"""Pings and pongs of one WebSocket a second after those at once; with more it is closed, budget `socket_frames`."""
MAX_FRAME_BURST = 2 * MAX_FRAGMENTS
"""Frames of one WebSocket at once; further ones wait."""
MAX_FRAMES_PER_S = 256.0
"""Frames of one WebSocket a second after those at once; further ones wait."""

FRAME_BUDGET = Budget("socket_frames", MAX_FRAGMENTS, "bound on the frames of a WebSocket")
"""Counts connections that are closed because of the number of their frames or of refused messages."""


class BoundedSocketProtocol(WSProtocol):
    """Serves one WebSocket.

    Passes messages on in parts of a few KiB: `{"type": "websocket.receive", "bytes", "text": bool, "more_body": bool}`.
    At most one part waits; until the application receives it, nothing more is read or parsed. A turn of the event loop
    parses one slice of a socket at most, see `FrameSlicer`; the handshake is one, too.

    Args:
        pace: the turns of the slices of all sockets; None: its own.
    """

    def __init__(self, *args: Any, pace: SocketPace | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self._pace = pace or SocketPace()
        self._slicer = FrameSlicer()
        self._control = Allowance(MAX_CONTROL_BURST, MAX_CONTROL_PER_S, self.loop.time)
        self._frames = Allowance(MAX_FRAME_BURST, MAX_FRAMES_PER_S, self.loop.time)
        self._handshake = self._unparsed = b""
        self._next_slice: asyncio.Handle | WaitingSlice | None = None
        self._is_connected = False  # whether the handshake's request has been parsed
        self._is_refused = False
        self._part_waits = False
        self._pieces: list[bytes] = []  # of a message, in the slice that is being parsed
        self._piece_is_last = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed = b""
        if self._next_slice is not None:
            self._next_slice.cancel()
        super().connection_lost(exc)

    def handle_connect(self, event: events.Request) -> None:
        super().handle_connect(event)
        self._is_connected = True
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def handle_events(self) -> None:
        """Handles the events of a slice; the parts of its message become one."""
        text = False
        for event in self.conn.events():
            if isinstance(event, events.CloseConnection):
                self.handle_close(event)
            elif self.close_sent:
                continue
            elif isinstance(event, events.TextMessage | events.BytesMessage):
                text = isinstance(event, events.TextMessage)
                self.handle_message(event)
            elif isinstance(event, events.Request):
                self.handle_connect(event)
            elif isinstance(event, events.Ping):
                self.handle_ping(event)
            elif isinstance(event, events.Pong):
                self.handle_pong(event)
        data = b"".join(self._pieces)
        if data or self._piece_is_last:
            part: Any = {"type": PART, "bytes": data, "text": text, "more_body": not self._piece_is_last}
            self._part_waits = True
            self.queue.put_nowait(part)
        self._pieces.clear()
        self._piece_is_last = False

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        if not self._is_connected and self._next_slice is None:
            self._handshake = data
            self._next_slice = self._pace.add(self._parse_handshake)
            return
        self._unparsed += data
        self._read_on()

    def _parse_handshake(self) -> None:
        self._next_slice = None
        data, self._handshake = self._handshake, b""
        super().data_received(data)
        self._read_on()

    def _parse_slice(self) -> None:
        self._next_slice = None
        if self._may_parse:
            try:
                data = self._take_slice()
            except SocketViolation as violation:
                self._refuse(violation.code, violation.reason)
                return
            super().data_received(data)
        self._read_on()

    @property
    def _may_parse(self) -> bool:
        is_open = self.handshake_complete and not (self.response_started or self.transport.is_closing())
        return bool(self._unparsed) and is_open and not (self._holds_part or self._is_refused)

    @property
    def _holds_part(self) -> bool:
        """Whether a part waits for the application, which receives no more once the connection is being closed."""
        return self._part_waits and not self.close_sent

    def _take_slice(self) -> bytes:
        data, slicer = self._unparsed, self._slicer
        end = slicer.end_of_slice(data)
        self._frames.take(slicer.frames)
        if slicer.control_frames and not self._control.take(slicer.control_frames):
            raise SocketViolation(POLICY_VIOLATION, f"more than {MAX_CONTROL_PER_S:g} pings and pongs a second")
        self._unparsed = data[end:]
        return data[:end]

    def _read_on(self) -> None:
        """Parses the next slice in another turn of the event loop, or reads on if everything has been parsed."""
        if self.transport.is_closing():
            return
        if self._may_parse and self._next_slice is None:
            wait_s = self._frames.wait_s
            self._next_slice = self.loop.call_later(wait_s, self._add_slice) if wait_s else self._add_slice()
        pauses = not self._is_refused and (bool(self._unparsed) or self._holds_part)
        if pauses and not self.read_paused:
            self.transport.pause_reading()
        elif self.read_paused and not pauses:
            self.transport.resume_reading()
        self.read_paused = pauses

    def _add_slice(self) -> WaitingSlice:
        self._next_slice = self._pace.add(self._parse_slice)
        return self._next_slice

    def handle_message(self, event: events.TextMessage | events.BytesMessage) -> None:
        self._pieces.append(event.data.encode() if isinstance(event, events.TextMessage) else bytes(event.data))
        self._piece_is_last = event.message_finished

    def handle_ping(self, event: events.Ping) -> None:
        """Answers a ping, unless the client does not read: its answers would pile up."""
        if self.writable.is_set():
            super().handle_ping(event)

    def handle_close(self, event: events.CloseConnection) -> None:
        """Ends the connection, because the client closes it or violates the protocol."""
        if self.conn.state is ConnectionState.OPEN and self.handshake_complete:
            self.transport.write(self.conn.send(events.CloseConnection(code=event.code, reason=event.reason)))
        super().handle_close(event)
        self._abort_later()

    def _refuse(self, code: int, reason: str) -> None:
        """Closes the connection with a close code, and discards what else it sends; its response is cancelled."""
        FRAME_BUDGET.count()
        self._is_refused = True
        self._unparsed = b""
        if self.close_sent:
            self.transport.abort()
            return
        self.close_sent = True
        self.stop_keepalive()
        self.transport.write(self.conn.send(events.CloseConnection(code=code, reason=reason)))
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)
        self._read_on()
        self._abort_later()

    def shutdown(self) -> None:
        """Closes the connection once its current message is answered."""
        if self.handshake_complete and not self.close_sent and not self.disconnected:
            self.stop_keepalive()
            drain: Any = {"type": DRAIN}
            self.queue.put_nowait(drain)
        elif not self._is_connected:
            self.transport.close()
        else:
            super().shutdown()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._abort_later()

    async def send(self, message: Any) -> None:
        """Sends an ASGI message; what was held until the connection is accepted or closed is parsed then.

        Raises:
            ClientDisconnected: the connection is closed, by the client or because of what it sent.
        """
        if self.close_sent and message["type"] == "websocket.send":
            raise ClientDisconnected
        await super().send(message)
        if message["type"] in ("websocket.accept", "websocket.close"):
            self._read_on()

    async def receive(self) -> Any:
        """Returns the next part of a message, a request to drain, or the disconnect."""
        message: Any = await self.queue.get()
        if message["type"] == PART:
            self._part_waits = False
        self._read_on()
        return message

    def _abort_later(self) -> None:
        self.loop.call_later(ABORT_AFTER_S, self.transport.abort)
