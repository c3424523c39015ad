"""Which names the gateway is asked by, and by which web pages.

A web page can make a browser send requests to a gateway that only this machine can reach: to its address, as a form or
as plain text, or under a name of the page's own site that was made to point to a loopback address (DNS rebinding). So a
gateway on loopback serves its own names only, and refuses requests that another site's page has made.
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
    """Which Host and Origin headers are served.

    Attributes:
        checked: False: every well-formed Host header is served, whatever Origin comes with it.
        loopback: the gateway listens on loopback, so addresses in Host headers must be loopback addresses. Elsewhere
            any address is served: browsers that were misled by a name send that name.
        hosts: names that are served, lower case.
        origins: as browsers write them, lower case.
    """

    checked: bool = False
    loopback: bool = False
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()

    def serves(self, name: str) -> bool:
        """Whether a name or address of a Host header, without its port, is one of the gateway's."""
        if not self.checked or ANY in self.hosts or name in self.hosts:
            return True
        address = name.strip("[]")
        return is_loopback(address) or (not self.loopback and _is_address(address))

    def trusts(self, origin: str, host: str) -> bool:
        """Whether a web page of this origin may send requests.

        Args:
            host: the request's Host header, lower case.
        """
        if not self.checked or ANY in self.origins or origin in self.origins:
            return True
        return origin in (f"http://{host}", f"https://{host}")


def host_policy(settings: GatewaySettings) -> HostPolicy:
    """The policy that the settings describe."""
    place = host_port(settings.listen)
    loopback = place is not None and is_loopback(place[0])
    hosts = frozenset(_lower(settings.allowed_hosts))
    origins = frozenset(_lower(settings.allowed_origins))
    return HostPolicy(loopback or bool(hosts) or bool(origins), loopback, hosts or _any_unless(loopback), origins)


class HostMiddleware:
    """Refuses requests without exactly one well-formed Host header, and those that the policy does not serve.

    Args:
        on_refused: called with "host" or "origin" for each request refused.
    """

    def __init__(self, app: ASGIApp, policy: HostPolicy, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._policy = policy
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        hosts, origins = [], []
        for name, value in scope["headers"]:
            if name == b"host":
                hosts.append(value)
            elif name == b"origin":
                origins.append(value)
        if len(hosts) != 1 and (hosts or scope["http_version"] != "1.0"):
            return self._malformed("A request needs exactly one Host header.")
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        found = _HOST.fullmatch(host)
        if found is None:
            return self._malformed("The Host header is not a host name or address with an optional port.")
        if hosts and not self._policy.serves(found[1]):
            self._on_refused("host")
            return plain_error_response(
                f"The Host header names {quoted(found[1])}, which this gateway does not serve: use its address, or "
                "start it with --allowed-hosts.",
                421,
                code="host_not_allowed",
            )
        for origin in origins:
            if not self._policy.trusts(origin.decode("latin-1").lower(), host):
                self._on_refused("origin")
                return plain_error_response(
                    "Web pages of this origin may not use this gateway: start it with --allowed-origins to allow them.",
                    403,
                    code="origin_not_allowed",
                )
        return None

    def _malformed(self, message: str) -> Response:
        self._on_refused("host")
        response = plain_error_response(message, 400)
        response.headers["connection"] = "close"  # a proxy before it may have read another host from it
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
