"""HTTP servers that stand for engines behind a proxy: they stream an answer that proves what they received.

`python -m tests.support.servers.http_upstream --ports 1,2` serves in a process of its own until it is terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from dataclasses import dataclass, field

STATS, RESET, READY = "/test/stats", "/test/reset", "/ready"
MOST_HEAD = 256 << 10


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
    """

    def __init__(self, hold_s: float = 0.0, chunks: int = 4, chunk_s: float = 0.0) -> None:
        self.hold_s, self.chunks, self.chunk_s = hold_s, chunks, chunk_s
        self.served = Served("")
        self.gate = asyncio.Event()
        self.gate.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        """Listens on this machine; port 0 takes a free one."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port, limit=MOST_HEAD)
        self.served.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Stops listening, and closes all connections."""
        assert self._server is not None
        self._server.close()
        for each in self._connections:
            each.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while await self._serve(reader, writer):
                continue
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await _body(reader, headers)
        if path in (STATS, RESET, READY):
            if path == RESET:
                self.served.most = self.served.requests = 0
            answer = json.dumps(vars(self.served)).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer) + answer)
            await writer.drain()
            return True
        served = self.served
        served.requests += 1
        served.now += 1
        served.most = max(served.most, served.now)
        listed = headers.get("x-gateway-destination-endpoint", "")
        served.elsewhere += bool(listed) and listed.split(",")[0] != served.endpoint
        try:
            await self._answer(writer, body)
        finally:
            served.now -= 1
        return True

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        await self.gate.wait()
        if self.hold_s:
            await asyncio.sleep(self.hold_s)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(self.chunks):
            if number and self.chunk_s:
                await asyncio.sleep(self.chunk_s)
            _event(writer, {"digest": digest(body), "endpoint": self.served.endpoint, "number": number})
        usage = {"prompt_tokens": len(body) // 4, "completion_tokens": self.chunks}
        _event(writer, {"usage": usage})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "content-length" in headers:
        return await reader.readexactly(int(headers["content-length"]))
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    return body


def _event(writer: asyncio.StreamWriter, event: object) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n" % len(data) + data + b"\r\n")


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
    asyncio.run(_main(parser.parse_args()))
