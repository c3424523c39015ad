"""Background responses: leases, cancellation by other gateways, and the bounded log of events."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from services.common.errors import SluiceError
from services.gateway.apis.responses.background import BackgroundResponses
from services.gateway.apis.responses.event_log import EventLog
from services.gateway.apis.responses.store import MemoryStore
from services.gateway.settings import GatewaySettings
from tests.support.fakes.clock import Clock

OWNER, ID = "tenant", "resp_1"
QUEUED = {"id": ID, "object": "response", "created_at": 1, "status": "queued", "background": True, "error": None}


class Gateways:
    """Two gateways that share a store."""

    def __init__(self, lease_s: float = 30.0, most: int = 256) -> None:
        self.clock = Clock(100.0)
        self.store = MemoryStore(100, 1 << 20, 3600)
        settings = GatewaySettings(responses_background=most)
        self.one, self.two = (BackgroundResponses(self.store, settings, self.clock, lease_s=lease_s) for _ in range(2))

    async def seen(self) -> dict[str, Any] | None:
        """The response as the second gateway returns it."""
        stored = await self.two.find(OWNER, ID)
        return None if stored is None else orjson.loads(stored.response)


async def test_a_response_in_progress_has_its_state_on_every_gateway() -> None:
    gateways = Gateways()
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)
    assert await gateways.seen() == QUEUED
    gateways.one.update(run, {**QUEUED, "status": "in_progress"})
    assert await gateways.seen() == {**QUEUED, "status": "in_progress"}
    assert await gateways.two.find("other", ID) is None


async def test_a_response_whose_gateway_died_has_failed_once_its_lease_expired() -> None:
    gateways = Gateways()
    gateways.one.update(gateways.one.begin(OWNER, ID, b"[]"), QUEUED)
    gateways.clock.now += 29
    state = await gateways.seen()
    assert state is not None
    assert state["status"] == "queued"
    gateways.clock.now += 1
    for _ in range(2):
        state = await gateways.seen()
        assert state is not None
        assert (state["status"], state["error"]["code"]) == ("failed", "server_error")


async def test_a_running_response_renews_its_lease() -> None:
    gateways = Gateways(lease_s=0.03)
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)
    gateways.clock.now += 60
    renewed = asyncio.Event()
    put = gateways.store.put

    def counted(*arguments: Any) -> None:
        put(*arguments)
        renewed.set()

    gateways.store.put = counted  # type: ignore[method-assign]

    async def generate() -> None:
        await renewed.wait()

    await gateways.one.run(run, generate)
    state = await gateways.seen()
    assert state is not None
    assert state["status"] == "queued"


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_another_gateway_ends_a_response_at_the_next_renewal(how: str) -> None:
    gateways = Gateways(lease_s=0.03)
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)

    async def generate() -> None:
        assert (await run.receive())["type"] == "http.disconnect"

    running = asyncio.create_task(gateways.one.run(run, generate))
    if how == "cancel":
        stored = await gateways.two.cancel(OWNER, ID)
        assert stored is not None
        assert orjson.loads(stored.response)["status"] == "cancelled"
    else:
        gateways.two.stop(OWNER, ID)
        await gateways.store.delete(OWNER, ID)
    await running
    assert run.cancelled


async def test_more_responses_than_the_limit_are_refused_until_one_ends() -> None:
    gateways = Gateways(most=1)
    run = gateways.one.begin(OWNER, ID, b"[]")
    with pytest.raises(SluiceError) as refused:
        gateways.one.begin(OWNER, "resp_2", b"[]")
    assert refused.value.http_status in (429, 503)

    async def generate() -> None:
        return

    await gateways.one.run(run, generate)
    gateways.one.begin(OWNER, "resp_2", b"[]")


async def test_events_of_another_gateway_cannot_be_streamed() -> None:
    gateways = Gateways()
    gateways.one.begin(OWNER, ID, b"[]")
    with pytest.raises(SluiceError) as refused:
        gateways.two.stream(OWNER, ID, 0)
    assert refused.value.code == "stream_unavailable"
    with pytest.raises(SluiceError):
        gateways.one.stream("other", ID, 0)


def test_a_log_returns_events_from_a_number_on_without_comments() -> None:
    log = EventLog(1000)
    log.add(b"data: 0\n\n: comment\n\ndata: 1\n\n")
    log.add(b"data: 2\n\n")
    assert log.read(0) == (b"data: 0\n\ndata: 1\n\ndata: 2\n\n", 3)
    assert log.read(2) == (b"data: 2\n\n", 3)
    assert log.read(3) == (b"", 3)


def test_a_log_at_its_limit_drops_the_oldest_events_and_says_so() -> None:
    log = EventLog(30)
    for number in range(10):
        log.add(b"data: %d\n\n" % number)
    assert log.size <= 30
    with pytest.raises(SluiceError) as dropped:
        log.read(0)
    assert dropped.value.code == "events_expired"
    assert log.read(9) == (b"data: 9\n\n", 10)
