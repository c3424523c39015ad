"""Prometheus' endpoint over TLS, with certificates that may rotate."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""A scraper that says nothing for so long is given up, in the handshake too."""


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    context: ssl.SSLContext

    def get_request(self) -> tuple[Any, Any]:
        """A connection whose handshake happens in its own thread, so that nobody holds up the others."""
        connection, address = super().get_request()
        connection.settimeout(PATIENCE_S)
        return self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A stranger, or somebody who left: not worth a traceback."""
        log.debug("a scrape failed", exc_info=True)


class _ServerV6(_Server):
    address_family = socket.AF_INET6


def start_tls_server(host: str, port: int, context: ssl.SSLContext) -> WSGIServer:
    """Serves prometheus_client's default registry from a thread of its own; OSError when it cannot listen."""
    server: _Server = make_server(host, port, make_wsgi_app(), _ServerV6 if ":" in host else _Server, _Silent)
    server.context = context
    threading.Thread(target=server.serve_forever, name="metrics-tls", daemon=True).start()
    return server
