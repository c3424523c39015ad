"""Request bodies: their memory, and the event loop time of large ones."""

from __future__ import annotations

import asyncio
from time import monotonic, thread_time
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from services.common.base import budgets
from services.common.base.errors import ErrorKind, SluiceError
from services.common.net.intake.pace import BodyPace
from services.gateway.http import body_memory
from services.gateway.http.body import read_json, release_body
from services.gateway.http.body_memory import BodyMemory, BodyShare
from tests.support.oracles.errors import raises_error
from tests.support.waiting import settle

KIB = 1 << 10
MIB = 1 << 20
WAIT_S = 30


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", names.append)
    return names


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "GRACE_S", 0.1)
    monkeypatch.setattr(body_memory, "CHECK_INTERVAL_S", 0.02)


class Body:
    """A request whose body arrives as the test sends it."""

    def __init__(self, memory: BodyMemory, header: tuple[str, str], timeout_s: float, limit: int) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self.received = 0
        self.scope: Scope = {"type": "http", "headers": [(header[0].encode(), header[1].encode())]}
        request = Request(self.scope, self._receive)
        self.reading = asyncio.create_task(read_json(request, limit, timeout_s, memory=memory))

    async def _receive(self) -> Message:
        self.received += 1
        return await self._messages.get()

    def send(self, data: bytes, more: bool = False) -> None:
        self._messages.put_nowait({"type": "http.request", "body": data, "more_body": more})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def failure(self) -> Any:
        """What `read_json` raises."""
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([self.reading])
        found = self.reading.exception()
        assert found is not None
        return found


def announced(memory: BodyMemory, length: int, timeout_s: float = WAIT_S, limit: int = MIB) -> Body:
    return Body(memory, ("content-length", str(length)), timeout_s, limit)


def chunked(memory: BodyMemory, timeout_s: float = WAIT_S, limit: int = MIB) -> Body:
    return Body(memory, ("transfer-encoding", "chunked"), timeout_s, limit)


def text(length: int) -> bytes:
    return b'{"a":"%b"}' % (b"x" * (length - 8))


async def test_body_share_is_released_when_its_request_ends() -> None:
    memory = BodyMemory(4 * MIB)
    body = announced(memory, 100 * KIB)
    await settle()
    assert memory.used == 200 * KIB
    body.send(text(100 * KIB))
    assert len((await body.reading)["a"]) == 100 * KIB - 8
    assert 100 * KIB < memory.used < 110 * KIB
    release_body(body.scope)
    assert memory.used == 0


@pytest.mark.parametrize("end", ["not JSON", "a list", "gone", "late", "cancelled", "too long"])
async def test_a_body_that_fails_leaves_nothing_behind(end: str, impatient: None) -> None:
    memory = BodyMemory(4 * MIB)
    body = chunked(memory, timeout_s=0.1 if end == "late" else WAIT_S, limit=200 * KIB)
    body.send(b"[", more=True)
    await settle()
    assert memory.used > 0
    if end == "not JSON":
        body.send(b"{")
    elif end == "a list":
        body.send(b"]")
    elif end == "gone":
        body.leave()
    elif end == "cancelled":
        body.reading.cancel()
    elif end == "too long":
        body.send(b" " * 201 * KIB)
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([body.reading])
    release_body(body.scope)
    assert memory.used == 0


async def test_a_large_body_waits_unread_until_there_is_memory() -> None:
    memory = BodyMemory(4 * MIB)
    first, second = announced(memory, MIB), announced(memory, MIB)
    await settle()
    assert (first.received, second.received) == (1, 0)
    first.send(text(MIB))
    await first.reading
    assert second.received == 0, "it still holds its objects"
    release_body(first.scope)
    second.send(text(MIB))
    assert await second.reading


async def test_a_wait_for_memory_that_is_too_long_is_refused_and_counted(refused: list[str], impatient: None) -> None:
    memory = BodyMemory(4 * MIB)
    held = announced(memory, MIB)
    held.send(text(MIB))
    await held.reading
    memory.resize(memory_share(held), 2 * MIB)
    found = await announced(memory, MIB, timeout_s=0.1).failure()
    assert isinstance(found, SluiceError)
    assert (found.kind, found.http_status, found.retry_after_ms) == (ErrorKind.UNAVAILABLE, 503, 1000)
    assert body_memory.SETTING in found.message
    assert refused == ["body_bytes"]


def memory_share(body: Body) -> BodyShare:
    share = body.scope["sluice.body"]
    assert isinstance(share, BodyShare)
    return share


async def test_a_slow_body_is_a_timeout_while_there_is_memory(refused: list[str], impatient: None) -> None:
    memory = BodyMemory(4 * MIB)
    found = await announced(memory, MIB, timeout_s=0.1).failure()
    assert found.status_code == 408
    assert refused == []


async def test_a_slow_body_loses_its_memory_to_bodies_that_wait(refused: list[str], impatient: None) -> None:
    memory = BodyMemory(4 * MIB)
    slow = announced(memory, MIB)
    slow.send(b"{", more=True)
    await settle()
    honest = announced(memory, MIB)
    honest.send(text(MIB))
    async with asyncio.timeout(WAIT_S):
        assert await honest.reading
    found = await slow.failure()
    assert found.http_status == 503
    assert refused == ["body_bytes"]
    release_body(honest.scope)
    release_body(slow.scope)
    assert memory.used == 0


