"""The address and credentials of a running suite."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from services.common.net.addresses import host_port
from services.common.security.tls import PeerCredentials
from sluice.cli.errors import BadFlag
from sluice.cli.trust import Trust

DEFAULT_GATEWAY = "http://127.0.0.1:8000"
DEFAULT_ROUTER = "127.0.0.1:50052"


@dataclass(frozen=True)
class Endpoint:
    """Holds the flags for reaching a suite; an empty `router` means the one that the gateway reports."""

    gateway: str = DEFAULT_GATEWAY
    router: str = ""
    api_key: str = field(default="", repr=False)
    router_token: str = field(default="", repr=False)
    trust: Trust = field(default_factory=Trust)

    def check(self) -> None:
        """Raises BadFlag for invalid flags."""
        if not _is_url(self.gateway):
            raise BadFlag(f"--gateway {self.gateway} is not a URL such as {DEFAULT_GATEWAY}")
        if self.router and not _is_address(self.router):
            raise BadFlag(f"--router {self.router} is not a host:port such as {DEFAULT_ROUTER}")
        for flag, secret in (("--api-key", self.api_key), ("--router-token", self.router_token)):
            if not (secret.isascii() and secret.isprintable()):
                raise BadFlag(f"{flag} contains characters that cannot be sent; it must be one line of ASCII")
        self.trust.check()

    def credentials(self) -> PeerCredentials:
        """Returns credentials for gRPC; raises BadFlag if the files do not match."""
        credentials = self.trust.credentials()
        return PeerCredentials(None if credentials is None else credentials.tls, self._token)

    def _token(self, callee: str) -> str:
        """Returns the token for a callee; only the router receives it, as an operator's token allows every call."""
        return self.router_token if callee == "router" else ""


def _is_address(text: str) -> bool:
    address = host_port(text)
    return address is not None and address[1] > 0


def _is_url(text: str) -> bool:
    try:
        httpx.URL(text)
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False
