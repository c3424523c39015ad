from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.packages.model_files import ModelSpec
from services.preprocess.limits import Limits
from services.preprocess.service import PreprocessService
from services.preprocess.templates.processes import TemplateProcesses
from services.preprocess.templates.templates import RenderedText
from services.preprocess.thread_pool import ComputePool
from services.preprocess.tokenizers.loading import load_tokenizer
from services.preprocess.tokenizers.registry import ModelRegistry
from sluice.v1 import preprocess_pb2
from tests.support.data.loaded_tokenizers import tiny_folder
from tests.support.oracles.errors import raises_error

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


async def test_a_panic_of_native_code_is_an_error_as_any_other(pool: ComputePool) -> None:
    class Panic(BaseException):
        """As Rust's are raised: `except Exception` misses them, and the caller would get no answer."""

    def fail() -> None:
        raise Panic("index out of bounds")

    for size in (0, BIG):
        with raises_error(match="cannot be tokenized", kind=ErrorKind.INTERNAL):
            await pool.run(fail, size)
    assert pool.taken == 0


async def test_more_than_may_wait_are_shed_and_small_ones_still_served(pool: ComputePool) -> None:
    gate = Gate()
    running = [asyncio.create_task(pool.run(gate, BIG)) for _ in range(2)]
    await entered(gate)
    with raises_error(kind=ErrorKind.OVERLOADED) as caught:
        await pool.run(gate, BIG)
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


async def test_job_above_its_time_limit_is_abandoned_and_keeps_its_thread_until_it_ends() -> None:
    pool = ComputePool(threads=1, max_waiting=1, inline_bytes=0, limit_s=0.05)
    gate = Gate()
    with raises_error(kind=ErrorKind.DEADLINE_EXCEEDED):
        await pool.run(gate, BIG)
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


MESSAGES = b'[{"role": "user", "content": "hi"}]'


class Stuck(TemplateProcesses):
    """Processes for clients' templates that are busy until they are told."""

    def __init__(self) -> None:
        super().__init__(1, 2.0, 1 << 20, 512)
        self.go = threading.Event()

    async def of_client(self, source: str, job: bytes, origin: str = "") -> RenderedText:
        await asyncio.to_thread(self.go.wait, 60)  # called on another loop than the test's
        return RenderedText("hi")


async def test_templates_of_clients_that_hang_take_no_thread_from_the_others() -> None:
    stuck = Stuck()
    limits = Limits(1 << 20, 2.0, stuck)
    registry = ModelRegistry([ModelSpec("tiny", str(tiny_folder()))], lambda spec: load_tokenizer(spec, limits))
    await registry.preload()
    pool, waiters, foreign = ComputePool(2, 64, 1024, 30), ComputePool(2, 64, 0, 60), ComputePool(8, 64, 0, 60)
    service = PreprocessService(registry, pool, 1 << 20, waiters, foreign)
    hostile = preprocess_pb2.ChatInput(messages_json=MESSAGES, chat_template="{% for a in range(99999) %}{% endfor %}")
    held: list[asyncio.Task[Any]] = [
        asyncio.create_task(service._tokenize(preprocess_pb2.TokenizeRequest(model="tiny", chat=hostile))),
        asyncio.create_task(service._tokenize(preprocess_pb2.TokenizeRequest(model="tiny", chat=hostile))),
        asyncio.create_task(service._render(preprocess_pb2.RenderRequest(model="tiny", chat=hostile))),
    ]
    await asyncio.sleep(0)
    large = preprocess_pb2.TokenizeRequest(model="tiny", text=preprocess_pb2.TextInput(text="word " * 1000))
    try:
        async with asyncio.timeout(10):
            assert (await service._tokenize(large)).token_ids
        assert not any(task.done() for task in held)
        assert (pool.taken, waiters.taken, foreign.taken) == (0, 0, 0)
    finally:
        stuck.go.set()
    await asyncio.gather(*held)
    for each in (pool, waiters, foreign):
        each.close()
