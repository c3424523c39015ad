"""One connection of the gateway: WebSockets at their paths, errors in OpenAI's format, and chunks written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from services.common.net.http.bounded_reader import BoundedReader
from services.common.net.http.connection import BoundedHttpProtocol

CONNECTION_KEY = "sluice.connection"
"""Key in the scope of a request of what its connection keeps between requests."""
SOCKET_PATHS = frozenset((b"/v1/responses",))
"""Paths that are served over WebSocket."""


class GatewayConnection(BoundedHttpProtocol):
    """Serves one connection, which a handshake hands over to the WebSocket protocol."""

    @staticmethod
    def error_body(status: int, code: str, message: str) -> bytes:
        """Returns an error in OpenAI's format."""
        kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
        return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def _should_upgrade(self) -> bool:
        """Whether the request opens a WebSocket; upgrades of other paths and protocols are ordinary requests."""
        if self._get_upgrade() != b"websocket":
            return False
        hosts = [value for name, value in self.headers if name == b"host"]
        path = self.url.partition(b"?")[0]
        return path in SOCKET_PATHS and self.url.isascii() and len(hosts) == 1 and _is_name(hosts[0])

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over to the WebSocket protocol."""
        if self._unparsed:
            message = "Data followed the WebSocket handshake before its response; wait for the response."
            self._refuse(400, "invalid_http", message)
            return
        self._cancel_header_timeout()
        self._cancel_close()
        super().handle_websocket_upgrade()
        protocol: Any = self.transport.get_protocol()
        self.transport.set_protocol(BoundedReader(protocol))
        if self._closing or self.server_stops:
            protocol.shutdown()


def chunk_writer(send: Any) -> Callable[[bytes], bool] | None:
    """Returns a function that writes a chunk of a response without a task switch; None if the server has none.

    The function returns False, without writing, where `send` has to be called: before the start of the response, and
    while the client reads too slowly.

    Args:
        send: the server's own ASGI send.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None

    def write(data: bytes) -> bool:
        open_ended = cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        if not open_ended or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


def _is_name(host: bytes) -> bool:
    """Returns whether a Host header can be decoded; the WebSocket protocol fails on others."""
    try:
        host.decode("idna")
    except UnicodeError:
        return False
    return True
