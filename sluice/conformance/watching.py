"""The kit as a router: receives the card, load and cache events of a worker that registers with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from services.common.base.errors import SluiceError
from services.common.base.packing import unpack_u64
from services.common.rpc.server import GrpcServer
from services.common.settings.service import GrpcServiceSettings
from sluice.v1 import router_pb2

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
LEASE_MS, HEARTBEAT_MS = 10_000, 500

Context = grpc.aio.ServicerContext[Any, Any]
Blocks = set[tuple[int, int]]


@dataclass(slots=True)
class RankView:
    """The cache of one data-parallel rank, as reported by its events and snapshots.

    Attributes:
        sequence: number of the last batch or snapshot.
        batches: number of batches received.
        blocks: tier and hash of every cached block.
        faults: descriptions of gaps in the numbering and of malformed messages.
        snapshots: number of complete snapshots received.
        lost, gained: number of blocks that the last snapshot lacked or had in addition, compared with the events up to
            its number; None when the snapshot was ahead of the events.
        incoming: blocks of an incomplete snapshot.
    """

    sequence: int = 0
    batches: int = 0
    blocks: Blocks = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    snapshots: int = 0
    lost: int | None = None
    gained: int | None = None
    incoming: Blocks = field(default_factory=set)

    @property
    def hashes(self) -> set[int]:
        """Hashes of the cached blocks on all tiers."""
        return {block_hash for _, block_hash in self.blocks}

    def take_batch(self, batch: router_pb2.KvEventBatch) -> None:
        """Applies one batch."""
        if batch.sequence != self.sequence + 1:
            self.faults.append(f"batch {batch.sequence} follows number {self.sequence}")
        self.sequence = batch.sequence
        self.batches += 1
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "stored":
                self.blocks |= self._read(event.stored.tier, event.stored.block_hashes)
            elif kind == "removed":
                self.blocks -= self._read(event.removed.tier, event.removed.block_hashes)
            elif kind == "cleared":
                self.blocks.clear()

    def take_snapshot(self, piece: router_pb2.Snapshot) -> None:
        """Adds a piece of a snapshot; the last one replaces the blocks."""
        self.incoming |= self._read(piece.tier, piece.block_hashes)
        if piece.last:
            comparable = piece.sequence == self.sequence
            self.lost = len(self.blocks - self.incoming) if comparable else None
            self.gained = len(self.incoming - self.blocks) if comparable else None
            if piece.sequence < self.sequence:
                self.faults.append(f"a snapshot up to number {piece.sequence} follows number {self.sequence}")
            self.blocks, self.incoming = self.incoming, set()
            self.sequence = piece.sequence
            self.snapshots += 1

    def _read(self, tier: int, packed: bytes) -> Blocks:
        try:
            return {(tier or 1, block_hash) for block_hash in unpack_u64(packed)}
        except SluiceError as error:
            self.faults.append(error.message)
            return set()


class Watcher:
    """A router that only receives registrations.

    Args:
        listen: host:port; port 0 selects a free port.

    Attributes:
        registration: the last registration; None before the first.
        heartbeats: number of heartbeats received since then.
        ranks: the reported cache of each rank.
        left: whether the worker has deregistered.
    """

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self._server = GrpcServer(GrpcServiceSettings(listen=listen), router_pb2.DESCRIPTOR)
        attach = grpc.stream_stream_rpc_method_handler(
            self._attach,
            request_deserializer=router_pb2.AttachRequest.FromString,
            response_serializer=router_pb2.AttachResponse.SerializeToString,
        )
        # All other RPCs return UNIMPLEMENTED.
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Attach": attach})
        self._server.server.add_generic_rpc_handlers((handlers,))
        self._host = listen.rpartition(":")[0]
        self._context: Context | None = None
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self.registration: router_pb2.Registration | None = None
        self.heartbeats = 0
        self.ranks: dict[int, RankView] = {}
        self.left = False
        self._timed_out = False

    @property
    def address(self) -> str:
        """host:port to give the worker as its router."""
        return f"{self._host}:{self._server.port}"

    async def start(self) -> None:
        """Starts to listen; raises SluiceError when the address cannot be bound."""
        await self._server.start()
        await self._server.set_serving(True)

    async def close(self) -> None:
        """Ends the streams, which gRPC would otherwise cancel with a traceback, and stops the server."""
        self._closing.set()
        await self._server.stop(0.2)

    async def until(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Waits for messages until the condition is true; returns False on timeout."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    async def registered(self, within_s: float) -> bool:
        """Waits for the worker to register; after a timeout, later calls do not wait again."""
        timeout_s = 0.0 if self._timed_out else within_s
        self._timed_out = not await self.until(lambda: self.registration is not None, timeout_s)
        return not self._timed_out

    async def resync(self, rank: int) -> None:
        """Requests a snapshot of a rank; does nothing when no worker is attached."""
        if self._context is not None:
            await self._context.write(
                router_pb2.AttachResponse(
                    resync=router_pb2.ResyncRequest(data_parallel_rank=rank, reason="conformance")
                )
            )

    async def _attach(self, _: object, context: Context) -> None:
        closing = asyncio.create_task(self._closing.wait())
        with self._attachment(context):
            try:
                while (message := await _read_or_close(context.read(), closing)) not in (None, grpc.aio.EOF):
                    await self._take(cast(router_pb2.AttachRequest, message), context)
            finally:
                closing.cancel()

    @contextmanager
    def _attachment(self, context: Context) -> Iterator[None]:
        self._context, self.left = context, False
        try:
            yield
        finally:
            if self._context is context:
                self._context = None
            self._changed.set()

    async def _take(self, message: router_pb2.AttachRequest, context: Context) -> None:
        kind = message.WhichOneof("message")
        if kind == "registration":
            self.registration, self.heartbeats, self.ranks = message.registration, 0, {}
            attached = router_pb2.Attached(lease_ms=LEASE_MS, heartbeat_interval_ms=HEARTBEAT_MS)
            await context.write(router_pb2.AttachResponse(attached=attached))
        elif kind == "heartbeat":
            self.heartbeats += 1
        elif kind == "events":
            self._rank(message.events.data_parallel_rank).take_batch(message.events)
        elif kind == "snapshot":
            self._rank(message.snapshot.data_parallel_rank).take_snapshot(message.snapshot)
        elif kind == "leave":
            self.left = True
        self._changed.set()

    def _rank(self, rank: int) -> RankView:
        return self.ranks.setdefault(rank, RankView())


async def _read_or_close(reading: Awaitable[object], closing: asyncio.Task[bool]) -> object:
    """Returns the message read; None when `closing` completes first."""
    task = asyncio.ensure_future(reading)
    try:
        await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
