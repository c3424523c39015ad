"""granian as the HTTP server: it handles connections in Rust and runs the application in this event loop.

It bounds the data pending for a slow client and reports disconnects, but has no way to abort a connection: a client
that would be disconnected gets the end of the response instead. It bounds headers in bytes only, and not the number of
connections.
"""

from __future__ import annotations

import asyncio
import ssl

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server as Granian
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.common.errors import ErrorKind, SluiceError
from services.common.net.addresses import join
from services.gateway.http.connection import Bounds
from services.gateway.http.inline_sender import RawSendMiddleware

MIN_BUFFER_BYTES = 8192
DRAIN_POLL_S = 0.05


class GranianServer:
    """HTTP server that embeds granian.

    Args:
        host: address to listen on.
        port: port to listen on; not 0.
        drain_s: longest time for running requests to end after `stop`.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, drain_s: float, bounds: Bounds) -> None:
        self.address = join(host, port)
        self._app = RawSendMiddleware(app)
        self._drain_s = drain_s
        self._running = 0
        self._stop = asyncio.Event()
        self._server = Granian(
            self._serve_one,
            address=host,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=4096,
            backpressure=bounds.connections,
            http1_settings=HTTP1Settings(
                header_read_timeout=round(bounds.header_timeout_s * 1000),
                max_buffer_size=max(bounds.header_bytes, MIN_BUFFER_BYTES),
            ),
            log_enabled=False,
        )

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests have ended."""
        serving = asyncio.get_running_loop().create_task(self._server.serve())
        await self._stop.wait()
        self._server.stop()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._drain_s):
                while self._running:  # noqa: ASYNC110
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            pass
        await serving

    def stop(self) -> None:
        """Stops accepting connections; running requests may end."""
        self._stop.set()

    async def _serve_one(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def awaitable_send(message: Message) -> None:  # granian's send is not a coroutine function
            await send(message)

        self._running += 1
        try:
            await self._app(scope, receive, awaitable_send)
        finally:
            self._running -= 1


def refuse_tls(tls: ssl.SSLContext | None) -> None:
    """Raises SluiceError if HTTPS is configured, because granian cannot reload rotated certificates."""
    if tls is not None:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "granian does not support HTTPS with rotating certificates; use --http-server uvicorn.",
        )
