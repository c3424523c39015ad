"""The address and credentials of a running suite."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from services.common.net.addresses import host_port
from services.common.security.tls import PeerCredentials
from sluice.cli.errors import BadFlag
from sluice.cli.flags import flag
from sluice.cli.suites import running_suites
from sluice.cli.trust import Trust

DEFAULT_GATEWAY = "http://127.0.0.1:8000"
DEFAULT_ROUTER = "127.0.0.1:50052"


@dataclass(frozen=True)
class Endpoint:
    """Holds the flags for reaching a suite; an empty `router` means the one that the gateway reports."""

    gateway: str = flag(
        "",
        f"URL of the gateway; default: of the suite that runs on this machine, else {DEFAULT_GATEWAY}",
        envvar="SLUICE_GATEWAY",
        metavar="URL",
    )
    router: str = flag(
        "",
        "address of a router; empty: the one that the gateway reports",
        envvar="SLUICE_ROUTER",
        metavar="HOST:PORT",
    )
    api_key: str = flag("", "API key for the gateway, if it requires one", envvar="SLUICE_API_KEY", repr=False)
    router_token: str = flag("", "token for the router, if it requires one", envvar="SLUICE_ROUTER_TOKEN", repr=False)
    trust: Trust = field(default_factory=Trust)

    def located(self) -> Endpoint:
        """Returns the endpoint with the address, and the certificates, of the only suite that runs if none is given.

        Raises:
            BadFlag: several suites run.
        """
        if self.gateway:
            return self
        suites = running_suites()
        if len(suites) > 1:
            urls = ", ".join(suite.url for suite in suites)
            raise BadFlag(f"{len(suites)} suites run on this machine: {urls}; choose one with --gateway")
        if not suites:
            return replace(self, gateway=DEFAULT_GATEWAY)
        [suite] = suites
        trust = replace(self.trust, folder=Path(suite.tls)) if suite.tls and not self.trust.encrypted else self.trust
        return replace(self, gateway=suite.url, trust=trust)

    def check(self) -> None:
        """Raises BadFlag for invalid flags."""
        if self.gateway and not _is_url(self.gateway):
            raise BadFlag(f"--gateway {self.gateway} is not a URL such as {DEFAULT_GATEWAY}")
        if self.router and not _is_address(self.router):
            raise BadFlag(f"--router {self.router} is not a host:port such as {DEFAULT_ROUTER}")
        for name, secret in (("--api-key", self.api_key), ("--router-token", self.router_token)):
            if not (secret.isascii() and secret.isprintable()):
                raise BadFlag(f"{name} contains characters that cannot be sent; it must be one line of ASCII")
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
    import httpx  # slow, and not needed for --help

    try:
        httpx.URL(text)
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        return False
