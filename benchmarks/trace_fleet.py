"""A fleet of mock workers behind a router, in virtual time: the services' own code, no clock, no network."""

from __future__ import annotations

import asyncio
import heapq
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Literal

from services.common.base.errors import SluiceError
from services.common.base.packing import pack_u64
from services.common.types.hashing import HASH_SCHEME, block_hashes
from services.router.registration.stream import WorkerStream
from services.router.router import Router, RouterConfig
from services.router.scheduling.queries import Prompt, Query
from services.router.state.kv_index.events import BlockOp, CacheOperation, EventBatch, Tier
from services.router.state.reservations.cost import PREFILL_LOAD_SCALE, CostModel
from services.router.state.store.memory import MemoryStore
from services.router.state.workers.worker import KV_EVENTS, Role, Worker
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, KvEvent
from services.worker.contract.generation import FinishReason, GenerateRequest, StopParams
from services.worker.engines.mock.blocks import BlockPool
from services.worker.engines.mock.scheduler import MockScheduler, MockStep
from services.worker.engines.mock.sequence import Sequence as Running
from services.worker.engines.mock.text import Answer
from services.worker.engines.mock.timing import ModelledTiming

TOKENS_PER_ID = 512
MODEL = "trace"
EPOCH = 1
FOREVER_MS = 1 << 40
LETS_OTHERS_RUN_EVERY = 256  # events; the router's background tasks follow its own change feed
_ANSWER_TOKEN = 1 << 31  # above every prompt's


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the trace; `ids` name its blocks of 512 tokens, equal ids equal prefixes.

    `session` and `agent` number the conversation and whose prompt it has, where that is known.
    `salt` keeps it apart from requests of other salts in the prefix cache; empty for none.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    salt: str = field(default="", kw_only=True)
    session: int = field(default=0, kw_only=True)
    agent: int = field(default=0, kw_only=True)


Affinity = Literal["none", "session", "agent", "user"]
"""Which requests name the same session: none does, those of a conversation, of an agent, all (one user)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the workers are like, and how the router weighs."""

    workers: int = 8
    cache_tokens: int = 1_048_576
    block_size: int = TOKENS_PER_ID
    max_sequences: int = 256
    max_batched_tokens: int = 8_192
    max_waiting: int = 64
    prefill_load_scale: float = PREFILL_LOAD_SCALE
    seed: int = 1
    affinity: Affinity = "none"


@dataclass(slots=True)
class Outcome:
    """What happened to the requests; seconds are virtual.

    Of `followed` requests that continue a session, `stayed` went to the worker of the request before.
    """

    offered: int = 0
    shed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    followed: int = 0
    stayed: int = 0
    ended_s: float = 0.0


def read_trace(path: Path, most: int = 0) -> list[Arrival]:
    """Reads JSON lines with timestamp (ms), input_length, output_length and hash_ids; all of them when `most` is 0."""
    arrivals = []
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            tokens, ids = entry["input_length"], tuple(entry["hash_ids"])
            arrivals.append(Arrival(entry["timestamp"] / 1e3, tokens, max(entry["output_length"], 1), ids))
            if len(arrivals) == most:
                break
    return arrivals


