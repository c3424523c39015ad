"""The caller's side of one worker session: it remembers everything and forgives nothing silently."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import grpc

from services.common.errors import SluiceError
from services.common.packing import pack_u32, unpack_u32
from sluice.conformance.heard import ObservedStream
from sluice.conformance.patience import Patience
from sluice.conformance.rule import Broken
from sluice.v1 import worker_pb2, worker_pb2_grpc

GOODBYE_S = 2.0


class Caller:
    """One session.

    Attributes:
        violations: what was wrong with the form of its messages, each a sentence.
        batches: messages received.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerAsyncStub, patience: Patience) -> None:
        self._call: grpc.aio.StreamStreamCall[worker_pb2.WorkerSessionRequest, worker_pb2.TokenBatch] = stub.Session()
        self._patience = patience
        self._by_slot: dict[int, ObservedStream] = {}
        self._next_slot = 1
        self._lost = asyncio.Event()
        self._why_lost = ""
        self.violations: list[str] = []
        self.batches = 0
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def start(self, *requests: worker_pb2.GenerateRequest, slot: int | None = None) -> list[ObservedStream]:
        """Starts requests in one message, each in a slot of its own; `slot` names that of the first."""
        fresh = []
        for request in requests:
            chosen = self._next_slot if slot is None else slot
            slot, self._next_slot = None, max(self._next_slot, chosen) + 1
            heard = ObservedStream(request, chosen)
            self._by_slot[chosen] = heard
            fresh.append(heard)
        starts = [worker_pb2.SessionStart(slot=heard.slot, request=heard.request) for heard in fresh]
        await self._write(worker_pb2.WorkerSessionRequest(starts=starts))
        return fresh

    async def ask(self, *requests: worker_pb2.GenerateRequest, slot: int | None = None) -> list[ObservedStream]:
        """Starts requests and waits until each has its terminal delta."""
        heard = await self.start(*requests, slot=slot)
        await self.ended(*heard)
        return heard

    async def ask_one(self, request: worker_pb2.GenerateRequest, slot: int | None = None) -> ObservedStream:
        """Starts one request and waits for its end."""
        return (await self.ask(request, slot=slot))[0]

    async def cancel(self, slots: Iterable[int]) -> None:
        """One message that cancels slots."""
        await self._write(worker_pb2.WorkerSessionRequest(cancels=pack_u32(slots)))

    async def began(self, *requests: ObservedStream) -> None:
        """Waits until each request has a token, or has ended."""
        await self._all_of([heard.began for heard in requests], "sent no token", self._patience.generation_s)

    async def ended(self, *requests: ObservedStream, within_s: float | None = None) -> None:
        """Waits until each request has its terminal delta."""
        waited = self._patience.generation_s if within_s is None else within_s
        await self._all_of([heard.ended for heard in requests], "sent no terminal delta", waited)

    async def close(self) -> None:
        """Cancels what runs, waits a little for its end, and drops the session."""
        live = [heard for heard in self._by_slot.values() if not heard.terminals]
        if live and not self._lost.is_set():
            try:
                await self.cancel(heard.slot for heard in live)
                await self.ended(*live, within_s=GOODBYE_S)
            except Broken:
                pass  # the rule has said what it has to say; this is only tidying up
        await self.drop()

    async def drop(self) -> None:
        """Vanishes without a word."""
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _all_of(self, events: Sequence[asyncio.Event], otherwise: str, within_s: float) -> None:
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            async with asyncio.timeout(within_s):
                for event in events:
                    await self._one_of(event, lost)
        except TimeoutError:
            missing = sum(1 for event in events if not event.is_set())
            raise Broken(f"{missing} of {len(events)} requests {otherwise} within {within_s:g} s.") from None
        finally:
            lost.cancel()

    async def _one_of(self, event: asyncio.Event, lost: asyncio.Future[Any]) -> None:
        if event.is_set():
            return
        waiting = asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((waiting, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not event.is_set():
            raise Broken(f"The session ended: {self._why_lost}.")

    async def _write(self, message: worker_pb2.WorkerSessionRequest) -> None:
        try:
            async with asyncio.timeout(self._patience.answer_s):
                await self._call.write(message)
        except TimeoutError:
            raise Broken("The worker does not read its session.") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await asyncio.wait((self._reading,), timeout=1)
            raise Broken(f"The session ended: {self._why_lost or 'the worker closed it'}.") from None

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._take(cast(worker_pb2.TokenBatch, message))
            self._why_lost = "the worker closed it"
        except grpc.aio.AioRpcError as error:
            self._why_lost = f"{error.code().name}: {error.details()}"
        finally:
            self._lost.set()

    def _take(self, batch: worker_pb2.TokenBatch) -> None:
        self.batches += 1
        begun = {slot: bool(heard.token_ids) for slot, heard in self._by_slot.items()}
        for slot, ids in self._rows(batch):
            if heard := self._named(slot):
                heard.take_tokens(ids)
        for extra in batch.extras:
            if heard := self._named(extra.slot):
                heard.take_extra(extra, late=begun[extra.slot])

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
            self.violations.append(f"The counts of a batch add up to {sum(counts)}, its ids are {len(token_ids)}.")
        rows, start = [], 0
        for slot, count in zip(slots, counts, strict=False):
            rows.append((slot, token_ids[start : start + count]))
            start += count
        return rows

    def _named(self, slot: int) -> ObservedStream | None:
        heard = self._by_slot.get(slot)
        if heard is None:
            self.violations.append(f"A batch speaks of slot {slot}, which was never started.")
        return heard
