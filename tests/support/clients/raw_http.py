"""HTTP/1.1 as bytes: requests that are well formed or not, and what comes back."""

from __future__ import annotations

import asyncio

WAIT_S = 30


async def answer(host: str, port: int, sent: bytes, more: float = 0) -> bytes:
    """Everything that comes back until the server closes, or one answer when it keeps the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    async with asyncio.timeout(WAIT_S):
        writer.write(sent)
        head = b""
        while b"\r\n\r\n" not in head and (part := await reader.read(65536)):
            head += part
        head, _, body = head.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        while len(body) < length and (part := await reader.read(65536)):
            body += part
        closed = b""
        if b"connection: close" in head.lower():
            closed = await reader.read(1)
            assert closed == b""
    writer.close()
    return head + b"\r\n\r\n" + body


async def everything(host: str, port: int, sent: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    said = b""
    async with asyncio.timeout(WAIT_S):
        try:
            writer.write(sent)
            while part := await reader.read(65536):
                said += part
        except ConnectionResetError:  # it closed with some of what was sent unread
            pass
    writer.close()
    return said


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /echo HTTP/1.1", "host: x", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


MALFORMED = {
    "both lengths": post(b"0\r\n\r\n", "content-length: 5", "transfer-encoding: chunked"),
    "both lengths the other way": post(b"0\r\n\r\n", "transfer-encoding: chunked", "content-length: 5"),
    "two lengths": post(b"{}", "content-length: 2", "content-length: 3"),
    "a negative length": post(b"{}", "content-length: -2"),
    "a length with a sign": post(b"{}", "content-length: +2"),
    "a length of two numbers": post(b"{}", "content-length: 2, 2"),
    "a huge length": post(b"{}", "content-length: 99999999999999999999999999"),
    "an unknown coding": post(b"{}", "transfer-encoding: chunky"),
    "chunked, but not last": post(b"{}", "transfer-encoding: chunked, gzip"),
    "a space before the colon": post(b"{}", "content-length : 2"),
    "a line that goes on in the next": post(b"{}", "x-a: b\r\n c", "content-length: 2"),
    "a bare newline in a header": post(b"{}", "x-a: b\nx-c: d\rcontent-length: 2"),
    "a zero byte": post(b"{}", "x-a: b\x00c", "content-length: 2"),
    "a bad chunk": post(b"zz\r\n{}\r\n0\r\n\r\n", "transfer-encoding: chunked"),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "no version": b"POST /echo\r\n\r\n",
    "another version": b"POST /echo HTTP/9.9\r\nhost: x\r\n\r\n",
    "no target": b"POST  HTTP/1.1\r\nhost: x\r\n\r\n",
}
"""Requests of which no server may make anything, by what is wrong with them."""

UNKNOWN_METHOD = b"GREET /echo HTTP/1.1\r\nhost: x\r\n\r\n"
"""Well formed, and in uvicorn refused all the same: what follows on its connection is a request of its own."""
