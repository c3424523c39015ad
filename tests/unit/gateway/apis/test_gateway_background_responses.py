"""Background responses: leases, cancellation by other gateways, and the bounded log of events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.responses.background import BackgroundResponses, BackgroundRun
from services.gateway.apis.responses.event_log import PER_EVENT, EventLog, LoggedEvents
from services.gateway.apis.responses.store import MemoryStore, StoredResponse, StoreLimits
from services.gateway.operations.operation import EventSource, never_gone
from services.gateway.operations.waiting import events_of
from services.gateway.settings import GatewaySettings
from tests.support.fakes.clock import Clock
from tests.support.oracles.errors import raises_error
from tests.support.waiting import settle

OWNER, ID = "tenant", "resp_1"
QUEUED = {"id": ID, "object": "response", "created_at": 1, "status": "queued", "background": True, "error": None}


class Gateways:
    """Two gateways that share a store."""

    def __init__(self, lease_s: float = 30.0, most: int = 256) -> None:
        self.clock = Clock(100.0)
        self.store = MemoryStore(StoreLimits.of(100, 1 << 20), 3600, self.clock)
        self.one, self.two = (
            BackgroundResponses(self.store, GatewaySettings(), self.clock, lease_s, most) for _ in range(2)
        )

    async def seen(self) -> dict[str, Any] | None:
        """The response as the second gateway returns it."""
        stored = await self.two.find(OWNER, ID)
        return None if stored is None else orjson.loads(stored.response)


async def test_response_in_progress_has_its_state_on_every_gateway() -> None:
    gateways = Gateways()
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)
    assert await gateways.seen() == QUEUED

    async def generate() -> None:
        gateways.one.update(run, {**QUEUED, "status": "in_progress"})
        await settle()
        assert await gateways.seen() == {**QUEUED, "status": "in_progress"}

    await gateways.one.run(run, generate)
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


@pytest.mark.parametrize("wrong", ["gateway", "store"])
async def test_response_in_progress_goes_on_beside_a_clock_that_is_ten_minutes_ahead(wrong: str) -> None:
    gateways, ahead = Gateways(), Clock(700.0)
    gateways.one.update(gateways.one.begin(OWNER, ID, b"[]"), QUEUED)
    if wrong == "gateway":
        gateways.two = BackgroundResponses(gateways.store, GatewaySettings(), ahead)
    else:
        gateways.store._clock = ahead
    assert await gateways.seen() == QUEUED


async def test_a_running_response_renews_its_lease() -> None:
    gateways = Gateways(lease_s=0.03)
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)
    gateways.clock.now += 60
    renewed = asyncio.Event()
    put = gateways.store.put

    def counted(owner: str, response_id: str, stored: StoredResponse) -> None:
        put(owner, response_id, stored)
        renewed.set()

    gateways.store.put = counted  # type: ignore[method-assign]

    async def generate() -> None:
        await renewed.wait()

    await gateways.one.run(run, generate)
    state = await gateways.seen()
    assert state is not None
    assert state["status"] == "queued"


async def test_response_that_ends_while_its_store_fails_is_stored_when_the_store_returns() -> None:
    gateways = Gateways(lease_s=3.0)
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)
    swap, fails = gateways.store.swap, 5

    async def failing(*arguments: Any) -> bool:
        nonlocal fails
        if fails:
            fails -= 1
            raise SluiceError(ErrorKind.UNAVAILABLE, "The response store is unavailable.")
        return await swap(*arguments)

    async def generate() -> None:
        gateways.store.swap = failing  # type: ignore[assignment,method-assign]
        gateways.one.update(run, {**QUEUED, "status": "completed"})

    await gateways.one.run(run, generate)
    gateways.clock.now += 60
    state = await gateways.seen()
    assert state is not None
    assert (state["status"], fails) == ("completed", 0)


async def test_response_whose_store_stays_away_is_given_up_after_a_lease() -> None:
    gateways = Gateways(lease_s=0.1)
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)
    tries = 0

    async def failing(*arguments: Any) -> bool:
        nonlocal tries
        tries += 1
        raise SluiceError(ErrorKind.UNAVAILABLE, "The response store is unavailable.")

    async def generate() -> None:
        gateways.store.swap = failing  # type: ignore[assignment,method-assign]
        gateways.one.update(run, {**QUEUED, "status": "completed"})

    async with asyncio.timeout(20):
        await gateways.one.run(run, generate)
    assert run.ended.is_set()
    assert tries > 1


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_another_gateway_ends_a_response_at_the_next_renewal(how: str) -> None:
    gateways = Gateways(lease_s=0.03)
    run = gateways.one.begin(OWNER, ID, b"[]")
    gateways.one.update(run, QUEUED)

    running = asyncio.create_task(gateways.one.run(run, run.gone))
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
    log = EventLog(3 * (PER_EVENT + 10))
    for number in range(10):
        log.add(b"data: %d\n\n" % number)
    assert log.size <= 3 * (PER_EVENT + 10)
    with pytest.raises(SluiceError) as dropped:
        log.read(0)
    assert dropped.value.code == "events_expired"
    assert log.read(9) == (b"data: 9\n\n", 10)


def add_events(run: BackgroundRun, number: int, size: int) -> None:
    for _ in range(number):
        run.add(b"x" * size + b"\n\n")


async def test_events_of_all_responses_in_progress_stay_within_their_memory_together() -> None:
    background = BackgroundResponses(
        MemoryStore(StoreLimits.of(100, 1 << 20), 3600), GatewaySettings(), max_bytes=1 << 20
    )
    runs = [background.begin(OWNER, f"resp_{index}", b"[]") for index in range(20)]
    for run in runs:
        add_events(run, 300, 1_000)
        assert sum(each.events.size for each in runs) <= 1 << 20
    add_events(runs[0], 3, 10)
    assert runs[0].events.size > 0
    with raises_error(code="events_expired"):
        background.stream(OWNER, "resp_0", 0)


async def test_background_responses_of_one_tenant_leave_room_to_others(tmp_path: Path) -> None:
    settings = GatewaySettings(api_keys_file=tmp_path / "keys.json")
    background = BackgroundResponses(MemoryStore(StoreLimits.of(100, 1 << 20), 3600), settings, max_running=8)
    for owner in "abcd":
        for index in range(2):
            background.begin(owner, f"resp_{index}", b"[]")
        with raises_error(kind=ErrorKind.OVERLOADED, code="overloaded", match="of this client"):
            background.begin(owner, "resp_2", b"[]")
    with raises_error(kind=ErrorKind.OVERLOADED, match="The gateway runs 8"):
        background.begin("e", "resp_0", b"[]")


async def test_inputs_of_background_responses_in_progress_are_bounded_and_let_go_at_their_end() -> None:
    background = BackgroundResponses(
        MemoryStore(StoreLimits.of(100, 1 << 20), 3600), GatewaySettings(), max_bytes=1 << 20
    )
    run = background.begin(OWNER, "resp_0", bytes(1 << 20))
    with raises_error(kind=ErrorKind.OVERLOADED, match="inputs"):
        background.begin(OWNER, "resp_1", b"[]")

    async def nothing() -> None:
        return

    await background.run(run, nothing)
    background.begin(OWNER, "resp_1", bytes(1 << 20))


async def collected(source: EventSource) -> bytes:
    return b"".join([events async for events in events_of(source, never_gone)])


async def test_logged_events_from_a_number_on_end_with_the_log() -> None:
    log = EventLog(1 << 20)
    for number in range(3):
        log.add(b"data: %d\n\n" % number)
    reading = asyncio.create_task(collected(LoggedEvents(log, 1)))
    await settle()
    log.add(b"data: 3\n\n")
    await settle()
    log.end()
    assert await asyncio.wait_for(reading, 5) == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"
    assert await asyncio.wait_for(collected(LoggedEvents(log, 4)), 5) == b""


async def test_logged_events_of_more_than_one_read_arrive_complete() -> None:
    log, events = EventLog(1 << 20), [b"data: %b\n\n" % (b"x" * 30_000) for _ in range(10)]
    for event in events:
        log.add(event)
    log.end()
    assert await asyncio.wait_for(collected(LoggedEvents(log, 0)), 5) == b"".join(events)


async def test_logged_events_that_were_dropped_are_refused_at_once() -> None:
    log = EventLog(2 * (PER_EVENT + 10))
    for number in range(9):
        log.add(b"data: %d\n\n" % number)
    with raises_error(code="events_expired"):
        LoggedEvents(log, 0)
