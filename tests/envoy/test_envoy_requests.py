"""Requests of unusual forms through a real Envoy: chunked, without a body, with trailers, abandoned at every byte."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.servers.envoy_front import VERSIONS, Front, chat, front
from tests.support.servers.http_upstream import digest
from tests.support.servers.redis_server import RedisServer

pytestmark = pytest.mark.envoy

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"


async def raw(found: Front, request: bytes, within_s: float = 20) -> bytes:
    """Returns what Envoy answers to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", found.envoy.port)
    writer.write(request)
    try:
        async with asyncio.timeout(within_s):
            return await reader.read(-1)
    finally:
        writer.close()


def in_chunks(body: bytes, size: int) -> bytes:
    parts = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


@pytest.mark.parametrize("version", VERSIONS)
async def test_chunked_bodies_and_trailers_reach_the_endpoint(tmp_path: Path, redis: RedisServer, version: str) -> None:
    body = chat("x" * 70_000)
    async with front(tmp_path, redis, version=version) as found:
        expected = f'"digest": "{digest(body)}"'.encode()
        plain = await raw(found, CHUNKED + b"\r\n" + in_chunks(body, 10_000) + b"0\r\n\r\n")
        assert expected in plain
        trailers = await raw(found, CHUNKED + b"trailer: t\r\n\r\n" + in_chunks(body, 10_000) + b"0\r\nt: 1\r\n\r\n")
        assert expected in trailers
        await found.empty()


@pytest.mark.parametrize("version", VERSIONS)
async def test_empty_bodies_are_answered(tmp_path: Path, redis: RedisServer, version: str) -> None:
    async with front(tmp_path, redis, version=version) as found:
        for end in (b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"content-length: 0\r\n\r\n"):
            assert b" 200 OK" in await raw(found, HEAD + end)
        with_trailers = b"transfer-encoding: chunked\r\ntrailer: t\r\n\r\n0\r\nt: 1\r\n\r\n"
        assert b" 200 OK" in await raw(found, HEAD + with_trailers)
        await found.empty()


async def test_rewritten_bodies_arrive_with_their_length(tmp_path: Path, redis: RedisServer) -> None:
    async with front(tmp_path, redis) as found:
        named = {"decode_worker_id": "w0", "token_data": list(range(20_000))}
        answer = await found.client.post("/v1/chat/completions", content=chat("x", nvext=named))
        assert answer.status_code == 200
        first = json.loads(answer.text.splitlines()[0][6:])
        assert first["digest"] in {
            digest(form) for form in (chat("x"), chat("x").replace(b": ", b":").replace(b", ", b","))
        }
        await found.empty()


async def test_clients_that_stop_at_any_byte_leave_nothing_booked(tmp_path: Path, redis: RedisServer) -> None:
    body = chat("x" * 2_000)
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with front(tmp_path, redis) as found:

        async def stop_at(byte: int, reset: bool) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", found.envoy.port)
            writer.write(request[:byte])
            await writer.drain()
            await asyncio.sleep(0.05)
            if reset:
                writer.transport.abort()
            else:
                writer.close()

        for byte in range(0, len(request) + 1, 150):
            await asyncio.gather(stop_at(byte, True), stop_at(byte, False), stop_at(len(request), byte % 2 == 0))
        slow = await raw(found, request[:-1], 90)
        assert b" 408 " in slow
        assert (await found.ask(chat("y"))).right
        await found.empty()
