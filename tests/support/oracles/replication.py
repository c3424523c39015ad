"""Router replicas in this process on one Redis, and workers whose caches are known: for random histories."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u64, unpack_u64
from services.router.registration.stream import WorkerStream
from services.router.registration.stream_messages import LoadReport, Replies, SnapshotChunk, WorkerMessage
from services.router.router import Router, RouterConfig
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.store.redis import RedisStore
from services.router.state.workers.worker import Role, Worker, WorkerRank
from tests.support.servers.redis_server import RedisServer

MODEL = "m"
CAPACITY = 1_000
Content = dict[WorkerRank, tuple[int, int, list[list[int]]]]  # epoch, sequence, sorted hashes by tier


class Replica:
    """A router that can be restarted."""

    def __init__(self, redis: RedisServer, lease_ms: int = 120_000, timeout_s: float = 2) -> None:
        self._redis = redis
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self.deaths: list[str] = []

    def start(self) -> None:
        """Starts; it may not have reached Redis yet."""
        store = RedisStore(self._redis.url, timeout_s=self._timeout_s, random=Random(1))
        self.router = Router(
            store, RouterConfig(lease_ms=self._lease_ms), Random(1), lambda name, error: self.deaths.append(name)
        )
        self.router.start()

    async def stop(self) -> None:
        """Ends; its workers move elsewhere."""
        self.router.stop()
        await self.router.close()

    @property
    def content(self) -> Content:
        """Its index."""
        found: Content = {}
        for view in self.router.indexes(MODEL):
            for slot in view.index.slots:
                holding = view.index.cache(slot)
                assert holding is not None
                found[slot] = (holding.epoch, holding.sequence, [sorted(shelf) for shelf in holding.tiers])
        return found

    @property
    def distinct_blocks(self) -> int:
        """Entries in its index."""
        return sum(view.index.distinct_blocks for view in self.router.indexes(MODEL))


@dataclass
class Engine:
    """A worker: what it holds, what it has said, and to whom it is attached.

    Its identity names it, so that a restart need not wait for the old lease; each start has a lease key of its own.
    """

    name: str
    ranks: int
    epoch: int = 1
    tiers: list[list[set[int]]] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    attachment: WorkerStream | None = None
    replica: Replica | None = None
    late: list[EventBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.tiers = [[set() for _ in Tier] for _ in range(self.ranks)]
        self.sequences = [0] * self.ranks
        self.late = []

    @property
    def worker(self) -> Worker:
        """Its card."""
        return Worker(
            self.name,
            f"{self.name}:1",
            self.epoch,
            MODEL,
            Role.AGGREGATED,
            16,
            "sluice-xxh3-v1",
            CAPACITY,
            self.ranks,
            b"",
            caller=f"worker/{self.name}",
            lease_digest=f"start {self.epoch}",
        )

    @property
    def content(self) -> Content:
        """What every replica should hold of it."""
        return {
            WorkerRank(self.name, rank): (self.epoch, self.sequences[rank], [sorted(held) for held in self.tiers[rank]])
            for rank in range(self.ranks)
        }

    async def attach(self, replica: Replica) -> None:
        """Opens a stream, and brings the router up to date where that held other things."""
        old, old_replica = self.attachment, self.replica
        self.attachment, held = await replica.router.worker_manager.attach(self.worker)
        self.replica = replica
        if old is not None and old_replica is not None:
            old_replica.router.worker_manager.detach(old)
        for rank, sequence in enumerate(self.sequences):
            if held.get(rank, 0) != sequence:
                await self._snapshot(rank)

    def detach(self) -> None:
        """Its stream ends."""
        if self.attachment is not None and self.replica is not None:
            self.replica.router.worker_manager.detach(self.attachment)
        self.attachment = self.replica = None

    async def restart(self, replica: Replica) -> None:
        """Comes back empty with a new epoch."""
        self.detach()
        self.epoch += 1
        self._forget()
        await self.attach(replica)

    def happens(self, rank: int, kind: CacheOperation, tier: Tier, hashes: list[int]) -> EventBatch:
        """Its cache changes; returns what it should say about that."""
        if kind is CacheOperation.STORED:
            self.tiers[rank][tier].update(hashes)
        elif kind is CacheOperation.REMOVED:
            self.tiers[rank][tier].difference_update(hashes)
        else:
            self.tiers[rank] = [set() for _ in Tier]
        self.sequences[rank] += 1
        return EventBatch(rank, self.sequences[rank], (BlockOp(kind, tier, pack_u64(hashes)),))

    async def say(self, *said: WorkerMessage) -> None:
        """Tells its router, and sends the snapshots that it asks for."""
        if self.attachment is None:
            return
        try:
            replies = await self.attachment.handle(said)
        except SluiceError:  # cut off: it attaches again
            if self.replica is not None:
                await self.attach(self.replica)
            return
        await self._answer(replies)

    async def beat(self) -> None:
        """A heartbeat."""
        await self.say(LoadReport(b""))

    async def settle(self) -> None:
        """Says something new on every rank, so that whatever was lost is noticed."""
        for rank in range(self.ranks):
            await self.say(self.happens(rank, CacheOperation.STORED, Tier.DEVICE, [10_000 + self.sequences[rank] % 7]))

    async def _answer(self, replies: Replies) -> None:
        for rank in replies.resyncs:
            await self._snapshot(rank)

    async def _snapshot(self, rank: int) -> None:
        chunks = [
            SnapshotChunk(rank, self.sequences[rank], tier, pack_u64(sorted(held)), last=tier is Tier.DISK)
            for tier, held in zip(Tier, self.tiers[rank], strict=True)
        ]
        await self.say(*chunks)


async def stored_content(store: RedisStore) -> Content:
    """What Redis holds."""
    found: Content = {}
    for worker in (await store.load(MODEL)).workers:
        for slot in worker.slots:
            blocks = await store.blocks(MODEL, slot)
            assert blocks is not None
            epoch, snapshot = blocks
            found[slot] = (epoch, snapshot.sequence, [sorted(unpack_u64(tier)) for tier in snapshot.tiers])
    return found
