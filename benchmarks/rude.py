"""Clients of event streams: patient ones, which are measured, and two rude kinds, which are not."""

from __future__ import annotations

import asyncio
import socket
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

SLOW_BYTES, SLOW_EVERY_S = 512, 1.0
SMALL_BUFFER_BYTES = 4096
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class ObservedStream:
    """What the patient clients saw; seconds."""

    pauses: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    whole: int = 0
    why: Counter[str] = field(default_factory=Counter)

    @property
    def broken(self) -> int:
        """Answers that did not end as they should."""
        return self.why.total()

    def pause_ms(self, part: float) -> float:
        """A quantile of the pauses between two reads of one stream."""
        ordered = sorted(self.pauses)
        return 1000 * ordered[int(part * (len(ordered) - 1))] if ordered else 0.0


async def patient(host: str, port: int, request: bytes, heard: ObservedStream) -> None:
    """Reads as fast as it can, to the end."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    begun, last, head, tail = False, time.perf_counter(), b"", b""
    while data := await reader.read(65536):
        now = time.perf_counter()
        (heard.pauses if begun else heard.first).append(now - last)
        begun, last, head, tail = True, now, head or data[:600], (tail + data)[-256:]
        if tail.endswith(_LAST_CHUNK):
            break
    if b"[DONE]" in tail and b'"error"' not in tail:
        heard.whole += 1
    else:
        heard.why[(tail if b" 200 " in head[:20] else head).decode(errors="replace") or "nothing came"] += 1
    writer.close()


async def slow(host: str, port: int, request: bytes, until: asyncio.Event) -> None:
    """Takes a few hundred bytes a second, and has no room for more."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        client.setblocking(False)
        await loop.sock_connect(client, (host, port))
        await loop.sock_sendall(client, request)
        while not until.is_set() and await loop.sock_recv(client, SLOW_BYTES):  # noqa: ASYNC110
            await asyncio.sleep(SLOW_EVERY_S)


async def leaver(host: str, port: int, request: bytes, after_s: float) -> None:
    """Goes away without a word."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    try:
        async with asyncio.timeout(after_s):
            while await reader.read(65536):
                pass
    except (TimeoutError, ConnectionError):
        pass
    writer.transport.abort()
