"""A router without gRPC and workers that are lists of blocks, for tests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

from services.common.base.packing import pack_u32, pack_u64
from services.common.types.hashing import block_hashes
from services.router.registration.stream import WorkerStream
from services.router.registration.stream_messages import LoadReport
from services.router.router import Router, RouterConfig
from services.router.scheduling.queries import Prompt, Query, RouteResult
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.reservations.cost import CostModel, Load
from services.router.state.store.base import Store
from services.router.state.store.memory import MemoryStore
from services.router.state.workers.worker import Role, Worker, WorkerRank

BLOCK = 8
COST = CostModel()


def tokens(blocks: str) -> list[int]:
    """A letter is a block of its own tokens."""
    return [ord(letter) * 100 + at for letter in blocks for at in range(BLOCK)]


def prompt(blocks: str, lora: str = "", salt: str = "") -> Prompt:
    return Prompt(token_ids=pack_u32(tokens(blocks)), lora=lora, cache_salt=salt)


def worker(
    worker_id: str,
    model: str = "m",
    ranks: int = 1,
    role: Role = Role.AGGREGATED,
    size: int = BLOCK,
    blocks: int = 1000,
    capabilities: tuple[str, ...] = (),
    handoff_form: str = "",
) -> Worker:
    return Worker(
        worker_id,
        f"{worker_id}:1",
        1,
        model,
        role,
        size,
        "sluice-xxh3-v1",
        blocks,
        ranks,
        b"",
        capabilities=capabilities,
        handoff_form=handoff_form,
    )


class Cluster:
    """A router and its workers; `run` routes a prompt and caches it where it went."""

    def __init__(self, config: RouterConfig | None = None, store: Store | None = None, **more: Any) -> None:
        self.router = Router(store or MemoryStore(random=Random(3)), config, Random(3), **more)
        self.attachments: dict[tuple[str, str], WorkerStream] = {}
        self.sequences: dict[tuple[str, str, int], int] = {}
        self.requests = 0

    async def add(self, *workers: Worker) -> None:
        for each in workers:
            attachment, _ = await self.router.worker_manager.attach(each)
            self.attachments[each.model, each.worker_id] = attachment

    async def report(self, worker_id: str, document: bytes) -> None:
        await self.attachments["m", worker_id].handle([LoadReport(document)])

    async def lose(self, attachment: WorkerStream) -> None:
        watch = self.router.registry.watch()
        known = len(await watch.next())
        self.router.worker_manager.detach(attachment)
        assert known
        await asyncio.wait_for(watch.next(), 10)

    async def cache(self, model: str, slot: WorkerRank, hashes: bytes) -> None:
        key = (model, slot.worker_id, slot.rank)
        self.sequences[key] = sequence = self.sequences.get(key, 0) + 1
        batch = EventBatch(slot.rank, sequence, (BlockOp(CacheOperation.STORED, Tier.DEVICE, hashes),))
        replies = await self.attachments[model, slot.worker_id].handle([batch])
        assert replies.acks == {slot.rank: sequence}

    async def run(self, blocks: str, only: str | None = None) -> RouteResult:
        self.requests += 1
        candidates = frozenset({only}) if only else None
        query = Query("m", prompt(blocks), COST, f"r{self.requests}", candidates=candidates)
        route = await self.router.query(query)
        await self.cache(
            "m", WorkerRank(route.worker.worker_id, route.rank), pack_u64(block_hashes(tokens(blocks), BLOCK))
        )
        await self.router.lifecycle.free([route.reservation_id])
        return route

    async def __aenter__(self) -> Cluster:
        self.router.start()
        await asyncio.wait_for(self.router.ready.wait(), 20)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.router.stop()
        await self.router.close()

    async def loads(self) -> dict[str, Load]:
        return {slot.worker_id: load for slot, (_, load) in (await self.router.loads("m")).items()}

    async def ask(self, ref: Prompt, **more: Any) -> RouteResult:
        return await self.router.query(replace(Query("m", ref, COST), **more))
