"""What files, batches and results take: the same in memory and in Redis, bounded, and given back, whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.common.base.errors import SluiceError
from services.gateway.apis.batches.memory_store import MemoryBatchStore
from services.gateway.apis.batches.records import OPEN, RESULT, UPLOAD, BatchRecord, FileRecord
from services.gateway.apis.batches.redis_store import RedisBatchStore
from services.gateway.apis.batches.store import (
    PER_BATCH,
    PER_FILE,
    BatchClaim,
    BatchStore,
    Limits,
    LineResult,
    result_file,
)
from tests.support.servers.redis_server import RedisServer

LIMITS = Limits(files=3, file_bytes=PER_BATCH + 3 * PER_FILE + 2_000, batches=2, total_bytes=2 * PER_BATCH + 6_000)
LINES = 20
LONG_S = 3_600
OWNERS = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(0, 3)

OPERATIONS = st.one_of(
    st.tuples(st.just("add_file"), OWNERS, NUMBERS, st.integers(0, 2_500)),
    st.tuples(st.just("remove_file"), OWNERS, NUMBERS),
    st.tuples(st.just("add_batch"), OWNERS, NUMBERS),
    st.tuples(st.just("claim_one"), st.sets(OWNERS, max_size=1)),
    st.tuples(st.just("record"), st.integers(0, LINES - 1), st.booleans(), st.integers(0, 1_500)),
    st.tuples(st.just("give_up"),),
    st.tuples(st.just("end"), st.sampled_from(["completed", "failed", "expired"])),
    st.tuples(st.just("cancel"), OWNERS, NUMBERS),
    st.tuples(st.just("remove_batch"), OWNERS, NUMBERS),
    st.tuples(st.just("remove_result"), OWNERS, NUMBERS, st.booleans()),
)  # fmt: skip


class Driven:
    """A store, and the claim that operations use."""

    def __init__(self, store: BatchStore, now: int) -> None:
        self.store = store
        self._now = now
        self._held: BatchClaim | None = None
        self._claims: dict[tuple[str, str], BatchClaim] = {}

    async def do(self, operation: str, *arguments: Any) -> Any:
        """Returns what an operation returns, or the code of its error."""
        action: Callable[..., Awaitable[Any]] = getattr(self, f"_{operation}")
        try:
            return await action(*arguments)
        except SluiceError as error:
            return error.code

    async def _add_file(self, owner: str, number: int, size: int) -> str:
        if await self.store.file(owner, f"file-{number}") is not None:
            return "there"
        record = FileRecord(f"file-{number}", "x", UPLOAD, size, self._now, self._now + LONG_S)
        await self.store.add_file(owner, record, bytes(size))
        return "added"

    async def _remove_file(self, owner: str, number: int) -> bool:
        return await self.store.remove_file(owner, f"file-{number}")

    async def _add_batch(self, owner: str, number: int) -> str:
        if await self.store.batch(owner, f"batch_{number}") is not None:
            return "there"
        batch = BatchRecord(f"batch_{number}", owner, "key", "/v1/completions", "file-1", "24h", self._now)
        await self.store.add_batch(batch, LINES)
        return "added"

    async def _claim_one(self, passed_over: set[str]) -> Any:
        claim = await self.store.claim(LONG_S, passed_over)
        self._held = claim or self._held
        if claim is not None:
            self._claims[claim.owner, claim.batch_id] = claim
        return claim and claim.owner

    async def _record(self, line: int, succeeded: bool, size: int) -> Any:
        return self._held and await self.store.record(self._held, line, LineResult(succeeded, [bytes(size)]))

    async def _give_up(self) -> Any:
        return self._held and await self.store.renew(self._held, 0)

    async def _end(self, status: Any) -> Any:
        if self._held is None or (stored := await self.store.batch(*self._held[:2])) is None:
            return None
        sizes = await self.store.result_sizes(self._held)
        files = [
            FileRecord(result_file(stored.record.id, succeeded), "x", RESULT, size, self._now, self._now + LONG_S)
            for succeeded, size in zip((True, False), sizes, strict=True)
            if size
        ]
        return (sizes, await self.store.save(self._held, replace(stored.record, status=status), files))

    async def _cancel(self, owner: str, number: int) -> bool:
        return await self.store.cancel(owner, f"batch_{number}", self._now)

    async def _remove_batch(self, owner: str, number: int) -> bool:
        return await self.store.remove_batch(owner, f"batch_{number}")

    async def _remove_result(self, owner: str, number: int, succeeded: bool) -> bool:
        return await self.store.remove_file(owner, result_file(f"batch_{number}", succeeded))

    async def state(self) -> dict[str, Any]:
        """Returns what tenants have and use."""
        found: dict[str, Any] = {}
        for owner in "abc":
            files = [(file.id, file.size) for file in await self.store.files(owner)]
            batches = [(found.record.status, *found[1:]) for found in await self.store.batches(owner)]
            found[owner] = (sorted(files), sorted(batches), await self.store.used(owner))
        return found

    async def remove_all(self) -> None:
        for owner in "abc":
            while (claim := await self.store.claim(LONG_S, {"a", "b", "c"} - {owner})) is not None:
                self._held = claim
                await self._end("completed")
            for file in await self.store.files(owner):
                await self.store.remove_file(owner, file.id)
            for stored in await self.store.batches(owner):
                if stored.record.status in OPEN:  # under a claim that is not the last one
                    self._held = self._claims[owner, stored.record.id]
                    await self._end("completed")
                assert await self.store.remove_batch(owner, stored.record.id)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(OPERATIONS, max_size=40))
@example(
    [("add_batch", "a", 0), ("claim_one", set()), ("record", 0, False, 0), ("give_up",), ("end", "completed")],
)
async def test_both_stores_charge_the_same_within_the_limits_and_give_everything_back(
    shared_redis: RedisServer, operations: list[tuple[Any, ...]]
) -> None:
    now = int(time.time())
    redis = RedisBatchStore(shared_redis.url, LIMITS, LONG_S, prefix=f"t{uuid4().hex}", timeout_s=20)
    stores = [Driven(MemoryBatchStore(LIMITS, LONG_S), now), Driven(redis, now)]
    try:
        for name, *arguments in operations:
            memory, shared = [await store.do(name, *arguments) for store in stores]
            assert memory == shared, (name, arguments)
            states = [await store.state() for store in stores]
            assert states[0] == states[1], (name, arguments)
            used = [states[0][owner][2][0] for owner in "abc"]
            assert all(0 <= each <= LIMITS.file_bytes for each in used)
            assert sum(used) == states[0]["a"][2][1] <= LIMITS.total_bytes
        for store in stores:
            await store.do("give_up")
            await store.remove_all()
            assert await store.state() == {owner: ([], [], (0, 0)) for owner in "abc"}
    finally:
        await redis.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=10)
@given(st.lists(OPERATIONS, min_size=10, max_size=40))
async def test_everything_is_given_back_when_its_time_is_over(
    shared_redis: RedisServer, operations: list[tuple[Any, ...]]
) -> None:
    """The clock of memory is moved; in Redis only files have a time that a test can choose."""
    clock = [time.time()]
    memory = Driven(MemoryBatchStore(LIMITS, LONG_S, lambda: clock[0]), int(clock[0]))
    for name, *arguments in operations:
        await memory.do(name, *arguments)
    clock[0] += 86_400 + 2 * LONG_S
    assert await memory.state() == {owner: ([], [], (0, 0)) for owner in "abc"}
    store = RedisBatchStore(shared_redis.url, LIMITS, 0.05, prefix=f"t{uuid4().hex}", timeout_s=20)
    now = int(time.time())
    try:
        await store.add_file("a", FileRecord("file-1", "x", UPLOAD, 3, now, now - 1), b"abc")
        await store.add_batch(BatchRecord("batch_1", "a", "key", "/v1/completions", "file-1", "24h", now), LINES)
        claim = await store.claim(LONG_S)
        assert claim is not None
        assert await store.record(claim, 0, LineResult(True, [b"x"]))
        stored = await store.batch("a", "batch_1")
        assert stored is not None
        await store.save(claim, replace(stored.record, status="completed"))
        await asyncio.sleep(0.06)
        assert await store.used("a") == (0, 0)
    finally:
        await store.close()
