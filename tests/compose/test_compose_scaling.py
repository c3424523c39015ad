"""Every service scales and is rolled under load, behind the balancer: no request fails and all replicas work."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.clients.chat_load import ChatLoad
from tests.support.servers.compose_suite import REQUESTS, SERVICES, Suite

CHATS = 200
EVEN = 0.6
"""Least share of a replica, of what would be the same for all. Replicas are chosen by what is under way there, ties at
random: of 200 chats each of two gets 100, give or take 20, and fewer where the machine lets it wait."""

pytestmark = pytest.mark.compose


async def test_every_service_scales_up_and_the_load_spreads_over_all_replicas(suite: Suite) -> None:
    scale = dict.fromkeys(SERVICES, 2)
    async with ChatLoad(suite.url) as load:
        await load.more(16)
        await asyncio.to_thread(suite.up, scale)

        deadline = time.monotonic() + 90
        while True:  # callers learn about new replicas within seconds
            before = await asyncio.to_thread(suite.requests_served)
            await load.more(32)
            seen = await asyncio.to_thread(suite.requests_served)
            if all(seen[name][container] > before[name][container] for name in seen for container in seen[name]):
                break
            assert time.monotonic() < deadline, f"some replicas never got a request: {seen}"

        before = await asyncio.to_thread(suite.requests_served)
        await load.more(CHATS)
        after = await asyncio.to_thread(suite.requests_served)
    assert load.failures == []

    shares = {
        name: [after[name][container] - before[name][container] for container in after[name]] for name in REQUESTS
    }
    assert {name: len(counts) for name, counts in shares.items()} == scale
    print(f"requests of each replica: {shares}")
    for name, counts in shares.items():
        assert sum(counts) >= CHATS, f"{name} counted {counts}"
        assert min(counts) >= EVEN * sum(counts) / len(counts), f"{name} counted {counts}: the load did not spread"


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_is_rolled_under_load(suite: Suite, service: str) -> None:
    await asyncio.to_thread(suite.up, dict.fromkeys(SERVICES, 2))
    old = suite.containers(service)
    async with ChatLoad(suite.url) as load:
        await load.more(16)
        await asyncio.to_thread(suite.roll, service)
        await load.more(32)
    assert load.failures == []
    new = suite.containers(service)
    assert len(new) == 2
    assert not set(new) & set(old)


async def test_every_service_scales_down_without_a_failed_request(suite: Suite) -> None:
    await asyncio.to_thread(suite.up, dict.fromkeys(SERVICES, 2))
    async with ChatLoad(suite.url) as load:
        await load.more(16)
        await asyncio.to_thread(suite.up, dict.fromkeys(SERVICES, 1))
        await load.more(32)
    assert load.failures == []
    assert [len(suite.containers(name)) for name in SERVICES] == [1] * len(SERVICES)
