"""Which requests the HTTP servers of the suite accept, by the headers with which browsers tell who sends them.

A web page can make a browser send requests to a server that only its machine can reach: as a form, as plain text or
without a type to its address, or to a name of the page's site that resolves to a loopback address (DNS rebinding). A
server on loopback therefore serves only its own names, and rejects requests of pages of other sites. On any address a
page of another site can send a body only as JSON, for which its browser asks first and is never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Literal

from services.common.base.errors import quoted
from services.common.net.addresses import host_port, is_loopback

ANY = "*"
Reason = Literal["host", "origin", "content_type"]
REASONS: tuple[Reason, ...] = ("host", "origin", "content_type")
Headers = Iterable[tuple[bytes, bytes]]
"""Names, lower case, and values of all headers of a request."""

on_refused: Callable[[str], None] | None = None
"""Called with the reason of every refusal; set while the process records metrics."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")
_FORM_TYPES = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/")
_JSON = b"application/json"
_FOREIGN_SITES = (b"cross-site", b"same-site")
_READ_NAMES = frozenset((b"host", b"origin", b"content-type", b"sec-fetch-site", b"sec-fetch-mode"))


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """Why a request is refused.

    Attributes:
        status: HTTP status.
        closes: whether the connection must be closed, because a proxy in front may have parsed the request differently.
    """

    status: int
    reason: Reason
    message: str
    code: str = ""
    closes: bool = False


@dataclass(frozen=True, slots=True)
class HttpPolicy:
    """Accepted Host and Origin headers.

    Attributes:
        checked: whether anything but the syntax of the Host header and the types of bodies is checked.
        loopback: whether the server listens on loopback, so that addresses in Host headers must be loopback addresses.
            Elsewhere any address is accepted, because DNS rebinding needs a name.
        hosts: accepted names, lower case.
        origins: accepted origins as browsers send them, lower case.
        hosts_setting: the flag that adds names.
        origins_setting: the flag that adds origins.
    """

    checked: bool = False
    loopback: bool = False
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    hosts_setting: str = ""
    origins_setting: str = ""

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
        return not self.checked or self._knows(origin, host)

    def refusal(self, headers: Headers, method: str = "GET", version: str = "1.1") -> HttpRefusal | None:
        """Returns why a request is refused before its body is read; None if it is accepted. Counts a refusal."""
        refusal = self._refusal(headers, method, version)
        if refusal is not None and on_refused is not None:
            on_refused(refusal.reason)
        return refusal

    def _refusal(self, headers: Headers, method: str, version: str) -> HttpRefusal | None:
        values: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            if name in _READ_NAMES:
                values.setdefault(name, []).append(value)
        hosts = values.get(b"host", [])
        if len(hosts) != 1 and (hosts or version != "1.0"):
            return HttpRefusal(400, "host", "The request must have exactly one Host header.", closes=True)
        host = hosts[0].decode("latin-1").lower() if hosts else ""
        match = _HOST.fullmatch(host)
        if match is None:
            message = "The Host header must be a host name or address with an optional port."
            return HttpRefusal(400, "host", message, closes=True)
        if hosts and not self.serves(match[1]):
            message = f"This server does not accept the host {quoted(match[1])}; use its address{self._or_hosts}."
            return HttpRefusal(421, "host", message, "host_not_allowed")
        if not self._is_foreign(values, host):
            return None
        if self.checked and (b"origin" in values or not _is_navigation(values, method)):
            message = f"Web pages of this origin may not use this server{self._to_allow_origins}."
            return HttpRefusal(403, "origin", message, "origin_not_allowed")
        if method == "POST" and not _is_json(values.get(b"content-type", [])):
            message = (
                'A web page of another origin must send its body as JSON: "content-type: application/json"'
                f"{self._to_allow_origins}."
            )
            return HttpRefusal(415, "content_type", message, "content_type_not_allowed")
        return None

    def _is_foreign(self, values: dict[bytes, list[bytes]], host: str) -> bool:
        """Returns whether the request comes from a web page of an origin that is not the server's nor allowed."""
        if origins := values.get(b"origin"):
            return not all(self._knows(origin.decode("latin-1").lower(), host) for origin in origins)
        return any(site.strip().lower() in _FOREIGN_SITES for site in values.get(b"sec-fetch-site", ()))

    def _knows(self, origin: str, host: str) -> bool:
        if ANY in self.origins or origin in self.origins:
            return True
        return origin in (f"http://{host}", f"https://{host}")

    @property
    def _or_hosts(self) -> str:
        return f", or start it with {self.hosts_setting}" if self.hosts_setting else ""

    @property
    def _to_allow_origins(self) -> str:
        return f"; start it with {self.origins_setting} to allow them" if self.origins_setting else ""


def http_policy(
    listen: str,
    hosts: Iterable[str] = (),
    origins: Iterable[str] = (),
    *,
    hosts_setting: str = "",
    origins_setting: str = "",
) -> HttpPolicy:
    """Returns the policy of a server.

    Args:
        listen: its address as host:port.
        hosts: names that are accepted in addition to its own; empty: any name, unless it listens on loopback.
        origins: origins of web pages that may send requests, in addition to its own.
        hosts_setting: the flag that sets `hosts`, for error messages; empty if there is none.
        origins_setting: the flag that sets `origins`.
    """
    address = host_port(listen)
    loopback = address is not None and is_loopback(address[0])
    names, allowed = _lower(hosts), _lower(origins)
    accepted = names or (frozenset() if loopback else frozenset((ANY,)))
    checked = loopback or bool(names) or bool(allowed)
    return HttpPolicy(checked, loopback, accepted, allowed, hosts_setting, origins_setting)


def is_form(content_type: bytes) -> bool:
    """Returns whether a body has one of the types that browsers send to other sites without asking them first."""
    return content_type.strip().lower().startswith(_FORM_TYPES)


class PolicyMiddleware:
    """ASGI middleware that rejects what the policy does not accept.

    Args:
        respond: returns the ASGI application that sends the response of a refusal.
    """

    def __init__(self, app: Any, policy: HttpPolicy, respond: Callable[[HttpRefusal], Any]) -> None:
        self._app = app
        self._policy = policy
        self._respond = respond

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        app = self._app
        if scope["type"] in ("http", "websocket"):
            method, version = scope.get("method", "GET"), scope["http_version"]
            refusal = self._policy.refusal(scope["headers"], method, version)
            if refusal is not None:
                app = self._respond(refusal)
        passed: Awaitable[None] = app(scope, receive, send)
        return passed


def _is_navigation(values: dict[bytes, list[bytes]], method: str) -> bool:
    """Returns whether a person follows a link, whose target the page that has it cannot read."""
    return method in ("GET", "HEAD") and values.get(b"sec-fetch-mode") == [b"navigate"]


def _is_json(content_types: list[bytes]) -> bool:
    essences = [value.partition(b";")[0].strip().lower() for value in content_types]
    return essences == [_JSON]


def _lower(texts: Iterable[str]) -> frozenset[str]:
    return frozenset(text.lower().rstrip("/") for text in texts)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
