"""granian as the HTTP server: the connections are Rust's, the application runs in this loop.

It bounds what waits for a slow client and hears disconnects, but cannot drop a connection on request: a client that
is cut off receives the end of the response instead. Headers are bounded in bytes only, connections not at all.
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

LEAST_BUFFER_BYTES = 8192
LOOK_AGAIN_S = 0.05


class GranianServer:
    """granian, embedded.

    Args:
        host: to listen on.
        port: not 0.
        drain_s: longest that running requests get after `stop`.
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
                max_buffer_size=max(bounds.header_bytes, LEAST_BUFFER_BYTES),
            ),
            log_enabled=False,
        )

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests are done."""
        serving = asyncio.get_running_loop().create_task(self._server.serve())
        await self._stop.wait()
        self._server.stop()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._drain_s):
                while self._running:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_AGAIN_S)
        except TimeoutError:
            pass
        await serving

    def stop(self) -> None:
        """Takes no new connections and lets running requests finish."""
        self._stop.set()

    async def _serve_one(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:  # granian's own send is no coroutine
            await send(message)

        self._running += 1
        try:
            await self._app(scope, receive, sending)
        finally:
            self._running -= 1


def refuse_tls(tls: ssl.SSLContext | None) -> None:
    """SluiceError when HTTPS is asked for: its certificates could not rotate here."""
    if tls is not None:
        raise SluiceError(ErrorKind.FAILED_PRECONDITION, "HTTPS needs --http-server uvicorn.")
