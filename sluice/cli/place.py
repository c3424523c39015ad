"""Where a running suite is, and what it is shown and trusted with."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc
import httpx

from services.common.addresses import host_port
from services.common.peers import PeerCredentials
from sluice.cli.plan import BadFlag
from sluice.cli.trust import BadTrust, Trust

USUAL_GATEWAY = "http://127.0.0.1:8000"
USUAL_ROUTER = "127.0.0.1:50052"


@dataclass(frozen=True)
class Place:
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

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For gRPC; None is plain text. Raises BadFlag when the files do not fit together."""
        try:
            credentials = self.trust.credentials()
        except BadTrust as error:
            raise BadFlag(str(error)) from error
        if credentials is None and self.router_token:
            return PeerCredentials(None, lambda: self.router_token)
        return credentials


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
