"""The Prometheus endpoint of a process and its `/health`, plain or with TLS certificates that may rotate.

If its port is taken, the service runs without both. prometheus_client's own server would read its certificate once and
perform TLS handshakes in the thread that accepts connections.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from services.common.errors import ErrorKind, SluiceError
from services.common.net.addresses import join

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout of reads and of the TLS handshake, after which a scraper is disconnected."""

log = logging.getLogger(__name__)

RETRY_S = 5.0
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
            self._server = start_server(self._host, self._port, _app(make_wsgi_app()), self._tls)
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


def _app(metrics: Any) -> Any:
    """Returns the WSGI app: `/health` responds 200, or 503 while the process does not serve; other paths, metrics."""

    def respond(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/health":
            response: Iterable[bytes] = metrics(environ, start_response)
            return response
        report = health()
        body = json.dumps(report).encode()
        status = "200 OK" if report.get("status") == "ok" else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return respond


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Suppresses request logs."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    context: ssl.SSLContext | None = None

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
