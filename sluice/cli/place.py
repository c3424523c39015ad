"""Where a running suite is, and what it is shown and trusted with."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from services.common.addresses import host_port
from services.common.errors import SluiceError
from services.common.peers import PeerCredentials
from services.common.tls import channel_credentials
from services.common.trust import TlsSettings
from sluice.cli.plan import BadFlag

USUAL_GATEWAY = "http://127.0.0.1:8000"
USUAL_ROUTER = "127.0.0.1:50052"


@dataclass(frozen=True)
class Place:
    """Where the suite is, as the flags say; an empty `router` is the one that the gateway names."""

    gateway: str = USUAL_GATEWAY
    router: str = ""
    api_key: str = field(default="", repr=False)
    router_token: str = field(default="", repr=False)
    tls: Path | None = None

    def check(self) -> None:
        """Raises BadFlag for what can never work."""
        if not _is_url(self.gateway):
            raise BadFlag(f"--gateway {self.gateway} is no URL such as {USUAL_GATEWAY}")
        if self.router and not _is_address(self.router):
            raise BadFlag(f"--router {self.router} is no host:port such as {USUAL_ROUTER}")
        for flag, secret in (("--api-key", self.api_key), ("--router-token", self.router_token)):
            if not (secret.isascii() and secret.isprintable()):
                raise BadFlag(f"{flag} holds characters that cannot be sent: it is one line of ASCII")
        if self.tls is not None and not (self.tls / "ca.pem").is_file():
            raise BadFlag(f"--tls {self.tls} holds no ca.pem; `sluice certs {self.tls}` makes a set")

    def credentials(self) -> PeerCredentials:
        """For gRPC. Raises BadFlag when the files do not fit together."""
        if self.tls is None:
            return PeerCredentials(None, self._token)
        shown = self.tls / "client.pem"
        settings = TlsSettings(
            tls_ca=self.tls / "ca.pem",
            tls_cert=shown if shown.is_file() else None,
            tls_key=self.tls / "client.key" if shown.is_file() else None,
        )
        try:
            made = channel_credentials(settings)
        except SluiceError as error:
            raise BadFlag(f"--tls {self.tls}: {error.message}") from error
        return PeerCredentials(None if made is None else made.tls, self._token)

    def _token(self, callee: str) -> str:
        """An operator's token is good for every call: no service but the router gets to see it."""
        return self.router_token if callee == "router" else ""

    def context(self) -> ssl.SSLContext:
        """For HTTPS: what the gateway's certificate is checked with, and what is shown to a gateway that wants one.

        Takes the files as good: `credentials` looks at them.
        """
        context = ssl.create_default_context(cafile=None if self.tls is None else str(self.tls / "ca.pem"))
        if self.tls is not None and (self.tls / "client.pem").is_file():
            context.load_cert_chain(self.tls / "client.pem", self.tls / "client.key")
        return context


def _is_address(text: str) -> bool:
    place = host_port(text)
    return place is not None and place[1] > 0


def _is_url(text: str) -> bool:
    try:
        httpx.URL(text)
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False
