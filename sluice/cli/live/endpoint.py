"""Where a running suite is, and what it is shown and trusted with."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from services.common.net.addresses import host_port
from services.common.security.tls import PeerCredentials
from sluice.cli.trust import BadTrust, Trust
from sluice.cli.up.plan import BadFlag

USUAL_GATEWAY = "http://127.0.0.1:8000"
USUAL_ROUTER = "127.0.0.1:50052"


@dataclass(frozen=True)
class Endpoint:
    """Where the suite is, as the flags say; an empty `router` is the one that the gateway names."""

    gateway: str = USUAL_GATEWAY
    router: str = ""
    api_key: str = field(default="", repr=False)
    router_token: str = field(default="", repr=False)
    trust: Trust = field(default_factory=Trust)

    def check(self) -> None:
        """Raises BadFlag for what can never work."""
        if not _is_url(self.gateway):
            raise BadFlag(f"--gateway {self.gateway} is no URL such as {USUAL_GATEWAY}")
        if self.router and not _is_address(self.router):
            raise BadFlag(f"--router {self.router} is no host:port such as {USUAL_ROUTER}")
        for flag, secret in (("--api-key", self.api_key), ("--router-token", self.router_token)):
            if not (secret.isascii() and secret.isprintable()):
                raise BadFlag(f"{flag} holds characters that cannot be sent: it is one line of ASCII")
        try:
            self.trust.check()
        except BadTrust as error:
            raise BadFlag(str(error)) from error

    def credentials(self) -> PeerCredentials:
        """For gRPC. Raises BadFlag when the files do not fit together."""
        try:
            made = self.trust.credentials()
        except BadTrust as error:
            raise BadFlag(str(error)) from error
        return PeerCredentials(None if made is None else made.tls, self._token)

    def _token(self, callee: str) -> str:
        """An operator's token is good for every call: no service but the router gets to see it."""
        return self.router_token if callee == "router" else ""


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
