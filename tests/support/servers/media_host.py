"""An https server on loopback that returns media files, slowly, endlessly or by redirects."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import trustme

Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]


def response(data: bytes = b"", status: str = "200 OK", *headers: str) -> Handler:
    """Returns a handler that sends one response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", *headers, "", ""]

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(lines).encode() + data)
        await writer.drain()

    return send


@dataclass
class MediaHost:
    """The running server.

    Attributes:
        port: its port.
        tls: trusts its certificate, which names media.test and *.media.test.
        answers: handlers by path.
        requests: the heads of the received requests.
        authority: certificate of its authority in PEM.
    """

    port: int
    tls: ssl.SSLContext
    answers: dict[str, Handler] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    authority: bytes = b""


@asynccontextmanager
async def media_host(address: str = "127.0.0.1") -> AsyncIterator[MediaHost]:
    """Yields the server, which listens on an address of loopback."""
    authority = trustme.CA()
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("media.test", "*.media.test").configure_cert(own)
    clients = ssl.create_default_context()
    authority.configure_trust(clients)
    host = MediaHost(0, clients, authority=authority.cert_pem.bytes())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            host.requests.append(head)
            path = head.split(" ")[1]
            await host.answers.get(path, response(status="404 Not Found"))(writer)
        writer.close()

    server = await asyncio.start_server(serve, address, 0, ssl=own)
    host.port = server.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        server.close()
