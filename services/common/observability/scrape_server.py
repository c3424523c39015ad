"""The Prometheus endpoint of a process and its `/health`, plain or with TLS certificates that may rotate.

If its port is taken, the service runs without both. prometheus_client's own server would read its certificate once and
perform TLS handshakes in the thread that accepts connections.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from socketserver import ThreadingMixIn
from time import monotonic
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.addresses import join
from services.common.net.http_policy import HttpPolicy, http_policy

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout of each read and write, after which a scraper is disconnected."""
LIFETIME_S = 30.0
"""Longest lifetime of a connection, which serves one request."""
MAX_CONNECTIONS = 32
"""Open connections to a metrics endpoint; further ones are closed, budget `scrape_connections`."""

CONNECTIONS = Budget("scrape_connections", MAX_CONNECTIONS, "")
RETRY_S = 5.0
_PHRASES = {400: "Bad Request", 403: "Forbidden", 415: "Unsupported Media Type", 421: "Misdirected Request"}
HIGHEST_PORT = 65535


Health = Callable[[], Mapping[str, object]]
"""Returns the process's health as a JSON object; `status` is "ok" while it serves. Called on the endpoint's thread."""


serving = False
"""Whether the gRPC server's health service reports SERVING."""


def health_of_server() -> Mapping[str, object]:
    """Returns the health of the gRPC server."""
    return {"status": "ok" if serving else "waiting"}


health: Health = health_of_server
"""The health check of this process; replaced by services that report more or have no gRPC server."""


class ScrapeEndpoint:
    """Serves prometheus_client's default registry at every path except `/health`, which returns the process's health.

    Args:
        listen: host:port; port 0 picks a free one, which is logged.
        tls: None for plain HTTP.

    Raises:
        SluiceError: FAILED_PRECONDITION when `listen` is not host:port.
    """

    def __init__(self, listen: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = listen.rpartition(":")
        if not port.isdigit() or int(port) > HIGHEST_PORT:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"--metrics-listen {listen!r} is not host:port; use an address such as 127.0.0.1:9464.",
            )
        self._listen = listen
        self._tls = tls
        self._host, self._port = host.strip("[]") or "127.0.0.1", int(port)
        self._server: WSGIServer | None = None
        self._closed = threading.Event()
        self._retry_thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts serving; if the address is taken, logs an error and retries until it is free."""
        problem = self._try_listen()
        if not problem:
            return
        log.error(
            "no metrics: cannot listen on %s (%s); retrying every %d s while requests are served. "
            "Choose another --metrics-listen.",
            self._listen, problem, RETRY_S,
        )  # fmt: skip
        self._retry_thread = threading.Thread(target=self._retry, name="metrics-endpoint", daemon=True)
        self._retry_thread.start()

    def _retry(self) -> None:
        while not self._closed.wait(RETRY_S):
            if not self._try_listen():
                return

    def _try_listen(self) -> str:
        """Starts the server; returns the reason when it cannot listen, else an empty string."""
        try:
            app = _app(make_wsgi_app(), http_policy(join(self._host, self._port)))
            self._server = start_server(self._host, self._port, app, self._tls)
        except OSError as error:
            return error.strerror or str(error)
        log.info("metrics are served", extra={"address": join(self._host, self._server.server_port)})
        return ""

    @property
    def port(self) -> int:
        """The port it listens on; 0 while it does not."""
        return 0 if self._server is None else self._server.server_port

    def close(self) -> None:
        """Stops the server; may be called repeatedly."""
        self._closed.set()
        if self._retry_thread is not None:
            self._retry_thread.join(1)
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _app(metrics: Any, policy: HttpPolicy) -> Any:
    """Returns the WSGI app: `/health` responds 200, or 503 while the process does not serve; other paths, metrics."""

    def respond(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        refusal = policy.refusal(_headers(environ), environ["REQUEST_METHOD"], environ["SERVER_PROTOCOL"][5:])
        if refusal is not None:
            body = json.dumps({"error": {"code": refusal.code or "invalid_http", "message": refusal.message}}).encode()
            status = f"{refusal.status} {_PHRASES[refusal.status]}"
            start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return [body]
        if environ.get("PATH_INFO") != "/health":
            response: Iterable[bytes] = metrics(environ, start_response)
            return response
        report = health()
        body = json.dumps(report).encode()
        status = "200 OK" if report.get("status") == "ok" else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return respond


def _headers(environ: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    """Returns the headers that the policy reads; repeated ones are a single value with commas."""
    for name in ("HTTP_HOST", "HTTP_ORIGIN", "HTTP_SEC_FETCH_SITE", "HTTP_SEC_FETCH_MODE", "CONTENT_TYPE"):
        if value := environ.get(name, ""):
            yield name.removeprefix("HTTP_").replace("_", "-").lower().encode(), value.encode("latin-1")


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses request logs."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread of its own, up to `MAX_CONNECTIONS`; further ones are closed."""

    daemon_threads = True
    request_queue_size = 128
    context: ssl.SSLContext | None = None

    def __init__(self, *args: Any, **more: Any) -> None:
        self._opened_at: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a connection, or closes it if there are too many."""
        with self._lock:
            is_refused = len(self._opened_at) >= CONNECTIONS.limit
            if not is_refused:
                self._opened_at[request] = monotonic()
        if is_refused:
            CONNECTIONS.count()
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections that are too old; called at least twice a second."""
        ended_at = monotonic() - LIFETIME_S
        with self._lock:
            late = [request for request, opened_at in self._opened_at.items() if opened_at < ended_at]
        for request in late:
            with contextlib.suppress(OSError):  # closed meanwhile
                socket.socket.shutdown(request, socket.SHUT_RDWR)  # its thread is still reading or writing

    def close_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._opened_at.pop(request, None)
        super().close_request(request)

    def get_request(self) -> tuple[Any, Any]:
        """Returns a connection whose TLS handshake runs in its own thread, so that a slow one delays no other."""
        connection, address = super().get_request()
        connection.settimeout(TIMEOUT_S)
        if self.context is None:
            return connection, address
        return self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs at debug level: port scans and disconnected clients are not worth a traceback."""
        log.debug("a scrape failed", exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def start_server(host: str, port: int, app: Any, context: ssl.SSLContext | None = None) -> WSGIServer:
    """Serves a WSGI application from a new thread; raises OSError when it cannot listen.

    Args:
        context: None for plain HTTP.
    """
    server: _Server = make_server(host, port, app, _ServerV6 if ":" in host else _Server, _QuietHandler)
    server.context = context
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
