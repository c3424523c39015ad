"""Natural batching: what is ready together travels together, and nothing waits to fill a batch."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.rpc.session import BatchWriter
from tests.support.waiting import settle


class Collector:
    """A buffer, its writer, and a wire that is busy until told otherwise."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.written: list[list[int]] = []
        self.wire_is_free = asyncio.Event()
        self.wire_is_free.set()
        self.writer: BatchWriter[list[int]] = BatchWriter(self._drain, self._write)

    def put(self, item: int) -> None:
        self.waiting.append(item)
        self.writer.wake()

    def _drain(self) -> list[int] | None:
        ready, self.waiting = self.waiting, []
        return ready or None

    async def _write(self, batch: list[int]) -> None:
        await self.wire_is_free.wait()
        self.written.append(batch)


async def test_alone_it_goes_at_once_and_while_writing_it_collects() -> None:
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


async def test_being_woken_for_nothing_writes_nothing() -> None:
    collector = Collector()
    running = asyncio.create_task(collector.writer.run())
    collector.writer.wake()
    await settle()
    assert collector.written == []
    assert not running.done()
    running.cancel()


async def test_close_writes_what_is_left_and_returns() -> None:
    collector = Collector()
    collector.put(1)
    collector.writer.close()
    await asyncio.wait_for(collector.writer.run(), 30)
    assert collector.written == [[1]]


async def test_failed_write_ends_it() -> None:
    async def fail(_: int) -> None:
        raise ConnectionError("gone")

    writer: BatchWriter[int] = BatchWriter(lambda: 1, fail)
    writer.wake()
    with pytest.raises(ConnectionError, match="gone"):
        await asyncio.wait_for(writer.run(), 30)


@given(st.lists(st.one_of(st.integers(0, 99), st.sampled_from(["pause", "block", "free"])), max_size=40))
def test_nothing_is_lost_doubled_or_reordered(script: list[int | str]) -> None:
    async def play() -> tuple[list[int], list[list[int]]]:
        collector = Collector()
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
