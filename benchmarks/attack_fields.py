"""Attacks on the fields and the framing of a request over HTTP, for `benchmarks/attacks.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tests.support.clients.entrances import CHAT, Delivery, Target, post

MIB = 1 << 20
Attack = Callable[[Target], Awaitable[None]]


def _repeated(path: str, fields: Callable[[], dict[str, object]]) -> Attack:
    bodies: list[bytes] = []

    async def attack(target: Target) -> None:
        if not bodies:
            bodies.append(json.dumps({"model": target.model, "max_tokens": 4, **fields()}).encode())
        await post(target.gateway, path, bodies[0], Delivery())

    return attack


def _chat(fields: Callable[[], dict[str, object]]) -> Attack:
    return _repeated(CHAT, lambda: {"messages": [{"role": "user", "content": "hi"}], **fields()})


def _format(schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _deep_schema() -> object:
    return {"type": "object", "properties": {"x" * 218_000: {"properties": {str(i): {} for i in range(13_000)}}}}


async def _pipelined(target: Target) -> None:
    """Twenty-one megabytes of tiny requests on one connection, whose answers are read."""
    reader, writer = await asyncio.open_connection(*target.gateway)
    request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"

    async def read() -> None:
        while await reader.read(1 << 16):
            pass

    reading = asyncio.create_task(read())
    try:
        for _ in range(21 * MIB // (len(request) * 1000)):
            writer.write(request * 1000)
            await writer.drain()
    finally:
        reading.cancel()
        writer.close()


async def _trickled(target: Target) -> None:
    """A body that goes on slowly after its request was refused."""
    _, writer = await asyncio.open_connection(*target.gateway)
    try:
        writer.write(b"POST /nothing/here HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n\r\n")
        for _ in range(50):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.1)
    finally:
        writer.close()


async def _trailers(target: Target) -> None:
    """A chunked body with a megabyte of trailers."""
    _, writer = await asyncio.open_connection(*target.gateway)
    try:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        body = b"2\r\n{}\r\n0\r\n" + b"x-trailer: " + b"a" * MIB + b"\r\n\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + body)
        with suppress(OSError):
            await writer.drain()
        await asyncio.sleep(0.05)
    finally:
        writer.close()


FIELDS: dict[str, Attack] = {
    "logprobs 0": _repeated("/v1/completions", lambda: {"prompt": "x", "logprobs": 0}),
    "schema with long names": _chat(lambda: _format(_deep_schema())),
    "patterns": _chat(lambda: _format({"type": "string", "pattern": "[\x00-\U0010ffff]" * 800})),
    "many biases": _chat(lambda: {"logit_bias": {str(i): 1 for i in range(400_000)}}),
    "metadata": _chat(lambda: {"metadata": {str(i): "x" for i in range(400_000)}}),
    "bad words": _chat(lambda: {"bad_words": ["word " * 12_000] * 64}),
    "trailers": _trailers,
    "pipelined requests": _pipelined,
    "bodies after a refusal": _trickled,
}
"""Attacks by name."""
