"""The HTTP server of the scrape endpoint, plain or with TLS certificates that may rotate."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Timeout of reads and of the TLS handshake, after which a scraper is disconnected."""


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
