"""The HTTP server, embedded in a service that handles signals itself."""

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
from services.gateway.http.socket_protocol import BoundedSocketProtocol

if TYPE_CHECKING:
    from services.gateway.settings import GatewaySettings

GIVE_UP_S = 1.0
"""Time after the drain in which streams that were ended send their last events."""

MAX_CLOSE_ITERATIONS = 100
"""Event loop iterations to wait until a listener is closed."""

SOCKET_PATHS = frozenset((b"/v1/responses",))
"""Paths that are served over WebSocket."""

SEND_BUFFER_BYTES = 128 << 10
"""Kernel buffer for a client that does not read; the default would grow to megabytes."""


class Server(Protocol):
    """A listening HTTP server."""

    @property
    def address(self) -> str:
        """Address as host:port."""

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests have ended."""

    def stop(self) -> None:
        """Stops accepting connections; running requests may end."""


class _Server(uvicorn.Server):
    listener: socket.socket

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service's runner."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts down after serving the connections that the kernel has already accepted."""
        guarded: Any = self.config.http_protocol_class
        guarded.server_stops = True
        for connection in await self._last_connections():
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        await super().shutdown(sockets)

    async def _last_connections(self) -> list[socket.socket]:
        """Stops listening and returns the connections that the kernel has already accepted.

        Closing the listener resets the connections in its backlog, so a duplicate handle keeps it open until the
        backlog is empty.
        """
        handle = self.listener.dup()
        for server in self.servers:
            server.close()
        for _ in range(MAX_CLOSE_ITERATIONS):
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
    with contextlib.suppress(OSError):  # the backlog is empty
        while True:
            connection, _ = listener.accept()
            connection.setblocking(False)
            accepted.append(connection)
    return accepted


class HttpServer:
    """HTTP server that embeds uvicorn.

    Args:
        listen: host:port; port 0 selects a free port.
        keep_alive_s: time after which idle connections are closed.
        drain_s: longest time for running requests to end after `stop`.
        tls: None for plain HTTP.
        bounds: bounds on connections.
        reuse_port: whether other processes may listen on the same port.
        pings: seconds between the pings of an idle WebSocket (0: none), and longest wait for their answers.
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
        pings: tuple[float, float] = (15.0, 60.0),
    ) -> None:
        self._socket = bind(listen, reuse_port)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        config = uvicorn.Config(
            RawSendMiddleware(app),
            loop="none",
            http=type("Guarded", (BoundedHttpProtocol,), {"bounds": bounds or Bounds()}),
            ws=BoundedSocketProtocol,
            ws_ping_interval=pings[0] or None,
            ws_ping_timeout=pings[1],
            ws_per_message_deflate=False,  # a short message must not expand to a long one
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,  # client addresses are not used, and no proxy is trusted
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            backlog=4096,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._server.listener = self._socket

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests have ended."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Stops accepting connections; running requests may end."""
        self._server.should_exit = True


def build_server(settings: GatewaySettings, app: ASGIApp, tls: ssl.SSLContext | None) -> Server:
    """Creates the configured server; raises SluiceError if it cannot listen on its address."""
    bounds = Bounds(
        settings.max_connections,
        settings.max_header_kb << 10,
        settings.header_timeout_s,
        settings.body_timeout_s,
        Budget("pipelined_requests", settings.max_pipelined_requests, "--max-pipelined-requests"),
        SOCKET_PATHS,
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
        (settings.comment_every_s, settings.write_timeout_s),
    )


def _granian(settings: GatewaySettings, app: ASGIApp, tls: ssl.SSLContext | None, bounds: Bounds) -> Server:
    try:
        from services.gateway.http.granian_server import GranianServer, refuse_tls
    except ImportError as error:
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            "--http-server granian requires a package that is not installed; install sluice-llm[granian].",
        ) from error
    refuse_tls(tls)
    with bind(settings.listen, settings.reuse_port) as probe:  # raises a clear error if the port is taken
        host, port = probe.getsockname()[:2]
    return GranianServer(app, host, port, settings.drain_s + GIVE_UP_S, bounds)


def bind(listen: str, reuse_port: bool = False) -> socket.socket:
    """Returns a bound socket; raises SluiceError if the address is invalid or cannot be bound."""
    if (address := host_port(listen)) is None:
        raise invalid(f"{listen!r} is not a valid address; use host:port.", param="listen")
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Event loops disable Nagle's algorithm only if the protocol is given. Otherwise a response in two parts, such as a
    # stream's headers and first event, waits 40 ms for the client to acknowledge the first part.
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
            f"Cannot listen on {listen}: the port is in use or the address does not belong to this machine.",
        ) from error
    bound.setblocking(False)
    return bound
