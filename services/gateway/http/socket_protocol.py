"""uvicorn's WebSocket protocol with bounds on what it reads ahead, answers and leaves open."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.wsproto_impl import WSProtocol
from wsproto import events
from wsproto.connection import ConnectionState

from services.gateway.http.inline_sender import ABORT_KEY

PART = "websocket.receive"
DRAIN = "websocket.drain"
"""Type of the ASGI message that asks for the end of the connection once its current message is answered."""
ABORT_AFTER_S = 15.0
"""Longest time that a connection stays open after its application has ended."""


class BoundedSocketProtocol(WSProtocol):
    """Serves one WebSocket.

    Passes messages on in the parts in which they arrive: `{"type": "websocket.receive", "bytes", "text": bool,
    "more_body": bool}`. At most one part waits; until the application receives it, nothing more is read or parsed.
    """

    def handle_connect(self, event: events.Request) -> None:
        super().handle_connect(event)
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ABORT_KEY] = self.transport.abort

    def handle_events(self) -> None:
        """Handles what was received, up to the next part of a message."""
        for event in self.conn.events():
            if isinstance(event, events.CloseConnection):
                self.handle_close(event)
            elif self.close_sent:
                continue
            elif isinstance(event, events.TextMessage | events.BytesMessage):
                self.handle_message(event)
                return
            elif isinstance(event, events.Request):
                self.handle_connect(event)
            elif isinstance(event, events.Ping):
                self.handle_ping(event)
            elif isinstance(event, events.Pong):
                self.handle_pong(event)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_message(self, event: events.TextMessage | events.BytesMessage) -> None:
        text = isinstance(event, events.TextMessage)
        data = event.data.encode() if isinstance(event, events.TextMessage) else bytes(event.data)
        part: Any = {"type": PART, "bytes": data, "text": text, "more_body": not event.message_finished}
        self.queue.put_nowait(part)
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

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

    def shutdown(self) -> None:
        """Closes the connection once its current message is answered."""
        if self.handshake_complete and not self.close_sent and not self.disconnected:
            self.stop_keepalive()
            drain: Any = {"type": DRAIN}
            self.queue.put_nowait(drain)
        else:
            super().shutdown()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        self._abort_later()

    async def receive(self) -> Any:
        """Returns the next part of a message, a request to drain, or the disconnect."""
        message: Any = await self.queue.get()
        if message["type"] == PART and self.queue.empty():
            self.handle_events()  # what was received with this part
        if self.read_paused and self.queue.empty() and not self.transport.is_closing():
            self.read_paused = False
            self.transport.resume_reading()
        return message

    def _abort_later(self) -> None:
        self.loop.call_later(ABORT_AFTER_S, self.transport.abort)
