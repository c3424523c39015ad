"""uvicorn inside a service that handles signals itself."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import ErrorKind, SluiceError, invalid


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the service's runner."""
        yield


class HttpServer:
    """One listening HTTP server.

    Args:
        listen: host:port; port 0 picks a free one.
        keep_alive_s: idle connections are closed after this long.
        drain_s: longest that running requests get after `stop`.
        tls: None for plain HTTP.
    """

    def __init__(
        self, app: ASGIApp, listen: str, keep_alive_s: int, drain_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket = _bind(listen)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=max(1, round(drain_s)),
            backlog=4096,
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)

    async def serve(self) -> None:
        """Serves until `stop`, then until running requests are done."""
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """Takes no new connections and lets running requests finish."""
        self._server.should_exit = True


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise invalid(f"{listen!r} is no host:port.", param="listen")
    host = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, int(port)))
    except OSError as error:
        bound.close()
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Cannot listen on {listen}: the port is taken or the address is not one of this machine.",
        ) from error
    bound.setblocking(False)
    return bound
