from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.preprocess.thread_pool import ComputePool

BIG = 1000


class Gate:
    """A job that computes until told to end."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        assert self.open.wait(30)
        return threading.current_thread().name


@pytest.fixture
def pool() -> Iterator[ComputePool]:
    made = ComputePool(threads=1, max_waiting=1, inline_bytes=BIG - 1, limit_s=30)
    yield made
    made.close()


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 30)


async def test_small_jobs_run_here_and_big_or_blocking_ones_on_a_thread(pool: ComputePool) -> None:
    def where() -> str:
        return threading.current_thread().name

    here = where()
    assert await pool.run(where, BIG - 1) == here
    assert (await pool.run(where, BIG)).startswith("tokenize")
    assert (await pool.run(where, 0, may_block=True)).startswith("tokenize")
    assert pool.taken == 0


async def test_what_a_job_raises_arrives(pool: ComputePool) -> None:
    def fail() -> None:
        raise KeyError("x")

    for size in (0, BIG):
        with pytest.raises(KeyError):
            await pool.run(fail, size)
    assert pool.taken == 0


async def test_a_panic_of_native_code_is_an_error_as_any_other(pool: ComputePool) -> None:
    class Panic(BaseException):
        """As Rust's are raised: whoever catches Exception misses them, and the caller would hear nothing."""

    def fail() -> None:
        raise Panic("index out of bounds")

    for size in (0, BIG):
        with pytest.raises(SluiceError, match="cannot be tokenized") as caught:
            await pool.run(fail, size)
        assert caught.value.kind is ErrorKind.INTERNAL
    assert pool.taken == 0


async def test_more_than_may_wait_are_shed_and_small_ones_still_served(pool: ComputePool) -> None:
    gate = Gate()
    running = [asyncio.create_task(pool.run(gate, BIG)) for _ in range(2)]
    await entered(gate)
    with pytest.raises(SluiceError) as caught:
        await pool.run(gate, BIG)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_ms > 0
    assert await pool.run(lambda: "small", 1) == "small"
    gate.open.set()
    await asyncio.gather(*running)
    assert pool.taken == 0


async def test_a_caller_that_left_frees_its_place_in_the_queue(pool: ComputePool) -> None:
    gate, dropped = Gate(), Gate()
    running = asyncio.create_task(pool.run(gate, BIG))
    await entered(gate)
    waiting = asyncio.create_task(pool.run(dropped, BIG))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.taken == 1
    gate.open.set()
    await running
    assert not dropped.entered.is_set()


async def test_a_job_over_its_limit_is_given_up_and_keeps_its_place_until_it_ends() -> None:
    pool = ComputePool(threads=1, max_waiting=1, inline_bytes=0, limit_s=0.05)
    gate = Gate()
    with pytest.raises(SluiceError) as caught:
        await pool.run(gate, BIG)
    assert caught.value.kind is ErrorKind.DEADLINE_EXCEEDED
    assert pool.taken == 1
    gate.open.set()
    for _ in range(1000):
        if pool.taken == 0:
            break
        await asyncio.sleep(0.01)
    assert pool.taken == 0
    pool.close()


async def test_a_job_can_run_once_on_every_thread() -> None:
    pool = ComputePool(threads=3, max_waiting=1, inline_bytes=0, limit_s=30)
    names: list[str] = []
    await pool.on_every_thread(lambda: names.append(threading.current_thread().name))
    assert len(set(names)) == len(names) == 4
    assert threading.current_thread().name in names
    pool.close()