async def test_a_slow_body_keeps_its_memory_while_none_waits(refused: list[str], impatient: None) -> None:
    memory = BodyMemory(4 * MIB)
    slow = announced(memory, MIB)
    await asyncio.sleep(0.4)
    slow.send(text(MIB))
    assert await slow.reading
    assert refused == []


async def test_the_body_that_cost_most_loses_its_memory_first(impatient: None) -> None:
    memory = BodyMemory(4 * MIB)
    small, large = announced(memory, 200 * KIB), announced(memory, 800 * KIB)
    await asyncio.sleep(0.2)
    waiting = announced(memory, 400 * KIB)
    assert (await large.failure()).http_status == 503
    for body, length in ((small, 200 * KIB), (waiting, 400 * KIB)):
        body.send(text(length))
        assert await body.reading


async def test_a_complete_small_body_passes_while_unfinished_ones_hold_all_the_rest() -> None:
    memory = BodyMemory(4 * MIB)
    large = announced(memory, MIB)
    small = [announced(memory, 64 * KIB) for _ in range(8)]
    waiting = announced(memory, 2 * KIB)
    await settle()
    assert memory.used == 3 * MIB
    for _ in range(10):
        body = announced(memory, 2 * KIB)
        body.send(text(2 * KIB))
        assert await body.reading
        release_body(body.scope)
    assert not waiting.reading.done()
    for body in (large, waiting, *small):
        body.reading.cancel()


async def test_a_chunked_body_takes_the_longest_share_when_it_is_no_longer_small() -> None:
    memory = BodyMemory(4 * MIB)
    body = chunked(memory, limit=800 * KIB)
    body.send(text(70 * KIB)[:-2], more=True)
    await settle()
    assert memory.used > 1600 * KIB
    body.send(b'"}')
    assert await body.reading
    assert memory.used < 80 * KIB


async def test_a_body_longer_than_the_memory_is_refused_unread() -> None:
    memory = BodyMemory(MIB)
    body = announced(memory, 512 * KIB, limit=MIB)
    found = await body.failure()
    assert (found.kind, found.code) == (ErrorKind.TOO_LARGE, "request_too_large")
    assert body_memory.SETTING in found.message
    assert body.received == 0


async def test_a_body_that_takes_too_much_once_parsed_is_refused_before_that(refused: list[str]) -> None:
    memory = BodyMemory(32 * MIB)
    dense = b'{"a":[' + b"[]," * 500_000 + b"1]}"
    body = announced(memory, len(dense), limit=4 * MIB)
    body.send(dense)
    found = await body.failure()
    assert found.kind == ErrorKind.TOO_LARGE
    assert "send fewer values" in found.message
    assert refused == ["body_bytes"]


async def test_a_dense_body_without_memory_for_its_objects_is_refused_at_once(
    refused: list[str],
) -> None:
    memory = BodyMemory(32 * MIB)
    other = announced(memory, 7 * MIB, limit=8 * MIB)
    dense = b'{"a":[' + b"[]," * 100_000 + b"1]}"
    body = announced(memory, len(dense), limit=8 * MIB)
    body.send(dense)
    found = await body.failure()
    assert found.kind == ErrorKind.UNAVAILABLE
    assert refused == ["body_bytes"]
    other.reading.cancel()


async def test_a_body_of_much_punctuation_in_its_strings_is_read() -> None:
    memory = BodyMemory(32 * MIB)
    code = b'{"a":"' + b"[]," * (600 * KIB) + b'"}'
    body = announced(memory, len(code), limit=4 * MIB)
    body.send(code)
    assert len((await body.reading)["a"]) == len(code) - 8


def work(seconds: float) -> None:
    """Keeps this thread busy without a pause."""
    end = thread_time() + seconds
    while thread_time() < end:
        pass


async def test_first_large_body_does_not_wait() -> None:
    pace = BodyPace(0.01)
    await asyncio.wait_for(pace.turn(0.001), 20)


async def test_large_bodies_beside_each_other_take_at_most_their_share_of_the_time() -> None:
    pace, spent = BodyPace(0.25), 0.02

    async def body() -> None:
        await pace.turn(60)
        work(spent)

    began = monotonic()
    await asyncio.gather(*(body() for _ in range(6)))
    assert monotonic() - began >= 5 * spent * 4


async def test_large_bodies_have_their_turns_in_the_order_of_arrival() -> None:
    pace, order = BodyPace(0.5), list[int]()

    async def body(number: int) -> None:
        await pace.turn(60)
        order.append(number)
        work(0.002)

    await asyncio.gather(*(body(number) for number in range(8)))
    assert order == list(range(8))


async def test_large_body_whose_turn_does_not_come_is_refused_and_the_next_one_is_not() -> None:
    pace = BodyPace(0.01)
    await pace.turn(60)
    work(0.01)
    with raises_error(match="waited 0.01 s", kind=ErrorKind.UNAVAILABLE, retry_after_ms=1000):
        await pace.turn(0.01)
    await asyncio.wait_for(pace.turn(60), 60)
