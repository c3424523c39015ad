"""One GET request over https, to an address that was checked: no cookies, no proxies, no compression."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import h11

PIECE_BYTES = 64 << 10
MAX_HEAD_BYTES = 16 << 10
"""Bytes of the headers of a host's response; with more the fetch fails."""
MAX_ADDRESSES = 4
"""Addresses of a host that are tried; then the fetch fails."""
FREE_PIECES = 1024
MIN_PIECE_BYTES = 128
"""Bytes of a response's pieces, which cost time, on average after FREE_PIECES; with smaller ones the fetch fails."""
MAX_RESOLVING = 16
"""Names resolved at the same time, as a thread that waits for a name server cannot be ended; further ones wait."""
REDIRECTS = frozenset((301, 302, 303, 307, 308))

Resolver = Callable[[str, int], Awaitable[list[str]]]


class UrlRefused(Exception):
    """The URL, or what it leads to, is not permitted; the text is the reason, for clients."""


class FetchFailed(Exception):
    """The file cannot be fetched; the text is the reason, for clients."""


class FileOverLimit(Exception):
    """The file has too many bytes."""


class AddressPolicy(Protocol):
    """Decides which addresses are connected to."""

    def permits(self, address: str) -> bool:
        """Returns whether files may be fetched from an address."""
        ...


@dataclass(frozen=True, slots=True)
class HttpsTarget:
    """Where a URL leads.

    Attributes:
        host: in lower case, without a final dot.
        path: path and query.
    """

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The value of the header Host."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 443 else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HttpsAnswer:
    """A response: its file, or the location that it redirects to."""

    data: bytes = b""
    location: str = ""


def read_target(url: str) -> HttpsTarget:
    """Returns where an https URL leads; raises UrlRefused for other URLs, and for credentials in them."""
    try:
        parts: SplitResult = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UrlRefused("is not a valid URL") from None
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme != "https" or not host:
        raise UrlRefused("does not begin with https:// and a host")
    if parts.username is not None or parts.password is not None:
        raise UrlRefused("contains a user name or password")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not (host + path).isascii() or any(ord(char) <= 32 or ord(char) == 127 for char in host + path):
        raise UrlRefused("contains characters that must be percent-encoded")
    return HttpsTarget(host, 443 if port is None else port, path)


_resolving = ThreadPoolExecutor(MAX_RESOLVING, "media host names")
"""Not the event loop's own threads, which do the work of all requests."""


async def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a host as the system resolves it."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolving, look_up)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class HttpsGet:
    """Sends requests.

    Args:
        policy: decides which addresses are connected to.
        max_bytes: most bytes of a file.
        read_s: maximum seconds of connecting, and between two pieces of a response.
        tls: trusts the certificates of servers; None for those that the system trusts.
        resolver: returns the addresses of a host. Each request resolves once, and connects to what was returned.
    """

    def __init__(
        self,
        policy: AddressPolicy,
        max_bytes: int,
        read_s: float,
        tls: ssl.SSLContext | None = None,
        resolver: Resolver = resolve,
    ) -> None:
        self._policy = policy
        self._max_bytes = max_bytes
        self._read_s = read_s
        self._tls = tls
        self._resolver = resolver

    async def get(self, target: HttpsTarget) -> HttpsAnswer:
        """Returns the response to one request, without following a redirect.

        Raises:
            UrlRefused, FetchFailed, FileOverLimit: see there.
        """
        reader, writer = await self._connect(target)
        try:
            peer = writer.get_extra_info("peername")
            if not peer or not self._policy.permits(str(peer[0])):
                raise UrlRefused("leads to an address that is not public")
            return await self._exchange(target, reader, writer)
        except (TimeoutError, OSError, h11.RemoteProtocolError) as error:
            raise FetchFailed(_reason(error)) from None
        finally:
            writer.transport.abort()

    async def _connect(self, target: HttpsTarget) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(self._read_s):
                addresses = await self._resolver(target.host, target.port)
        except (TimeoutError, OSError, UnicodeError):
            raise FetchFailed("names a host that cannot be resolved") from None
        allowed = [address for address in addresses if self._policy.permits(address)]
        if not allowed:
            raise UrlRefused("leads to an address that is not public")
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        failure = ""
        for address in allowed[:MAX_ADDRESSES]:
            try:
                async with asyncio.timeout(self._read_s):
                    return await asyncio.open_connection(
                        address, target.port, ssl=self._tls, server_hostname=target.host, limit=PIECE_BYTES
                    )
            except (TimeoutError, OSError) as error:
                failure = _reason(error)
        raise FetchFailed(failure)

    async def _exchange(
        self, target: HttpsTarget, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpsAnswer:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        headers = [
            ("Host", target.authority),
            ("User-Agent", "sluice"),
            ("Accept", "image/*,audio/*,video/*"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ]
        writer.write(connection.send(h11.Request(method="GET", target=target.path, headers=headers)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        data = bytearray()
        pieces = 0
        while True:
            event = connection.next_event()
            if event is not h11.NEED_DATA:
                pieces += 1
                if pieces > FREE_PIECES + len(data) // MIN_PIECE_BYTES:
                    raise FetchFailed("is answered in pieces that are too small")
            if event is h11.NEED_DATA:
                async with asyncio.timeout(self._read_s):
                    connection.receive_data(await reader.read(PIECE_BYTES))
            elif isinstance(event, h11.Response):
                location = self._check_head(event)
                if location:
                    return HttpsAnswer(location=location)
            elif isinstance(event, h11.Data):
                data += event.data
                if len(data) > self._max_bytes:
                    raise FileOverLimit
            elif isinstance(event, h11.EndOfMessage):
                return HttpsAnswer(bytes(data))
            elif not isinstance(event, h11.InformationalResponse):
                raise FetchFailed("was cut off by its server")

    def _check_head(self, head: h11.Response) -> str:
        """Returns the location of a redirect; raises unless a file follows otherwise."""
        headers = {name: value.decode("latin-1") for name, value in head.headers}
        if head.status_code in REDIRECTS:
            location = headers.get(b"location", "")
            if not location:
                raise FetchFailed("is redirected to no location")
            return location
        if head.status_code != 200:
            raise FetchFailed(f"is answered with status {head.status_code}")
        if headers.get(b"content-encoding", "identity").strip().lower() != "identity":
            raise FetchFailed("is answered with compressed data")
        if int(headers.get(b"content-length", "0")) > self._max_bytes:
            raise FileOverLimit
        return ""


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "is not answered in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "leads to a server whose certificate is not trusted"
    if isinstance(error, h11.RemoteProtocolError):
        return "is not answered in HTTP/1.1, or was cut off"
    return "leads to a server that cannot be reached, or that closed the connection"
