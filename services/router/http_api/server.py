"""The HTTP server of the API: uvicorn, with bounds on connections and headers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.common.budgets import BudgetPool
from services.common.errors import ErrorKind, SluiceError, invalid
from services.common.net.addresses import host_port, join
from services.common.rpc.auth_interceptor import caller_check
from services.common.security.tls import server_context
from services.common.tasks import TaskOwner
from services.router.http_api.app import HttpApi
from services.router.http_api.bodies import BodyLimits
from services.router.router import Router
from services.router.service import RouterService
from services.router.settings import RouterSettings

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 60
LINGER_S = 1.0
MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Unavailable"}


class BoundedConnection(HttpToolsProtocol):
    """Serves one connection; closes it if it is one too many, or if a request's headers are too long or too slow.

    The URI names of a client certificate are in the ASGI scope's state as `peer_uris`.
    """

    max_connections = 1_024
    timeout_s = 10.0

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._head_bytes = 0
        self._in_head = True
        self._head_due: asyncio.TimerHandle | None = None
        self._refused = False

    @property
    def _closed(self) -> bool:
        return self._refused or self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        names = (transport.get_extra_info("peercert") or {}).get("subjectAltName", ())
        self.app_state = {**self.app_state, "peer_uris": [value for kind, value in names if kind == "URI"]}
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too_many_connections", "The router has too many open connections; retry later.")
            return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_due is None:
                self._start_timer()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS and not self._closed:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._cancel_timer()
        if not self._closed:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._closed:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if not self._closed:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", "This is not a valid HTTP request.")

    def _should_upgrade(self) -> bool:
        return False

    def _unsupported_upgrade_warning(self) -> None:
        """Logs nothing: clients may offer any upgrade."""

    def _start_timer(self) -> None:
        self._head_due = self.loop.call_later(self.timeout_s, self._refuse_late)

    def _cancel_timer(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _refuse_late(self) -> None:
        self._refuse(408, "headers_timeout", f"The headers did not arrive within {self.timeout_s:g} s.")

    def _refuse_head(self) -> None:
        limits = f"{MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines"
        self._refuse(431, "headers_too_large", f"The headers exceed {limits}; send fewer or shorter ones.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Sends an error and closes the connection; a request that is being served ends as after a disconnect."""
        self._cancel_timer()
        if self._closed:
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            body = json.dumps({"error": {"code": code, "message": message, "param": None}})
            retry = "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(
                f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n{body}".encode()
            )
        if self.transport.can_write_eof() and status != 503:
            self.transport.write_eof()  # closing with unread data would reset the connection, and lose the response
            self.loop.call_later(LINGER_S, self.transport.abort)
        else:
            self.transport.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the service's runner."""
        yield


class HttpApiServer:
    """Listens and serves an application; raises SluiceError if it cannot listen.

    Args:
        tls: None for plain HTTP.
        drain_s: longest time for running requests to end.
        on_death: called if the server fails.
    """

    def __init__(
        self,
        app: ASGIApp,
        listen: str,
        tls: ssl.SSLContext | None,
        max_connections: int,
        timeout_s: float,
        drain_s: float,
        on_death: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._socket = _bind(listen)
        host, self.port = self._socket.getsockname()[:2]
        bounds = {"max_connections": max_connections, "timeout_s": timeout_s}
        config = uvicorn.Config(
            app,
            loop="none",
            http=type("Bounded", (BoundedConnection,), bounds),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            log_level="error",  # it logs a warning for every request that is not HTTP
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(drain_s)),
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._tasks = TaskOwner(on_death)
        log.info("HTTP API listens", extra={"address": join(host, self.port), "tls": tls is not None})

    def start(self) -> None:
        """Starts serving."""
        self._serving = self._tasks.spawn(self._server.serve(sockets=[self._socket]), "http-api")

    async def stop(self) -> None:
        """Stops accepting connections, and waits for running requests."""
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        await self._tasks.close()


def http_server(
    settings: RouterSettings,
    router: Router,
    service: RouterService,
    on_death: Callable[[str, BaseException], None] | None = None,
) -> HttpApiServer | None:
    """Returns the server of the HTTP API; None if it is off.

    Raises:
        SluiceError: it cannot listen on its address, or a file of its tokens or certificates cannot be used.
    """
    if not settings.http_listen:
        return None
    memory = BudgetPool(
        "body_bytes",
        max(settings.http_max_body_memory_mb, settings.http_max_body_mb) << 20,
        "--http-max-body-memory-mb",
    )
    limits = BodyLimits(settings.http_max_body_mb << 20, memory, settings.http_timeout_s)
    api = HttpApi(service, caller_check(settings), limits, router.ready.is_set, settings.open_health)
    tls = server_context(settings)
    bounds = (settings.http_max_connections, settings.http_timeout_s, settings.drain_s)
    return HttpApiServer(api.app(), settings.http_listen, tls, *bounds, on_death)


def _bind(listen: str) -> socket.socket:
    if (address := host_port(listen)) is None:
        raise invalid(f"--http-listen {listen!r} is not host:port.", param="http-listen")
    bound = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM, 6)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise SluiceError(
            ErrorKind.FAILED_PRECONDITION,
            f"Cannot listen on {listen}: the port is taken or the address is not one of this machine.",
        ) from error
    bound.setblocking(False)
    return bound
