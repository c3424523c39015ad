"""HTTP servers that stand for engines behind a proxy: they stream an answer that proves what they received.

`python -m tests.support.servers.http_upstream --ports 1,2` serves in a process of its own until it is terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from typing import cast

import uvloop

STATS, RESET, READY = "/test/stats", "/test/reset", "/ready"
MAX_HEAD = 256 << 10
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Served:
    """What one server has seen.

    Attributes:
        most: most requests at the same time.
        elsewhere: requests whose header names another endpoint first.
    """

    endpoint: str
    requests: int = 0
    now: int = 0
    most: int = 0
    elsewhere: int = 0
    prompts: list[str] = field(default_factory=list)


def digest(body: bytes) -> str:
    """Returns what a server answers about a body."""
    return hashlib.sha256(body).hexdigest()[:16]


class Upstream:
    """One HTTP/1.1 server.

    Args:
        hold_s: how long it waits before the first byte of an answer.
        chunks: events of an answer.
        chunk_s: how long it waits between them.

    Attributes:
        gate: holds all answers back while it is not set.
        connections: those that are open.
    """

    def __init__(self, hold_s: float = 0.0, chunks: int = 4, chunk_s: float = 0.0) -> None:
        self.hold_s, self.chunks, self.chunk_s = hold_s, chunks, chunk_s
        self.served = Served("")
        self.gate = asyncio.Event()
        self.gate.set()
        self.connections: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        """Listens on this machine; port 0 takes a free one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port)
        self.served.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stops listening, and closes all connections."""
        assert self._server is not None
        self._server.close()
        for each in self.connections:
            each.close()

    def answer(self, body: bytes) -> list[bytes]:
        """Returns the events of an answer as chunks of HTTP; the last one ends it."""
        proof = {"digest": digest(body), "endpoint": self.served.endpoint}
        events = [_event({**proof, "number": number}) for number in range(self.chunks)]
        events.append(_event({"usage": {"prompt_tokens": len(body) // 4, "completion_tokens": self.chunks}}))
        events[-1] += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        return events


class _Connection(asyncio.Protocol):
    """Serves the requests of one connection, one after the other."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._received = bytearray()
        self._parts: list[bytes] = []
        self._missing = 0
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._upstream.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.connections.discard(self._transport)
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        if self._missing > len(data):  # in the middle of a long body
            self._parts.append(data)
            self._missing -= len(data)
            return
        self._parts.append(data)
        self._received += b"".join(self._parts)
        self._parts.clear()
        self._missing = 0
        self._take()

    def _take(self) -> None:
        """Serves a request if it has arrived whole."""
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            assert len(self._received) <= MAX_HEAD
            return
        head = self._received[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        start = end + 4
        if headers.get("transfer-encoding") == "chunked":
            found = _dechunked(self._received, start) if self._received.endswith(b"0\r\n\r\n") else None
            if found is None:
                return
            body, after = found
        else:
            after = start + int(headers.get("content-length", 0))
            if after > len(self._received):
                self._missing = after - len(self._received)
                return
            body = bytes(self._received[start:after])
        del self._received[:after]
        self._serve(head[0].split(" ")[1], headers, body)

    def _serve(self, path: str, headers: dict[str, str], body: bytes) -> None:
        upstream, served = self._upstream, self._upstream.served
        if path.partition("?")[0] in (STATS, RESET, READY):
            if path == RESET:
                served.most = served.requests = 0
            text = json.dumps(vars(served)).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
            return
        served.requests += 1
        served.now += 1
        served.most = max(served.most, served.now)
        listed = headers.get("x-gateway-destination-endpoint", "")
        served.elsewhere += bool(listed) and listed.split(",")[0] != served.endpoint
        if upstream.gate.is_set() and not upstream.hold_s and not upstream.chunk_s:
            self._transport.write(HEAD + b"".join(upstream.answer(body)))
            served.now -= 1
        else:
            self._answering = asyncio.get_running_loop().create_task(self._answer(body))

    async def _answer(self, body: bytes) -> None:
        upstream = self._upstream
        try:
            await upstream.gate.wait()
            await asyncio.sleep(upstream.hold_s)
            self._transport.write(HEAD)
            for number, event in enumerate(upstream.answer(body)):
                if number and upstream.chunk_s:
                    await asyncio.sleep(upstream.chunk_s)
                self._transport.write(event)
        finally:
            upstream.served.now -= 1
            self._answering = None


def _dechunked(received: bytearray, at: int) -> tuple[bytes, int] | None:
    """Returns a chunked body that starts at an index, and where it ends; None if it has not arrived whole."""
    parts: list[bytes] = []
    while (line := received.find(b"\r\n", at)) >= 0:
        size = int(received[at:line], 16)
        at = line + 2 + size + 2
        if at > len(received):
            return None
        if not size:
            return b"".join(parts), at
        parts.append(bytes(received[line + 2 : at - 2]))
    return None


def _event(event: object) -> bytes:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n" % len(data) + data + b"\r\n"


async def _main(arguments: argparse.Namespace) -> None:
    for port in arguments.ports.split(","):
        await Upstream(arguments.hold_ms / 1000, arguments.chunks, arguments.chunk_ms / 1000).start(int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve answers that prove what was received.")
    parser.add_argument("--ports", required=True, help="comma-separated ports")
    parser.add_argument("--hold-ms", type=float, default=0, help="time before the first byte, milliseconds")
    parser.add_argument("--chunks", type=int, default=4, help="events of an answer")
    parser.add_argument("--chunk-ms", type=float, default=0, help="time between two events, milliseconds")
    uvloop.run(_main(parser.parse_args()))
