"""The configuration of Envoy that deploy/compose mounts, on this machine's addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.servers.envoy_front import VERSIONS, chat, front
from tests.support.servers.redis_server import RedisServer
from tests.support.waiting import until

pytestmark = pytest.mark.envoy

CHATS = 1_200
"""More than the 1,024 requests that Envoy sends to a cluster at a time unless it is configured otherwise."""


async def status(port: int, body: bytes) -> int:
    """Sends a chat over a connection of its own; returns the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close"
    writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


@pytest.mark.parametrize("version", VERSIONS)
async def test_more_chats_than_envoy_allows_by_default_run_at_a_time(
    tmp_path: Path, redis: RedisServer, version: str
) -> None:
    async with front(tmp_path, redis, version=version, deployed=True) as found:
        for each in found.upstreams:
            each.gate.clear()
        sent = [asyncio.create_task(status(found.envoy.port, chat(str(number)))) for number in range(CHATS)]

        async def all_are_under_way() -> bool:
            return sum(each.served.now for each in found.upstreams) == CHATS

        await until(all_are_under_way, timeout_s=60)
        for each in found.upstreams:
            each.gate.set()
        assert set(await asyncio.gather(*sent)) == {200}
        await found.empty()


async def test_chats_move_to_the_next_endpoint_when_one_stops(tmp_path: Path, redis: RedisServer) -> None:
    """Envoy retries what was not responded to, at the next endpoint that the picker has named."""
    async with front(tmp_path, redis, deployed=True) as found:
        await found.upstreams[0].stop()
        answers = [await found.ask(chat(str(number))) for number in range(30)]
        assert all(each.right for each in answers)
        assert {each.endpoint for each in answers} == set(found.endpoints[1:])
        await found.empty()


async def test_without_a_picker_chats_are_rejected_as_unavailable(tmp_path: Path, redis: RedisServer) -> None:
    async with front(tmp_path, redis, deployed=True) as found:
        await found.pickers[0].kill()
        assert {(await found.ask(chat(str(number)))).status for number in range(8)} == {503}
