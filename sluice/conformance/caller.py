"""The caller's side of one worker session, which records all messages and every violation of their form."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u32, unpack_u32
from services.common.types.media.spans import content_hash
from sluice.conformance.exceptions import RuleFailed
from sluice.conformance.observed_stream import ObservedStream
from sluice.conformance.patience import Patience
from sluice.v1 import worker_pb2, worker_pb2_grpc

CLOSE_S = 2.0
PART_BYTES = 256 << 10


class ConformanceClient:
    """Runs requests on one session.

    Attributes:
        violations: malformed messages, described in a sentence each.
        batches: number of messages received.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub, patience: Patience) -> None:
        self._call: grpc.aio.StreamStreamCall[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch] = stub.Session()
        self._patience = patience
        self._by_slot: dict[int, ObservedStream] = {}
        self._next_slot = 1
        self._lost = asyncio.Event()
        self._loss_reason = ""
        self.violations: list[str] = []
        self.batches = 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def start(self, *requests: worker_pb2.GenerateRequest, slot: int | None = None) -> list[ObservedStream]:
        """Starts requests in one message, each in a new slot; `slot` sets the slot of the first."""
        started = []
        for request in requests:
            chosen = self._next_slot if slot is None else slot
            slot, self._next_slot = None, max(self._next_slot, chosen) + 1
            stream = ObservedStream(request, chosen)
            self._by_slot[chosen] = stream
            started.append(stream)
        starts = [worker_pb2.SessionStart(slot=stream.slot, request=stream.request) for stream in started]
        await self._write(worker_pb2.WorkerSessionRequest(starts=starts))
        return started

    async def complete(self, *requests: worker_pb2.GenerateRequest, slot: int | None = None) -> list[ObservedStream]:
        """Starts requests and waits for their terminal deltas."""
        streams = await self.start(*requests, slot=slot)
        await self.wait_ended(*streams)
        return streams

    async def complete_one(self, request: worker_pb2.GenerateRequest, slot: int | None = None) -> ObservedStream:
        """Starts one request and waits for its terminal delta."""
        return (await self.complete(request, slot=slot))[0]

    async def send_file(self, data: bytes, content: bytes = b"") -> None:
        """Sends a media file in parts; `content` replaces its content hash."""
        for offset in range(0, len(data), PART_BYTES):
            part = worker_pb2.MediaChunk(
                hash=content or content_hash(data),
                size=len(data),
                offset=offset,
                data=data[offset : offset + PART_BYTES],
            )
            await self._write(worker_pb2.WorkerSessionRequest(media=[part]))

    async def cancel(self, slots: Iterable[int]) -> None:
        """Cancels slots in one message."""
        await self._write(worker_pb2.WorkerSessionRequest(cancels=pack_u32(slots)))

    async def wait_begun(self, *streams: ObservedStream) -> None:
        """Waits until every request has a token or has ended."""
        await self._wait_all([stream.began for stream in streams], "sent no token", self._patience.generation_s)

    async def wait_ended(self, *streams: ObservedStream, within_s: float | None = None) -> None:
        """Waits until every request has its terminal delta."""
        timeout_s = self._patience.generation_s if within_s is None else within_s
        await self._wait_all([stream.ended for stream in streams], "sent no terminal delta", timeout_s)

    async def close(self) -> None:
        """Cancels running requests, waits briefly for their end, and drops the session."""
        running = [stream for stream in self._by_slot.values() if not stream.terminals]
        if running and not self._lost.is_set():
            try:
                await self.cancel(stream.slot for stream in running)
                await self.wait_ended(*running, within_s=CLOSE_S)
            except RuleFailed:
                pass  # the rule already has its result; this is cleanup only
        await self.drop()

    async def drop(self) -> None:
        """Cancels the session without cancelling its requests."""
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _wait_all(self, events: Sequence[asyncio.Event], failure: str, within_s: float) -> None:
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            async with asyncio.timeout(within_s):
                for event in events:
                    await self._wait_one(event, lost)
        except TimeoutError:
            missing = sum(1 for event in events if not event.is_set())
            raise RuleFailed(f"{missing} of {len(events)} requests {failure} within {within_s:g} s.") from None
        finally:
            lost.cancel()

    async def _wait_one(self, event: asyncio.Event, lost: asyncio.Future[Any]) -> None:
        if event.is_set():
            return
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((waiting, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not event.is_set():
            raise RuleFailed(f"The session ended: {self._loss_reason}.")

    async def _write(self, message: worker_pb2.WorkerSessionRequest) -> None:
        try:
            async with asyncio.timeout(self._patience.answer_s):
                await self._call.write(message)
        except TimeoutError:
            raise RuleFailed("The worker does not read the messages of its session.") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.wait((self._reading,), timeout=1)
            raise RuleFailed(f"The session ended: {self._loss_reason or 'the worker closed it'}.") from None

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._take(cast(worker_pb2.TokenBatch, message))
            self._loss_reason = "the worker closed it"
        except grpc.aio.AioRpcError as error:
            self._loss_reason = f"{error.code().name}: {error.details()}"
        finally:
            self._lost.set()

    def _take(self, batch: worker_pb2.TokenBatch) -> None:
        self.batches += 1
        begun = {slot: bool(stream.token_ids) for slot, stream in self._by_slot.items()}
        for slot, ids in self._rows(batch):
            if stream := self._find(slot):
                stream.take_tokens(ids)
        for extra in batch.extras:
            if stream := self._find(extra.slot):
                stream.take_extra(extra, late=begun[extra.slot])

    def _rows(self, batch: worker_pb2.TokenBatch) -> list[tuple[int, list[int]]]:
        try:
            slots, counts = unpack_u32(batch.slots, "slots"), unpack_u32(batch.counts, "counts")
            token_ids = unpack_u32(batch.token_ids, "token_ids").tolist()
        except SluiceError as error:
            self.violations.append(error.message)
            return []
        if len(slots) != len(counts):
            self.violations.append(f"A batch has {len(slots)} slots and {len(counts)} counts.")
        if sum(counts) != len(token_ids):
            self.violations.append(f"The counts of a batch sum to {sum(counts)} but it has {len(token_ids)} ids.")
        rows, start = [], 0
        for slot, count in zip(slots, counts, strict=False):
            rows.append((slot, token_ids[start : start + count]))
            start += count
        return rows

    def _find(self, slot: int) -> ObservedStream | None:
        stream = self._by_slot.get(slot)
        if stream is None:
            self.violations.append(f"A batch contains slot {slot}, which was never started.")
        return stream
