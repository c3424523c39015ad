"""How the tool's own clients reach the processes of a suite: in plain text, or as an operator with mutual TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import grpc
import httpx

from services.common.rpc.channels import open_channel
from services.common.security.tls import PeerCredentials


@dataclass(frozen=True, slots=True)
class Access:
    """What clients need.

    Attributes:
        context: of HTTPS and WebSocket; None: plain text.
        credentials: of gRPC; None: plain text.
    """

    context: ssl.SSLContext | None = None
    credentials: PeerCredentials | None = None

    def url(self, address: str) -> str:
        """Returns the URL of a gateway."""
        return f"{'http' if self.context is None else 'https'}://{address}"

    def http(self, **options: Any) -> httpx.AsyncClient:
        """Returns an HTTP client."""
        return httpx.AsyncClient(verify=True if self.context is None else self.context, **options)

    def channel(self, address: str, service: str) -> grpc.aio.Channel:
        """Opens a channel to a process of a service."""
        return open_channel(address, self.credentials, callee=service)


PLAIN = Access()
