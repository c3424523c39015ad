"""Files, batches and claims in memory and in a real Redis: one set of tests for both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import pytest

from services.common.errors import ErrorKind
from services.common.net.ports import free_port
from services.gateway.apis.batches.records import BatchRecord, FileRecord
from services.gateway.apis.batches.redis_store import RedisBatchStore
from services.gateway.apis.batches.store import BatchClaim, BatchStore, Limits, LineResult, MemoryBatchStore
from tests.support.oracles.errors import raises_error
from tests.support.servers.redis_server import RedisServer

Make = Callable[..., BatchStore]
LEASE_S = 30.0


def file(name: str, data: bytes = b"x", kept_s: int = 60) -> FileRecord:
    now = int(time.time())
    return FileRecord(name, f"{name}.jsonl", "batch", len(data), now, now + kept_s)


def batch(name: str = "batch_1", owner: str = "a") -> BatchRecord:
    return BatchRecord(name, owner, "key", "/v1/completions", "file-1", "24h", int(time.time()))


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, shared_redis: RedisServer) -> AsyncIterator[Make]:
    stores: list[BatchStore] = []

    def made(files: int = 10, file_bytes: int = 1_000, batches: int = 10) -> BatchStore:
        limits = Limits(files, file_bytes, batches)
        store: BatchStore = MemoryBatchStore(limits, 60)
        if request.param == "redis":
            store = RedisBatchStore(shared_redis.url, limits, 60, prefix=f"t{uuid4().hex}", timeout_s=20)
        stores.append(store)
        return store

    yield made
    for store in stores:
        await store.close()


async def claimed(store: BatchStore) -> BatchClaim:
    claim = await store.claim(LEASE_S)
    assert claim is not None
    return claim


async def test_file_belongs_to_its_tenant(make: Make) -> None:
    store = make()
    record = file("file-1", "Grüße".encode())
    await store.add_file("a", record, "Grüße".encode())
    assert await store.file("a", "file-1") == record
    assert await store.data("a", "file-1") == "Grüße".encode()
    assert await store.files("a") == [record]
    assert (await store.file("b", "file-1"), await store.data("b", "file-1"), await store.files("b")) == (
        None,
        None,
        [],
    )
    assert not await store.remove_file("b", "file-1")
    assert await store.remove_file("a", "file-1")
    assert await store.file("a", "file-1") is None
    assert await store.data("a", "file-1") is None


async def test_file_beyond_a_limit_is_refused_until_others_are_gone(make: Make) -> None:
    store = make(files=2, file_bytes=10)
    await store.add_file("a", file("file-1"), bytes(6))
    with raises_error(kind=ErrorKind.TOO_LARGE):
        await store.add_file("a", file("file-2"), bytes(6))
    await store.add_file("a", file("file-2"), bytes(2))
    with raises_error(kind=ErrorKind.TOO_LARGE):
        await store.add_file("a", file("file-3"), b"")
    await store.add_file("b", file("file-3"), bytes(6))
    await store.remove_file("a", "file-1")
    await store.add_file("a", file("file-3"), bytes(8))


async def test_file_whose_time_is_over_is_gone(make: Make) -> None:
    store = make(files=1)
    await store.add_file("a", file("file-1", kept_s=-1), b"x")
    assert await store.files("a") == []
    await store.add_file("a", file("file-2"), b"x")


async def test_claimed_batch_is_not_claimed_again_until_it_is_given_up(make: Make) -> None:
    store = make()
    await store.add_batch(batch())
    claim = await claimed(store)
    assert (claim.owner, claim.batch_id, claim.epoch) == ("a", "batch_1", 1)
    assert await store.claim(LEASE_S) is None
    assert await store.renew(claim, LEASE_S)
    assert await store.renew(claim, 0)
    assert (await claimed(store)).epoch == 2
    assert not await store.renew(claim, LEASE_S)


async def test_line_has_one_result_of_the_newest_claim(make: Make) -> None:
    store = make()
    await store.add_batch(batch())
    old = await claimed(store)
    assert await store.record(old, 0, LineResult(True, b"zero"))
    assert not await store.record(old, 0, LineResult(False, b"again"))
    await store.renew(old, 0)
    new = await claimed(store)
    assert not await store.record(old, 1, LineResult(True, b"late"))
    assert await store.record(new, 1, LineResult(False, b"one"))
    assert await store.results(new) == {0: LineResult(True, b"zero"), 1: LineResult(False, b"one")}
    stored = await store.batch("a", "batch_1")
    assert stored is not None
    assert (stored.completed, stored.failed) == (1, 1)


async def test_expired_lease_loses_the_claim(make: Make) -> None:
    store = make()
    await store.add_batch(batch())
    claim = await store.claim(0.2)
    assert claim is not None
    await asyncio.sleep(0.3)
    assert not await store.record(claim, 0, LineResult(True, b"late"))
    assert not await store.save(claim, batch())
    assert (await claimed(store)).epoch == 2


async def test_end_of_a_batch_and_its_files_are_one_step(make: Make) -> None:
    store = make()
    await store.add_batch(batch())
    claim = await claimed(store)
    ended = BatchRecord.load(batch().dump().replace(b'"validating"', b'"completed"'))
    assert await store.save(claim, ended, [(file("file-2"), b"out"), (file("file-3"), b"err")])
    stored = await store.batch("a", "batch_1")
    assert stored is not None
    assert stored.record.status == "completed"
    assert (await store.data("a", "file-2"), await store.data("a", "file-3")) == (b"out", b"err")
    await store.renew(claim, 0)
    assert await store.claim(LEASE_S) is None


async def test_batch_that_is_cancelled_does_not_become_one_in_progress(make: Make) -> None:
    store = make()
    await store.add_batch(batch())
    claim = await claimed(store)
    assert await store.cancel("a", "batch_1", 7)
    assert not await store.cancel("a", "batch_1", 8)
    assert not await store.cancel("b", "batch_1", 8)
    running = BatchRecord.load(batch().dump().replace(b'"validating"', b'"in_progress"'))
    assert not await store.save(claim, running)
    stored = await store.batch("a", "batch_1")
    assert stored is not None
    assert (stored.record.status, stored.record.times["cancelling_at"]) == ("cancelling", 7)


async def test_batches_are_listed_by_tenant_and_bounded(make: Make) -> None:
    store = make(batches=2)
    await store.add_batch(batch("batch_1"))
    await store.add_batch(batch("batch_2"))
    await store.add_batch(batch("batch_3", owner="b"))
    with raises_error(kind=ErrorKind.OVERLOADED):
        await store.add_batch(batch("batch_4"))
    assert {stored.record.id for stored in await store.batches("a")} == {"batch_1", "batch_2"}
    assert await store.batch("b", "batch_1") is None
    names = {(await claimed(store)).batch_id for _ in range(3)}
    assert names == {"batch_1", "batch_2", "batch_3"}


async def test_unreachable_redis_is_reported_as_unavailable() -> None:
    store = RedisBatchStore(f"redis://127.0.0.1:{free_port()}", Limits(1, 1, 1), 60, timeout_s=1)
    try:
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="store_unavailable"):
            await store.claim(LEASE_S)
    finally:
        await store.close()
