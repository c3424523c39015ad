"""Batches of a session: what is ready together shares a message, and messages under load are paced."""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.rpc import session
from services.common.rpc.session import BatchWriter
from tests.support.waiting import settle

LONG_S = 600.0
"""A pause that no test waits for."""


class Collector:
    """A buffer, its writer, and a wire that can be made busy."""

    def __init__(self, max_pause_s: float = 0.0) -> None:
        self.waiting: list[int] = []
        self.written: list[list[int]] = []
        self.wire_is_free = asyncio.Event()
        self.wire_is_free.set()
        self.writer: BatchWriter[list[int]] = BatchWriter(self._drain, self._write, max_pause_s)

    def put(self, item: int) -> None:
        self.waiting.append(item)
        self.writer.wake()

    def _drain(self) -> list[int] | None:
        ready, self.waiting = self.waiting, []
        return ready or None

    async def _write(self, batch: list[int]) -> None:
        await self.wire_is_free.wait()
        self.written.append(batch)


async def test_batch_writer_during_a_write_collects_the_next_batch() -> None:
    collector = Collector()
    running = asyncio.create_task(collector.writer.run())
    collector.put(1)
    await settle()
    assert collector.written == [[1]]
    collector.wire_is_free.clear()
    collector.put(2)
    await settle()
    for item in (3, 4, 5):
        collector.put(item)
        await settle()
    collector.wire_is_free.set()
    await settle()
    assert collector.written == [[1], [2], [3, 4, 5]]
    running.cancel()


async def test_batch_writer_woken_without_output_writes_nothing() -> None:
    collector = Collector()
    running = asyncio.create_task(collector.writer.run())
    collector.writer.wake()
    await settle()
    assert collector.written == []
    assert not running.done()
    running.cancel()


async def test_batch_writer_closed_writes_pending_output_and_returns() -> None:
    collector = Collector()
    collector.put(1)
    collector.writer.close()
    await asyncio.wait_for(collector.writer.run(), 30)
    assert collector.written == [[1]]


async def test_batch_writer_with_a_failed_write_raises() -> None:
    async def fail(_: int) -> None:
        raise ConnectionError("gone")

    writer: BatchWriter[int] = BatchWriter(lambda: 1, fail)
    writer.wake()
    with pytest.raises(ConnectionError, match="gone"):
        await asyncio.wait_for(writer.run(), 30)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Collector:
    """A collector that pauses for minutes after each message."""
    monkeypatch.setattr(session, "MIN_PAUSE_S", LONG_S)
    return Collector(LONG_S)


async def test_batch_writer_after_a_silence_writes_at_once_and_then_collects(paused: Collector) -> None:
    running = asyncio.create_task(paused.writer.run())
    paused.put(1)
    await settle()
    assert paused.written == [[1]]
    for item in (2, 3):
        paused.put(item)
        await settle()
    assert paused.written == [[1]]
    running.cancel()


async def test_batch_writer_closed_during_a_pause_writes_pending_output_at_once(paused: Collector) -> None:
    running = asyncio.create_task(paused.writer.run())
    paused.put(1)
    await settle()
    paused.put(2)
    await settle()
    paused.writer.close()
    await asyncio.wait_for(running, 30)
    assert paused.written == [[1], [2]]


async def test_batch_writer_given_up_during_a_pause_ends_at_once(paused: Collector) -> None:
    running = asyncio.create_task(paused.writer.run())
    paused.put(1)
    await settle()
    paused.put(2)
    await settle()
    paused.writer.give_up()
    await asyncio.wait_for(running, 30)
    assert paused.written == [[1]]


async def test_batch_writer_cancelled_during_a_pause_ends_at_once(paused: Collector) -> None:
    running = asyncio.create_task(paused.writer.run())
    paused.put(1)
    await settle()
    paused.put(2)
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 30)


async def test_batch_writer_with_continuous_output_pauses_between_messages() -> None:
    collector, pause_s = Collector(0.005), 0.001
    running = asyncio.create_task(collector.writer.run())
    began_s = perf_counter()
    for item in range(200):
        collector.put(item)
        await asyncio.sleep(0)
    collector.writer.close()
    await asyncio.wait_for(running, 30)
    assert [item for batch in collector.written for item in batch] == list(range(200))
    assert len(collector.written) <= 2 + (perf_counter() - began_s) / pause_s  # the first and the last without a pause


@given(
    st.sampled_from([0.0, 0.002]),
    st.lists(st.one_of(st.integers(0, 99), st.sampled_from(["pause", "block", "free"])), max_size=40),
)
def test_batch_writer_with_any_schedule_writes_everything_once_in_order(
    pause_s: float, script: list[int | str]
) -> None:
    async def play() -> tuple[list[int], list[list[int]]]:
        collector = Collector(pause_s)
        running = asyncio.create_task(collector.writer.run())
        put = []
        for step in script:
            if isinstance(step, int):
                collector.put(step)
                put.append(step)
            elif step == "pause":
                await settle()
            elif step == "block":
                collector.wire_is_free.clear()
            else:
                collector.wire_is_free.set()
        collector.wire_is_free.set()
        collector.writer.close()
        await asyncio.wait_for(running, 30)
        return put, collector.written

    put, written = asyncio.run(play())
    assert [item for batch in written for item in batch] == put
    assert all(written)
