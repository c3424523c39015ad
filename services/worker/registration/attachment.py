"""The attachment to one router: a stream that renews the worker's lease and carries its cache events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

import grpc

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u64
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheTier, KvEvent
from services.worker.contract.engine import Load
from services.worker.kv_events.event_log import KvEventLog, NumberedBatch, chunks
from services.worker.serving.wire import write_loads
from sluice.v1 import common_pb2, router_pb2

log = logging.getLogger(__name__)

ATTACH_S = 5.0
LEAVE_S = 1.0
HEARTBEAT_S = 1.0
# An event after an idle period is sent immediately; events within this interval share a message.
EVENT_PACE_S = 0.02
SNAPSHOT_HASHES = 65_536

Call = grpc.aio.StreamStreamCall[router_pb2.AttachRequest, router_pb2.AttachResponse]


class Attachment:
    """Represents the worker on one Attach stream until the stream ends or `leave` is called.

    Args:
        registration: the first message.
        logs: the event log of each rank; the router receives the events it lacks, or a snapshot.
        load: returns the load of each rank; called at every heartbeat.
        on_attached: called when the router has accepted the registration.
    """

    def __init__(
        self,
        call: Call,
        registration: router_pb2.Registration,
        logs: Sequence[KvEventLog],
        load: Callable[[], Sequence[Load]],
        on_attached: Callable[[], None],
    ) -> None:
        self._call = call
        self._registration = registration
        self._logs = {kv_log.rank: kv_log for kv_log in logs}
        self._load = load
        self._on_attached = on_attached
        self._sent: dict[int, int] = {}
        self._resync: set[int] = set()
        self._heartbeat_s = HEARTBEAT_S
        self._wake = asyncio.Event()
        self._leaving = ""

    def leave(self, reason: str) -> None:
        """Sends a Leave as the next message; `run` then returns."""
        self._leaving = reason
        self._wake.set()

    def resync(self) -> None:
        """Sends a snapshot of every rank's cache to the router."""
        self._resync.update(self._logs)
        self._wake.set()

    def drop(self) -> None:
        """Cancels the stream without a Leave; `run` then raises."""
        self._call.cancel()

    async def run(self) -> None:
        """Runs the stream; returns after `leave`.

        Raises:
            grpc.aio.AioRpcError: the stream failed.
            SluiceError: the router closed the stream or did not respond in time.
        """
        await self._register()
        reading = asyncio.get_running_loop().create_task(self._read())
        writing = asyncio.get_running_loop().create_task(self._write_until_left())
        for kv_log in self._logs.values():
            kv_log.on_change = self._wake.set
        try:
            await asyncio.wait((reading, writing), return_when=asyncio.FIRST_COMPLETED)
            for task in (reading, writing):  # the reader first: its error has the status of the stream
                if task.done() and not task.cancelled():
                    task.result()
            if not writing.done() or writing.cancelled():
                raise SluiceError(ErrorKind.DISCONNECTED, "The stream to the router was closed.")
            await self._finish(reading)
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
            self._call.cancel()

    async def _register(self) -> None:
        try:
            async with asyncio.timeout(ATTACH_S):
                await self._write(router_pb2.AttachRequest(registration=self._registration))
                response = await self._call.read()
        except TimeoutError as error:
            self._call.cancel()
            raise SluiceError(
                ErrorKind.RESPONSE_TIMEOUT, "The router did not respond to the registration in time."
            ) from error
        if not isinstance(response, router_pb2.AttachResponse) or not response.HasField("attached"):
            raise SluiceError(ErrorKind.DISCONNECTED, "The router closed the stream without accepting the worker.")
        attached = response.attached
        if attached.heartbeat_interval_ms:
            self._heartbeat_s = attached.heartbeat_interval_ms / 1000
        self._sent = {rank: attached.sequences.get(rank, 0) for rank in self._logs}
        self._on_attached()

    async def _read(self) -> None:
        while isinstance(response := await self._call.read(), router_pb2.AttachResponse):
            if response.HasField("resync") and response.resync.data_parallel_rank in self._logs:
                log.info("router requested a snapshot", extra={"reason": response.resync.reason})
                self._resync.add(response.resync.data_parallel_rank)
                self._wake.set()
        raise SluiceError(ErrorKind.DISCONNECTED, "The router closed the stream.")

    async def _write_until_left(self) -> None:
        loop = asyncio.get_running_loop()
        heartbeat_due = loop.time()
        while True:
            for message in self._changes():
                await self._write(message)
            if self._leaving:
                await self._write(router_pb2.AttachRequest(leave=router_pb2.Leave(reason=self._leaving)))
                return
            if loop.time() >= heartbeat_due:
                await self._write(
                    router_pb2.AttachRequest(heartbeat=router_pb2.Heartbeat(loads=write_loads(self._load())))
                )
                heartbeat_due = loop.time() + self._heartbeat_s
            await self._pause(heartbeat_due)

    async def _pause(self, heartbeat_due: float) -> None:
        """Waits for the next heartbeat, or for a change, at least EVENT_PACE_S after the last message."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        timer = loop.call_at(heartbeat_due, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()
        await asyncio.sleep(max(sent_at + EVENT_PACE_S - loop.time(), 0))  # at least a turn, for the next step's events
        self._wake.clear()

    async def _write(self, message: router_pb2.AttachRequest) -> None:
        try:
            async with asyncio.timeout(ATTACH_S):
                await self._call.write(message)
        except TimeoutError as error:
            raise SluiceError(ErrorKind.RESPONSE_TIMEOUT, "The router does not read its messages.") from error
        except asyncio.InvalidStateError as error:
            raise SluiceError(ErrorKind.DISCONNECTED, "The stream to the router was closed.") from error

    async def _finish(self, reading: asyncio.Task[None]) -> None:
        """Closes the sending side and waits for the router to end the stream."""
        if not self._call.done():
            try:
                await self._call.done_writing()
            except Exception as error:  # gRPC raises untyped errors when the router disconnects meanwhile
                log.debug("stream to the router could not be closed", extra={"reason": repr(error)})
        await asyncio.wait((reading,), timeout=LEAVE_S)

    def _changes(self) -> Iterator[router_pb2.AttachRequest]:
        """Yields the events or snapshots that the router lacks, rank by rank."""
        for rank, kv_log in self._logs.items():
            batches = None if rank in self._resync else kv_log.batches_after(self._sent[rank])
            if batches is None:
                self._resync.discard(rank)
                snapshot = list(_snapshot(kv_log))
                self._sent[rank] = kv_log.sequence
                yield from (router_pb2.AttachRequest(snapshot=piece) for piece in snapshot)
                continue
            for batch in batches:
                self._sent[rank] = batch.sequence
                yield router_pb2.AttachRequest(events=_write_batch(rank, batch))


def _snapshot(kv_log: KvEventLog) -> Iterator[router_pb2.Snapshot]:
    for tier, tier_hashes in kv_log.snapshot().items():
        for hashes in chunks(tier_hashes, SNAPSHOT_HASHES):
            yield router_pb2.Snapshot(
                data_parallel_rank=kv_log.rank,
                sequence=kv_log.sequence,
                tier=_write_tier(tier),
                block_hashes=pack_u64(hashes),
            )
    yield router_pb2.Snapshot(data_parallel_rank=kv_log.rank, sequence=kv_log.sequence, last=True)


def _write_batch(rank: int, batch: NumberedBatch) -> router_pb2.KvEventBatch:
    return router_pb2.KvEventBatch(
        data_parallel_rank=rank,
        sequence=batch.sequence,
        events=[_write_event(event) for event in batch.events],
    )


def _write_event(event: KvEvent) -> router_pb2.KvEvent:
    if isinstance(event, BlocksStored):
        return router_pb2.KvEvent(
            stored=router_pb2.BlocksStored(block_hashes=pack_u64(event.hashes), tier=_write_tier(event.tier))
        )
    if isinstance(event, BlocksRemoved):
        return router_pb2.KvEvent(
            removed=router_pb2.BlocksRemoved(block_hashes=pack_u64(event.hashes), tier=_write_tier(event.tier))
        )
    return router_pb2.KvEvent(cleared=router_pb2.CacheCleared())


def _write_tier(tier: CacheTier) -> common_pb2.CacheTier.ValueType:
    return common_pb2.CacheTier.ValueType(int(tier))
