"""Workers with a mock engine in this process, and the answers of workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.worker.contract.generation import Delta, GenerateRequest
from services.worker.engines.mock import MockEngine
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.serving.worker import Worker
from services.worker.settings import WorkerSettings


@asynccontextmanager
async def mock_worker(folder: Path, **fields: Any) -> AsyncIterator[Worker]:
    """A worker with the tiny model, fast unless set otherwise."""
    settings = WorkerSettings(model=f"tiny={folder}", **{"speedup": 1e6, **fields})
    worker = Worker(MockEngine.from_args(settings), settings.role, strict=True, max_live=settings.max_live)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.cleanup()


async def read(delivery: StreamResponseSink) -> list[Delta]:
    async with asyncio.timeout(30):
        return [delta async for delta in delivery.deltas()]


async def generate(worker: Worker, request: GenerateRequest, trace: dict[str, str] | None = None) -> list[Delta]:
    """Submits a request and returns its deltas."""
    delivery = StreamResponseSink()
    worker.submit(request, delivery, trace)
    return await read(delivery)
