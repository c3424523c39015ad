"""Data-parallel ranks of the mock engine: each has a cache, a batch and events of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker.contract.cache_events import KvEvent
from services.worker.contract.generation import FinishReason
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import replay, request
from tests.support.servers.mock_workers import generate, mock_worker

RANKS = 3
PROMPT = [7 + number % 50 for number in range(64)]


@pytest.fixture
async def worker(folder: Path) -> AsyncIterator[Worker]:
    async with mock_worker(folder, engine_args=f"data_parallel_size={RANKS}", processing="none") as started:
        yield started


async def ended(worker: Worker, name: str, rank: int | None, max_tokens: int = 2) -> tuple[FinishReason | None, int]:
    """Returns the finish reason and the cached tokens of the prompt."""
    asked = request(name, PROMPT, data_parallel_rank=rank, max_tokens=max_tokens, ignore_eos=True)
    deltas = await generate(worker, asked)
    return deltas[-1].finish_reason, next(delta.cached_tokens or 0 for delta in deltas)


async def test_every_rank_has_a_separate_cache_with_events(worker: Worker) -> None:
    received: list[list[KvEvent]] = [[] for _ in range(RANKS)]
    for source, events in zip(worker.engine.kv_event_sources(), received, strict=True):
        source.subscribe(events.extend)
    assert [source.rank for source in worker.engine.kv_event_sources()] == [0, 1, 2]
    assert [await ended(worker, f"cold-{rank}", rank) for rank in range(2)] == [(FinishReason.LENGTH, 0)] * 2
    assert not received[2]
    present: list[set[int]] = [set(), set()]
    for blocks, events in zip(present, received, strict=False):
        replay(events, blocks)
    assert present[0] == present[1] != set()
    assert (await ended(worker, "warm", 1))[1] >= 48
    await worker.engine.clear_cache()
    assert (await ended(worker, "cleared", 1))[1] == 0


async def test_without_a_rank_the_emptiest_is_taken(worker: Worker) -> None:
    deliveries = [StreamResponseSink() for _ in range(RANKS)]
    for number, delivery in enumerate(deliveries):
        worker.submit(request(f"r{number}", PROMPT, max_tokens=1_000, ignore_eos=True), delivery)
    assert [load.running_requests + load.waiting_requests for load in worker.load()] == [1] * RANKS
    for delivery in deliveries:
        worker.cancel(delivery)
    async with asyncio.timeout(30):
        for delivery in deliveries:
            assert [delta async for delta in delivery.deltas()][-1].finish_reason is FinishReason.CANCELLED
    assert [load.used_blocks for load in worker.load()] == [0] * RANKS
