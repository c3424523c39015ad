"""The HTTP server inside a service that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from services.common.budgets import Budget
from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.net.addresses import host_port
from services.gateway.http.connection import BoundedHttpProtocol, Bounds
from services.gateway.http.inline_sender import RawSendMiddleware

if TYPE_CHECKING:
    from services.gateway.settings import GatewaySettings

GIVE_UP_S = 1.0
"""After the drain, streams that were ended get to say so."""

TURNS_TO_CLOSE = 100
"""Of the loop, until it has closed a listener."""

SEND_BUFFER_BYTES = 128 << 10
"""What the kernel keeps for a client that does not read; by itself it would grow to megabytes."""


class Server(Protocol):
    """One listening HTTP server."""

    @property
    def address(self) -> str:
        """host:port."""

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests are done."""

    def stop(self) -> None:
        """Takes no new connections and lets running requests finish."""


class _Server(uvicorn.Server):
    listener: socket.socket

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the service's runner."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Connections that the kernel has accepted already are served."""
        guarded: Any = self.config.http_protocol_class
        guarded.server_stops = True
        for connection in await self._last_connections():
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        await super().shutdown(sockets)

    async def _last_connections(self) -> list[socket.socket]:
        """Ends listening, and gives the connections that the kernel has accepted already.

        Closing the listener resets the connections in its queue. So a second handle keeps it open until the queue is
        empty, and is closed then.
        """
        handle = self.listener.dup()
        for server in self.servers:
            server.close()
        for _ in range(TURNS_TO_CLOSE):
            if self.listener.fileno() < 0:
                break
            await asyncio.sleep(0)
        accepted = _accept_all(handle)
        handle.close()
        return accepted

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made: asyncio.Protocol = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return made


def _accept_all(listener: socket.socket) -> list[socket.socket]:
    accepted: list[socket.socket] = []
    with contextlib.suppress(OSError):  # the queue is empty
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            accepted.append(connection)
    return accepted


class HttpServer:
    """uvicorn.

    Args:
        listen: host:port; port 0 picks a free one.
        keep_alive_s: idle connections are closed after this long.
        drain_s: longest that running requests get after `stop`.
        tls: None for plain HTTP.
        bounds: of connections.
        reuse_port: other processes may listen there, too.
    """

    def __init__(
        self,
        app: ASGIApp,
        listen: str,
        keep_alive_s: int,
        drain_s: float,
        tls: ssl.SSLContext | None = None,
        bounds: Bounds | None = None,
        reuse_port: bool = False,
    ) -> None:
        self._socket = bind(listen, reuse_port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        config = uvicorn.Config(
            RawSendMiddleware(app),
            loop="none",
            http=type("Guarded", (BoundedHttpProtocol,), {"bounds": bounds or Bounds()}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # client addresses are not used, and no proxy is trusted to set them
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            backlog=4096,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._server.listener = self._socket

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests are done."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Takes no new connections and lets running requests finish."""
        self._server.should_exit = True


def build_server(settings: GatewaySettings, app: ASGIApp, tls: ssl.SSLContext | None) -> Server:
    """The server that the settings choose; SluiceError when its address cannot be had."""
    bounds = Bounds(
        settings.max_connections,
        settings.max_header_kb << 10,
        settings.header_timeout_s,
        settings.body_timeout_s,
        Budget("pipelined_requests", settings.max_pipelined_requests, "--max-pipelined-requests"),
    )
    if settings.http_server == "granian":
        return _granian(settings, app, tls, bounds)
    return HttpServer(
        app,
        settings.listen,
        settings.keep_alive_s,
        settings.drain_s + GIVE_UP_S,
        tls,
        bounds,
        settings.reuse_port,
    )


def _granian(settings: GatewaySettings, app: ASGIApp, tls: ssl.SSLContext | None, bounds: Bounds) -> Server:
    try:
        from services.gateway.http.granian_server import GranianServer, refuse_tls
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION, "--http-server granian needs the package: install sluice-llm[granian]."
        ) from error
    refuse_tls(tls)
    with bind(settings.listen, settings.reuse_port) as found:  # says clearly when the port is taken
        host, port = found.getsockname()[:2]
    return GranianServer(app, host, port, settings.drain_s + GIVE_UP_S, bounds)


def bind(listen: str, reuse_port: bool = False) -> socket.socket:
    """A bound socket; SluiceError when the address is none or cannot be had."""
    if (place := host_port(listen)) is None:
        raise invalid(f"{listen!r} is no host:port.", param="listen")
    host, port = place
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Event loops turn Nagle's algorithm off only where the protocol is named; with it an answer in two parts, such as a
    # stream's head and its first event, waits 40 ms for the client's acknowledgement of the first.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Cannot listen on {listen}: the port is taken or the address is not one of this machine.",
        ) from error
    bound.setblocking(False)
    return bound
