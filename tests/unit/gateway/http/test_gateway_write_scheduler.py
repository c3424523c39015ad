"""Writes take at most half of the time: under pressure tokens coalesce, and what is first does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from services.gateway.http import write_scheduler as pacing
from services.gateway.http.sse import EventStream
from services.gateway.http.write_scheduler import MAX_PAUSE_S, WriteScheduler
from services.gateway.operations.operation import EventListener
from services.gateway.operations.output import COMMENT


class Clock:
    """The time, and an event loop that only notes what it is to do later."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, what: Callable[[], None]) -> None:
        self.due.append((self.now, what))

    def call_later(self, after_s: float, what: Callable[[], None]) -> None:
        self.due.append((self.now + after_s, what))

    def run_next(self) -> float:
        """Seconds until the next thing that is due, which is then done."""
        at, what = self.due.pop(0)
        waited, self.now = at - self.now, max(at, self.now)
        what()
        return waited


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pacing, "perf_counter", lambda: made.now)
    return made


def paced(clock: Clock) -> WriteScheduler:
    write_scheduler = WriteScheduler()
    write_scheduler._loop = cast(Any, clock)
    return write_scheduler


async def test_a_round_is_followed_by_a_pause_as_long_as_itself_but_not_longer_than_the_bound(clock: Clock) -> None:
    write_scheduler = paced(clock)
    for took_s, pause_s in ((0.0, 0.0), (0.004, 0.004), (0.03, 0.03), (0.4, MAX_PAUSE_S)):

        def write(took_s: float = took_s) -> None:
            clock.now += took_s

        clock.now += 1
        write_scheduler.soon(write)
        assert clock.run_next() == 0
        write_scheduler.soon(lambda: None)
        assert clock.run_next() == pytest.approx(pause_s)
        assert not clock.due


async def test_requested_writes_run_once_a_round(clock: Clock) -> None:
    write_scheduler, written = paced(clock), list[int]()
    for number in range(100):
        write_scheduler.soon(lambda number=number: written.append(number))  # type: ignore[misc]
    assert len(clock.due) == 1
    clock.run_next()
    assert written == list(range(100))
    assert not clock.due


class Source:
    """Words that wait."""

    failure = None
    over = False
    unsent = 0

    def __init__(self) -> None:
        self.words: list[str] = []

    def attach(self, listener: EventListener) -> None:
        pass

    def take(self) -> bytes:
        words, self.words = self.words, []
        return " ".join(words).encode()

    def silence(self) -> bytes:
        return COMMENT

    def cancel(self) -> None:
        pass


class Stream:
    """An event stream with a client that takes everything."""

    def __init__(self, write_scheduler: WriteScheduler) -> None:
        self.source = Source()
        self.writes: list[bytes] = []
        self.events = EventStream(self.source, write_scheduler, 1 << 20)
        self.serving = asyncio.create_task(self.events({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.writes.append(message["body"])

    async def say(self, word: str, first: bool = False) -> None:
        self.source.words.append(word)
        self.events.notify(first)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_tokens_coalesce_while_writes_are_behind_and_first_text_goes_out_at_once(clock: Clock) -> None:
    write_scheduler = paced(clock)
    write_scheduler._not_before = clock.now + 10  # writes are far behind
    old, new = Stream(write_scheduler), Stream(write_scheduler)
    await old.say("begun", first=True)
    assert old.writes == [b"begun"]
    for word in ("a", "b", "c", "d"):
        await old.say(word)
    assert old.writes == [b"begun"], "its turn has not come"
    await new.say("hello", first=True)
    assert new.writes == [b"hello"], "the first text waited for others"
    assert clock.run_next() == pytest.approx(10)
    assert old.writes == [b"begun", b"a b c d"], "four tokens, one write"
    for stream in (old, new):
        stream.serving.cancel()
        await asyncio.gather(stream.serving, return_exceptions=True)
