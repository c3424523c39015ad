"""A Kubernetes API server that lists EndpointSlices, in a thread of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "a-token-of-the-test"


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, Any]:
    """One endpoint of a slice, as the API lists it."""
    target = {"targetRef": {"kind": "Pod", "name": pod, "namespace": "serving"}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **target}


def endpoint_slice(
    endpoints: Sequence[dict[str, Any]],
    port: int = 8000,
    family: str = "IPv4",
    name: str = "http",
    more_ports: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """One slice of the Service vllm, as the API lists it."""
    return {
        "metadata": {"name": "vllm-abcde", "labels": {"kubernetes.io/service-name": "vllm", "app": "vllm"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": name, "port": port, "protocol": "TCP"}, *more_ports],
    }


@dataclass
class FakeKubernetes:
    """What the API server lists, and how it fails.

    Attributes:
        slices: of the namespace serving.
        status: of every response.
        hangs: whether it accepts connections without a response.
        paths: requested so far.
    """

    slices: list[dict[str, Any]] = field(default_factory=list)
    status: int = 200
    hangs: bool = False
    paths: list[str] = field(default_factory=list)
    port: int = 0
    _released: threading.Event = field(default_factory=threading.Event)

    def kubeconfig(self, folder: Path) -> Path:
        """Writes a kubeconfig whose context's namespace is serving."""
        file = folder / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "test", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "fake", "user": "test", "namespace": "serving"}}],
            "current-context": "test",
        }
        file.write_text(json.dumps(content))
        return file

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        """Writes one response."""
        self.paths.append(handler.path)
        if self.hangs:
            self._released.wait(30)
            return
        parts = urlsplit(handler.path)
        status, body = self.status, {"kind": "Status", "code": self.status, "message": "secret detail"}
        if handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            status = 401
        elif status == 200:
            assert parts.path == "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices", parts.path
            (selector,) = parse_qs(parts.query)["labelSelector"]
            found = [one for one in self.slices if _matches(one["metadata"]["labels"], selector)]
            body = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": {}, "items": found}
        content = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    @contextmanager
    def serving(self) -> Iterator[FakeKubernetes]:
        """Listens on 127.0.0.1 while the context is open; opened again, on the same port."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self) -> None:
                fake.respond(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._released.clear()
        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield self
        finally:
            self._released.set()
            server.shutdown()
            server.server_close()
            thread.join()


def _matches(labels: dict[str, str], selector: str) -> bool:
    return all(labels.get(name) == value for name, value in (term.split("=") for term in selector.split(",")))