def without_reuse(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same load with no two blocks alike."""
    fresh = count()
    return [replace(each, ids=tuple(next(fresh) for _ in each.ids)) for each in arrivals]


def tokens_of(arrival: Arrival) -> array[int]:
    """A prompt in which equal ids are equal blocks."""
    tokens = array("I")
    for each in arrival.ids:
        tokens.extend(array("I", (each,)) * TOKENS_PER_ID)
    missing = arrival.prompt_tokens - len(tokens)
    if missing > 0:
        tokens.extend(array("I", (0,)) * missing)
    return tokens[: arrival.prompt_tokens]


class MockWorker:
    """The mock engine's scheduler, attached to a router."""

    def __init__(self, name: str, shape: Shape) -> None:
        total_blocks = shape.cache_tokens // shape.block_size
        self.card = Worker(
            worker_id=name,
            address=f"{name}:1",
            epoch=EPOCH,
            model=MODEL,
            role=Role.AGGREGATED,
            block_size=shape.block_size,
            hash_scheme=HASH_SCHEME,
            total_blocks=total_blocks,
            ranks=1,
            document=b"",
            capabilities=(KV_EVENTS,),
        )
        self.scheduler = MockScheduler(
            BlockPool(total_blocks),
            ModelledTiming(),
            _answer,
            block_size=shape.block_size,
            max_sequences=shape.max_sequences,
            max_batched_tokens=shape.max_batched_tokens,
            max_waiting=shape.max_waiting,
        )
        self.stepping = False
        self._sequence = 0

    def batch(self, events: Sequence[KvEvent]) -> EventBatch:
        """The events of a step as the router takes them."""
        self._sequence += 1
        return EventBatch(0, self._sequence, tuple(map(_op, events)))


def _op(event: KvEvent) -> BlockOp:
    if isinstance(event, BlocksStored):
        return BlockOp(CacheOperation.STORED, Tier.DEVICE, pack_u64(event.hashes))
    if isinstance(event, BlocksRemoved):
        return BlockOp(CacheOperation.REMOVED, Tier.DEVICE, pack_u64(event.hashes))
    return BlockOp(CacheOperation.CLEARED, Tier.DEVICE, b"")


def _answer(request: GenerateRequest, limit: int) -> Answer:
    """As long as the trace says, and like no other answer."""
    return Answer(array("I", (_ANSWER_TOKEN + int(request.request_id),)) * limit, FinishReason.LENGTH)


@dataclass(slots=True)
class _Flight:
    arrived_s: float
    reservation: str
    first_s: float = 0.0


class Simulation:
    """One policy under one load."""

    def __init__(self, arrivals: Sequence[Arrival], policy: str, speedup: float, shape: Shape) -> None:
        self._arrivals = arrivals
        self._speedup = speedup
        self._shape = shape
        self._policy = policy
        self._cost = CostModel(prefill_load_scale=shape.prefill_load_scale)
        self._now = 0.0
        self._order = count()
        self._agenda: list[tuple[float, int, MockWorker, MockStep]] = []
        self._flights: dict[str, _Flight] = {}
        self._worker_of: dict[int, str] = {}
        self.outcome = Outcome()

    async def run(self, progress: Callable[[int], None]) -> Outcome:
        """Runs to the end of the last request; `progress` hears how many have arrived."""
        store = MemoryStore(lambda: int(self._now * 1000), Random(self._shape.seed))
        config = RouterConfig(policy=self._policy, lease_ms=FOREVER_MS, reservation_ttl_ms=FOREVER_MS)
        self._router = Router(store, config, Random(self._shape.seed + 1))
        self._router.start()
        await asyncio.wait_for(self._router.ready.wait(), 30)
        try:
            await self._attach()
            await self._replay(progress)
        finally:
            await self._router.close()
        self.outcome.ended_s = self._now
        return self.outcome

    async def _attach(self) -> None:
        self._workers: dict[str, tuple[MockWorker, WorkerStream]] = {}
        for number in range(self._shape.workers):
            worker = MockWorker(f"worker-{number}", self._shape)
            attachment, _ = await self._router.worker_manager.attach(worker.card)
            self._workers[worker.card.worker_id] = worker, attachment

    async def _replay(self, progress: Callable[[int], None]) -> None:
        arrivals = enumerate(self._arrivals)
        coming = next(arrivals, None)
        for turn in count():
            if turn % LETS_OTHERS_RUN_EVERY == 0:
                await asyncio.sleep(0)
            if coming is not None and not (self._agenda and self._agenda[0][0] <= coming[1].at_s / self._speedup):
                number, arrival = coming
                self._now = arrival.at_s / self._speedup
                await self._arrive(number, arrival)
                coming = next(arrivals, None)
                progress(number + 1)
            elif self._agenda:
                self._now, _, worker, step = heapq.heappop(self._agenda)
                await self._end_of_step(worker, step)
            else:
                return

    async def _arrive(self, number: int, arrival: Arrival) -> None:
        name, tokens = str(number), tokens_of(arrival)
        self.outcome.offered += 1
        hashes = block_hashes(tokens, self._shape.block_size, cache_salt=arrival.salt)
        route = await self._router.query(
            Query(
                MODEL,
                Prompt(block_hashes=pack_u64(hashes), block_size=self._shape.block_size, prompt_tokens=len(tokens)),
                self._cost,
                request_id=name,
                session_id=self._session_of(arrival),
            )
        )
        worker, _ = self._workers[route.worker.worker_id]
        if before := self._worker_of.get(arrival.session):
            self.outcome.followed += 1
            self.outcome.stayed += before == route.worker.worker_id
        if arrival.session:
            self._worker_of[arrival.session] = route.worker.worker_id
        stop = StopParams(max_tokens=arrival.output_tokens)
        request = GenerateRequest(name, MODEL, tokens, stop=stop, cache_salt=arrival.salt)
        try:
            worker.scheduler.submit(Running(request, arrival.output_tokens, number))
        except SluiceError:  # its queue is full
            self.outcome.shed += 1
            await self._router.lifecycle.free([route.reservation_id])
            return
        self._flights[name] = _Flight(self._now, route.reservation_id)
        self._start_step(worker)

    def _session_of(self, arrival: Arrival) -> str:
        kinds = {"none": "", "session": f"s{arrival.session}", "agent": f"a{arrival.agent}", "user": "u"}
        return kinds[self._shape.affinity]

    def _start_step(self, worker: MockWorker) -> None:
        if worker.stepping or not worker.scheduler.busy:
            return
        step = worker.scheduler.step(self._now)
        worker.stepping = True
        heapq.heappush(self._agenda, (self._now + step.duration_s, next(self._order), worker, step))

    async def _end_of_step(self, worker: MockWorker, step: MockStep) -> None:
        worker.stepping = False
        if step.events:
            _, attachment = self._workers[worker.card.worker_id]
            await attachment.handle([worker.batch(step.events)])
        begun = [sequence for sequence, _ in step.rows if sequence.token_count == sequence.prompt_tokens + 1]
        if begun:
            await self._router.lifecycle.mark_prefill_complete(list(map(self._begin, begun)))
        if step.ended:
            await self._router.lifecycle.free(list(map(self._end, step.ended)))
        self._start_step(worker)

    def _begin(self, sequence: Running) -> str:
        flight = self._flights[sequence.request.request_id]
        flight.first_s = self._now
        self.outcome.ttft_s.append(self._now - flight.arrived_s)
        self.outcome.prompt_tokens += sequence.prompt_tokens
        self.outcome.cached_tokens += sequence.cached_tokens
        return flight.reservation

    def _end(self, sequence: Running) -> str:
        flight = self._flights.pop(sequence.request.request_id)
        generated = sequence.token_count - sequence.prompt_tokens
        if generated > 1:
            self.outcome.inter_token_s.append((self._now - flight.first_s) / (generated - 1))
        return flight.reservation
