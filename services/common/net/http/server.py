"""uvicorn, embedded in a service that handles signals itself, with bounds on its connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.common.net.addresses import host_port, join
from services.common.net.http.bounds import Bounds
from services.common.net.http.connection import BoundedHttpProtocol

MAX_CLOSE_ITERATIONS = 100
"""Event loop iterations to wait until a listener is closed."""

SEND_BUFFER_BYTES = 128 << 10
"""Kernel buffer for a client that does not read; the default would grow to megabytes."""

NO_SOCKETS: Mapping[str, Any] = {"ws": "none"}


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


class BoundedServer:
    """HTTP server that embeds uvicorn.

    Args:
        listener: bound socket, see `bind`.
        keep_alive_s: time after which idle connections are closed.
        drain_s: longest time for running requests to end after `stop`.
        tls: None for plain HTTP.
        bounds: bounds on connections.
        connection: serves a connection, and formats the errors sent without calling the application.
        sockets: uvicorn's settings of WebSockets.

    Attributes:
        address: where it listens, as host:port.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        keep_alive_s: int,
        drain_s: float,
        tls: ssl.SSLContext | None = None,
        bounds: Bounds | None = None,
        connection: type[BoundedHttpProtocol] = BoundedHttpProtocol,
        sockets: Mapping[str, Any] = NO_SOCKETS,
    ) -> None:
        self._socket = listener
        host, port = listener.getsockname()[:2]
        self.address = join(host, port)
        config = uvicorn.Config(
            app,
            interface="asgi3",  # an application need not be a coroutine function
            loop="none",
            http=type("Bounded", (connection,), {"bounds": bounds or Bounds()}),
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="error",  # it logs a warning for every request that is not HTTP
            server_header=False,
            date_header=False,
            proxy_headers=False,  # client addresses are not used, and no proxy is trusted
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            backlog=4096,
            **sockets,
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


def bind(listen: str, reuse_port: bool = False, param: str = "listen") -> socket.socket:
    """Returns a bound socket.

    Args:
        listen: host:port; port 0 selects a free port.
        reuse_port: whether other processes may listen on the same port.
        param: the setting that contains `listen`.

    Raises:
        SluiceError: the address is invalid or cannot be bound.
    """
    if (address := host_port(listen)) is None:
        raise invalid(f"{listen!r} is not a valid address; use host:port.", param=param)
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
