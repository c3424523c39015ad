"""Checks the Host and Origin headers of requests.

A web page can make a browser send requests to a gateway that only its machine can reach: as a form or plain text to its
address, or to a name of the page's site that resolves to a loopback address (DNS rebinding). A gateway on loopback
therefore serves only its own names, and rejects requests from pages of other sites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from services.common.errors import quoted
from services.common.net.addresses import host_port, is_loopback
from services.gateway.http.errors import plain_error_response

if TYPE_CHECKING:
    from services.gateway.settings import GatewaySettings

ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Accepted Host and Origin headers.

    Attributes:
        checked: whether anything but the syntax of the Host header is checked.
        loopback: whether the gateway listens on loopback, so that addresses in Host headers must be loopback addresses.
            Elsewhere any address is accepted, because DNS rebinding needs a name.
        hosts: accepted names, lower case.
        origins: accepted origins as browsers send them, lower case.
    """

    checked: bool = False
    loopback: bool = False
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def serves(self, name: str) -> bool:
        """Returns whether the host of a Host header, without its port, is accepted."""
        if not self.checked or ANY in self.hosts or name in self.hosts:
            return True
        address = name.strip("[]")
        return is_loopback(address) or (not self.loopback and _is_address(address))

    def trusts(self, origin: str, host: str) -> bool:
        """Returns whether web pages of an origin may send requests.

        Args:
            host: Host header of the request, lower case.
        """
        if not self.checked or ANY in self.origins or origin in self.origins:
            return True
        return origin in (f"http://{host}", f"https://{host}")


def host_policy(settings: GatewaySettings) -> HostPolicy:
    """Returns the policy of the settings."""
    address = host_port(settings.listen)
    loopback = address is not None and is_loopback(address[0])
    hosts = frozenset(_lower(settings.allowed_hosts))
    origins = frozenset(_lower(settings.allowed_origins))
    return HostPolicy(loopback or bool(hosts) or bool(origins), loopback, hosts or _any_unless(loopback), origins)


class HostMiddleware:
    """Rejects requests without exactly one well-formed Host header, and those that the policy does not accept.

    Args:
        on_refused: called with "host" or "origin" for each rejected request.
    """

    def __init__(self, app: ASGIApp, policy: HostPolicy, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._policy = policy
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rejection = self._rejection(scope) if scope["type"] in ("http", "websocket") else None
        if rejection is None:
            await self._app(scope, receive, send)
        else:
            await rejection(scope, receive, send)

    def _rejection(self, scope: Scope) -> Response | None:
        hosts, origins = [], []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):
            return self._malformed("The request must have exactly one Host header.")
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        match = _HOST.fullmatch(host)
        if match is None:
            return self._malformed("The Host header must be a host name or address with an optional port.")
        if hosts and not self._policy.serves(match[1]):
            self._on_refused("host")
            return plain_error_response(
                f"This gateway does not accept the host {quoted(match[1])}; use its address, or start it with "
                "--allowed-hosts.",
                421,
                code="host_not_allowed",
            )
        for origin in origins:
            if not self._policy.trusts(origin.decode("latin-1").lower(), host):
                self._on_refused("origin")
                return plain_error_response(
                    "Web pages of this origin may not use this gateway; start it with --allowed-origins to allow them.",
                    403,
                    code="origin_not_allowed",
                )
        return None

    def _malformed(self, message: str) -> Response:
        self._on_refused("host")
        response = plain_error_response(message, 400)
        response.headers["connection"] = "close"  # a proxy in front may have parsed another host
        return response


def _any_unless(loopback: bool) -> frozenset[str]:
    return frozenset() if loopback else frozenset((ANY,))


def _lower(texts: Iterable[str]) -> list[str]:
    return [text.lower().rstrip("/") for text in texts]


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
