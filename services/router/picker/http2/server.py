"""A server of gRPC calls over HTTP/2.

grpc.aio passes every message of a call through its core, its poller thread and a task switch, and a request of Envoy is
about ten messages. Measured back to back behind Envoy on two cores, all else equal (benchmarks/picker.py): this server
instead of grpc.aio's brought the processor time of the entire picker process from 1.72 to 1.09 ms for a request of 200
tokens (500 a second), from 3.50 to 2.52 ms for 10,000 tokens and from 7.41 to 5.31 ms for 100,000, and the first byte at
500 requests a second from 7.7 / 22.4 to 4.9 / 9.8 ms (p50 / p95).

It serves what a proxy's calls need, and no more: streams of messages without compression, deadlines, flow control,
TLS with ALPN, and limits on hostile peers (`flood_guard`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.net.addresses import host_port, join
from services.common.rpc.auth_interceptor import OPEN_SERVICES, CallerCheck, caller_check
from services.common.security.tls import server_context
from services.common.settings import GrpcServiceSettings
from services.router.picker.http2.call import UNKNOWN_METHOD, CallHandler, GrpcCall
from services.router.picker.http2.connection import ConnectionLimits, Http2Connection
from services.router.picker.http2.header_blocks import CallHead

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 1_024
ABORT_S = 1.0

StartCall = Callable[[GrpcCall], CallHandler]


class Http2Server:
    """Listens, and starts the handlers of calls.

    Args:
        listen: host:port.
        methods: what serves a call, by ``/service/method``.
        streams: most calls of a connection at the same time.
    """

    def __init__(
        self, settings: GrpcServiceSettings, listen: str, methods: Mapping[str, StartCall], streams: int
    ) -> None:
        self._settings = settings
        self._listen = listen
        self._methods = methods
        largest = settings.max_message_mb << 20
        self._limits = ConnectionLimits(streams, largest, 4 * largest, settings.max_connection_age_s)
        self._check: CallerCheck | None = caller_check(settings)
        self._open = OPEN_SERVICES if settings.open_health else ()
        self._connections: set[Http2Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Starts listening; raises SluiceError when the address cannot be bound or TLS files are invalid."""
        if (parsed := host_port(self._listen)) is None:
            raise invalid(f"--picker-listen {self._listen!r} is not host:port.", param="picker-listen")
        tls = server_context(self._settings, protocols=("h2",))
        try:
            self._server = await asyncio.get_running_loop().create_server(self._connected, *parsed, ssl=tls)
        except OSError as error:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"Cannot listen on {self._listen}: the port is taken or the address is not one of this machine.",
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]
        log.info("picker listens", extra={"address": join(parsed[0], self.port), "tls": tls is not None})

    def _connected(self) -> asyncio.Protocol:
        if len(self._connections) >= MOST_CONNECTIONS:
            log.warning("a connection is refused: %d are open", MOST_CONNECTIONS)
            return _Refusal()
        return Http2Connection(self._serve, self._connections, self._limits)

    def _serve(self, call: GrpcCall, head: CallHead, connection: Http2Connection) -> None:
        if head.problem:
            call.fail(invalid(head.problem))
            return
        start = self._methods.get(head.path)
        if start is None:
            call.finish(UNKNOWN_METHOD, "This port has no such method.")
            return
        if self._check is not None and not head.path.startswith(self._open):
            try:
                self._check.admit(head.path, head.authorization, connection.peer_uris)
            except SluiceError as error:
                call.fail(error)
                return
        try:
            call.start(start(call))
        except SluiceError as error:
            call.fail(error)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets running ones finish for `grace_s` seconds, then cancels them."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.drain()
        if self._connections:
            await asyncio.wait([each.closed for each in self._connections], timeout=grace_s)
        for connection in list(self._connections):
            connection.abort()
        if self._connections:  # their calls end now
            await asyncio.wait([each.closed for each in self._connections], timeout=ABORT_S)


class _Refusal(asyncio.Protocol):
    """Closes a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
