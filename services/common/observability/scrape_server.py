"""The Prometheus endpoint of a process, and its `/health`. A port that is taken costs both, never the service."""

from __future__ import annotations

import json
import logging
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import make_wsgi_app

from services.common.errors import ErrorKind, SluiceError
from services.common.net.addresses import join
from services.common.observability.scrape_tls import start_server

log = logging.getLogger(__name__)

AGAIN_S = 5.0
HIGHEST_PORT = 65535


Health = Callable[[], Mapping[str, object]]
"""Says how a process is doing, as JSON can; `status` is "ok" when it serves. Called from the endpoint's thread."""


serving = False
"""Whether requests are welcome, as the gRPC server's health says."""


def health_of_server() -> Mapping[str, object]:
    """Nothing more to say than the server's health."""
    return {"status": "ok" if serving else "waiting"}


health: Health = health_of_server
"""Of this process; a service that has more to say, or no gRPC server, replaces it."""


class ScrapeEndpoint:
    """Serves prometheus_client's default registry at every path but `/health`, which says how the process is doing.

    Args:
        listen: host:port; port 0 takes a free one, which the log says.
        tls: None for plain HTTP.

    Raises:
        SluiceError: FAILED_PRECONDITION when this is no address.
    """

    def __init__(self, listen: str, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = listen.rpartition(":")
        if not port.isdigit() or int(port) > HIGHEST_PORT:
            raise SluiceError(
                ErrorKind.FAILED_PRECONDITION,
                f"--metrics-listen {listen!r} is not host:port; 127.0.0.1:9464 would be.",
            )
        self._listen = listen
        self._tls = tls
        self._host, self._port = host.strip("[]") or "127.0.0.1", int(port)
        self._server: WSGIServer | None = None
        self._closed = threading.Event()
        self._waiting: threading.Thread | None = None

    def start(self) -> None:
        """Serves from now on; when the address is taken says so and tries again until it is free."""
        problem = self._listened()
        if not problem:
            return
        log.error(
            "no metrics: cannot listen on %s (%s); requests are served, and it is tried again every %d s. "
            "Choose another --metrics-listen.",
            self._listen, problem, AGAIN_S,
        )  # fmt: skip
        self._waiting = threading.Thread(target=self._wait, name="metrics-endpoint", daemon=True)
        self._waiting.start()

    def _wait(self) -> None:
        while not self._closed.wait(AGAIN_S):
            if not self._listened():
                return

    def _listened(self) -> str:
        """Empty when it listens now, else why not."""
        try:
            self._server = start_server(self._host, self._port, _app(make_wsgi_app()), self._tls)
        except OSError as error:
            return error.strerror or str(error)
        log.info("metrics are served", extra={"address": join(self._host, self._server.server_port)})
        return ""

    @property
    def port(self) -> int:
        """Where it listens; 0 while it does not."""
        return 0 if self._server is None else self._server.server_port

    def close(self) -> None:
        """Ends it; may be called twice."""
        self._closed.set()
        if self._waiting is not None:
            self._waiting.join(1)
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _app(metrics: Any) -> Any:
    """The WSGI application: `/health` with 200 or, while the process does not serve, 503; metrics everywhere else."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/health":
            answered: Iterable[bytes] = metrics(environ, start_response)
            return answered
        said = health()
        body = json.dumps(said).encode()
        status = "200 OK" if said.get("status") == "ok" else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return answer
