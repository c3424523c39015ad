"""Workers on real gRPC inside the test's own loop, and the caller's side of a session."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from services.common.base.packing import pack_u32, unpack_u32
from services.common.base.tasks import Stop
from services.common.rpc.channels import open_channel
from services.worker.server import WorkerServer
from services.worker.settings import WorkerSettings
from sluice.v1 import common_pb2, worker_pb2, worker_pb2_grpc


@asynccontextmanager
async def hosted(folder: Path, **fields: Any) -> AsyncIterator[WorkerServer]:
    """A worker with the tiny model, on a free port; shuts down in order at the end.

    It makes neither prompts nor text unless told to: most tests need none, and starts are quicker.
    """
    defaults = {"listen": "127.0.0.1:0", "model": f"tiny={folder}", "speedup": 1e6, "grace_s": 0.0, "drain_s": 5.0}
    defaults |= {"canary_s": 0.0, "processing": "none"}
    host = WorkerServer(WorkerSettings(**{**defaults, **fields}), Stop(), strict=True)
    try:
        await host.start()
        yield host
    finally:
        await host.shut_down()


@asynccontextmanager
async def stub_of(host: WorkerServer) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
    """A stub on a channel of its own."""
    channel = open_channel(f"127.0.0.1:{host.server.port}")
    try:
        yield worker_pb2_grpc.WorkerStub(channel)
    finally:
        await channel.close()


def generation(
    request_id: str, prompt: Sequence[int] = (0, 20, 21, 1), *, model: str = "tiny", **stop: Any
) -> worker_pb2.GenerateRequest:
    """A request; keywords are fields of StopOptions."""
    return worker_pb2.GenerateRequest(
        request_id=request_id,
        model=model,
        tokens=worker_pb2.TokenPrompt(token_ids=pack_u32(prompt)),
        stop=common_pb2.StopOptions(**stop),
    )


class Caller:
    """One session, read in the background, that fails on anything a worker must never send."""

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
        self._call: grpc.aio.StreamStreamCall[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch] = stub.Session()
        self.token_ids: dict[int, array[int]] = {}
        self.cached: dict[int, int] = {}
        self.terminals: dict[int, worker_pb2.TokenExtra] = {}
        self.batches = 0
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def send(
        self, starts: dict[int, worker_pb2.GenerateRequest] | None = None, cancels: Sequence[int] = ()
    ) -> None:
        """One session message."""
        await self._call.write(
            worker_pb2.WorkerSessionRequest(
                starts=[worker_pb2.SessionStart(slot=slot, request=one) for slot, one in (starts or {}).items()],
                cancels=pack_u32(cancels),
            )
        )

    async def ended(self, *slots: int) -> None:
        """Waits until every slot has its terminal delta."""
        await self._until(lambda: all(slot in self.terminals for slot in slots))

    async def began(self, *slots: int) -> None:
        """Waits until every slot has a token."""
        await self._until(lambda: all(self.token_ids.get(slot) for slot in slots))

    def forget(self, slot: int) -> None:
        """The slot may be used again."""
        for kept in (self.token_ids, self.cached, self.terminals):
            kept.pop(slot, None)

    async def close(self) -> None:
        """Drops the session without a word."""
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(30):
            while not condition():
                if self._reading.done():
                    self._reading.result()
                self._changed.clear()
                await self._changed.wait()

    async def _read(self) -> None:
        try:
            while isinstance(batch := await self._call.read(), worker_pb2.TokenBatch):
                self._take(batch)
                self._changed.set()
        finally:
            self._changed.set()

    def _take(self, batch: worker_pb2.TokenBatch) -> None:
        self.batches += 1
        slots, counts = unpack_u32(batch.slots), unpack_u32(batch.counts)
        token_ids = unpack_u32(batch.token_ids)
        assert sum(counts) == len(token_ids)
        start = 0
        for slot, count in zip(slots, counts, strict=True):
            assert slot not in self.terminals, "tokens after the terminal delta"
            self.token_ids.setdefault(slot, array("I")).extend(token_ids[start : start + count])
            start += count
        for extra in batch.extras:
            assert extra.slot not in self.terminals, "something after the terminal delta"
            if extra.HasField("cached_tokens"):
                assert extra.slot not in self.cached, "cached_tokens twice"
                self.cached[extra.slot] = extra.cached_tokens
            if extra.finish_reason:
                assert extra.HasField("usage")
                self.terminals[extra.slot] = extra
