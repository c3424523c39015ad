"""Files, batches and claims in memory and in a real Redis: one set of tests for both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import pytest

from services.common.base.errors import ErrorKind
from services.common.net.ports import free_port
from services.gateway.apis.batches.memory_store import MemoryBatchStore
from services.gateway.apis.batches.records import RESULT, BatchRecord, FileRecord
from services.gateway.apis.batches.redis_store import RedisBatchStore
from services.gateway.apis.batches.store import (
    PER_FILE,
    BatchClaim,
    BatchStore,
    Limits,
    LineResult,
    charge_of,
    has_result,
    result_file,
)
from tests.support.oracles.errors import raises_error
from tests.support.servers.redis_server import RedisServer

Make = Callable[..., BatchStore]
LEASE_S = 30.0


def file(name: str, data: bytes = b"x", kept_s: int = 60) -> FileRecord:
    now = int(time.time())
    return FileRecord(name, f"{name}.jsonl", "batch", len(data), now, now + kept_s)


def ended(status: str = "completed", name: str = "batch_1", owner: str = "a") -> BatchRecord:
    return BatchRecord.load(batch(name, owner).dump().replace(b'"validating"', f'"{status}"'.encode()))


def output(data: bytes, succeeded: bool = True, name: str = "batch_1") -> FileRecord:
    now = int(time.time())
    return FileRecord(result_file(name, succeeded), "results.jsonl", RESULT, len(data), now, now + 60)


async def content(store: BatchStore, owner: str, name: str) -> bytes | None:
    return await store.read(owner, name, 0, 1 << 30)


def batch(name: str = "batch_1", owner: str = "a") -> BatchRecord:
    return BatchRecord(name, owner, "key", "/v1/completions", "file-1", "24h", int(time.time()))


@pytest.fixture(params=["memory", "redis"])
async def make(request: pytest.FixtureRequest, shared_redis: RedisServer) -> AsyncIterator[Make]:
    stores: list[BatchStore] = []

    def made(
        files: int = 10, file_bytes: int = 1 << 20, batches: int = 10, total_bytes: int = 1 << 30, kept_s: float = 60
    ) -> BatchStore:
        limits = Limits(files, file_bytes, batches, total_bytes)
        store: BatchStore = MemoryBatchStore(limits, kept_s)
        if request.param == "redis":
            store = RedisBatchStore(shared_redis.url, limits, kept_s, prefix=f"t{uuid4().hex}", timeout_s=20)
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
    assert await content(store, "a", "file-1") == "Grüße".encode()
    assert await store.files("a") == [record]
    assert (await store.file("b", "file-1"), await content(store, "b", "file-1"), await store.files("b")) == (
        None,
        None,
        [],
    )
    assert not await store.remove_file("b", "file-1")
    assert await store.remove_file("a", "file-1")
    assert await store.file("a", "file-1") is None
    assert await content(store, "a", "file-1") is None


async def test_file_beyond_a_limit_is_refused_until_others_are_gone(make: Make) -> None:
    store = make(files=2, file_bytes=2 * PER_FILE + 10)
    await store.add_file("a", file("file-1"), bytes(6))
    with raises_error(kind=ErrorKind.TOO_LARGE, code="storage_limit_exceeded"):
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
    await store.add_batch(batch(), 20)
    claim = await claimed(store)
    assert (claim.owner, claim.batch_id, claim.epoch) == ("a", "batch_1", 1)
    assert await store.claim(LEASE_S) is None
    assert await store.renew(claim, LEASE_S) == "validating"
    assert await store.renew(claim, 0)
    assert (await claimed(store)).epoch == 2
    assert not await store.renew(claim, LEASE_S)


async def test_line_has_one_result_of_the_newest_claim(make: Make) -> None:
    store = make()
    await store.add_batch(batch(), 20)
    old = await claimed(store)
    assert await store.record(old, 0, LineResult(True, [b"zero"]))
    assert not await store.record(old, 0, LineResult(False, [b"again"]))
    await store.renew(old, 0)
    new = await claimed(store)
    assert not await store.record(old, 1, LineResult(True, [b"late"]))
    assert await store.record(new, 1, LineResult(False, [b"one"]))
    done = await store.done(new)
    assert [line for line in range(20) if has_result(done, line)] == [0, 1]
    assert await store.result_sizes(new) == (5, 4)
    assert await content(store, "a", result_file("batch_1", True)) is None, "no file before the end"
    stored = await store.batch("a", "batch_1")
    assert stored is not None
    assert (stored.completed, stored.failed) == (1, 1)


async def test_expired_lease_loses_the_claim(make: Make) -> None:
    store = make()
    await store.add_batch(batch(), 20)
    claim = await store.claim(0.2)
    assert claim is not None
    await asyncio.sleep(0.3)
    assert not await store.record(claim, 0, LineResult(True, [b"late"]))
    assert not await store.save(claim, batch())
    assert (await claimed(store)).epoch == 2


async def test_results_become_files_with_the_end_of_their_batch(make: Make) -> None:
    store = make()
    await store.add_batch(batch(), 20)
    claim = await claimed(store)
    await store.record(claim, 7, LineResult(True, [b"out ", b"7"]))
    await store.record(claim, 2, LineResult(True, [b"out 2"]))
    await store.record(claim, 3, LineResult(False, [b"error"]))
    files = [output(b"out 7\nout 2\n"), output(b"error\n", succeeded=False)]
    assert await store.save(claim, ended(), files)
    stored = await store.batch("a", "batch_1")
    assert stored is not None
    assert (stored.record.status, stored.completed, stored.failed) == ("completed", 2, 1)
    assert sorted(record.id for record in await store.files("a")) == sorted(record.id for record in files)
    assert [await content(store, "a", record.id) for record in files] == [b"out 7\nout 2\n", b"error\n"]
    assert await store.read("a", files[0].id, 4, 3) == b"7\no"
    assert await store.renew(claim, LEASE_S) is None
    assert await store.claim(LEASE_S) is None


async def test_results_beyond_the_limit_of_a_tenant_or_of_all_are_refused(make: Make) -> None:
    charged = charge_of(batch(), 20)
    for limits, kind, code in (
        ({"file_bytes": charged + 10}, ErrorKind.TOO_LARGE, "storage_limit_exceeded"),
        ({"total_bytes": charged + 10}, ErrorKind.OVERLOADED, "storage_full"),
    ):
        store = make(**limits)
        await store.add_batch(batch(), 20)
        claim = await claimed(store)
        assert await store.record(claim, 0, LineResult(True, [b"12345"]))
        with raises_error(kind=kind, code=code):
            await store.record(claim, 1, LineResult(False, [b"6789"]))
        assert await store.result_sizes(claim) == (6, 0)
        assert await store.record(claim, 1, LineResult(False, [b"678"])), "a refused line has no result yet"
        assert await store.used("a") == (charged + 10, charged + 10)


async def test_total_of_all_tenants_is_bounded(make: Make) -> None:
    store = make(total_bytes=2 * PER_FILE + 10)
    await store.add_file("a", file("file-1"), bytes(6))
    with raises_error(kind=ErrorKind.OVERLOADED, code="storage_full"):
        await store.add_file("b", file("file-2"), bytes(6))
    with raises_error(kind=ErrorKind.OVERLOADED, code="storage_full"):
        await store.add_batch(batch(owner="b"), 1)
    await store.add_file("b", file("file-2"), bytes(4))
    await store.remove_file("a", "file-1")
    assert await store.used("b") == (PER_FILE + 4, PER_FILE + 4)


async def test_batch_is_deleted_with_its_results_after_its_end(make: Make) -> None:
    store = make()
    await store.add_batch(batch(), 20)
    claim = await claimed(store)
    await store.record(claim, 0, LineResult(True, [b"out"]))
    assert not await store.remove_batch("a", "batch_1")
    await store.save(claim, ended("failed"), [output(b"out\n")])
    assert not await store.remove_batch("b", "batch_1")
    assert await store.remove_batch("a", "batch_1")
    assert not await store.remove_batch("a", "batch_1")
    assert (await store.batch("a", "batch_1"), await store.files("a")) == (None, [])
    assert await store.used("a") == (0, 0)


async def test_ended_batch_expires_with_its_results(make: Make) -> None:
    store = make(kept_s=0.2)
    await store.add_batch(batch(), 20)
    claim = await claimed(store)
    await store.record(claim, 0, LineResult(True, [b"out"]))
    await store.save(claim, ended(), [output(b"out\n")])
    assert (await store.used("a"))[0] > 0
    await asyncio.sleep(0.3)
    assert await store.used("a") == (0, 0)
    assert await store.batches("a") == []


async def test_tenants_have_turns_and_some_are_passed_over(make: Make) -> None:
    store = make(batches=50)
    for index in range(20):
        await store.add_batch(batch(f"batch_a{index}"), 1)
    await store.add_batch(batch("batch_b", owner="b"), 1)
    await store.add_batch(batch("batch_c", owner="c"), 1)
    owners = [(await claimed(store)).owner for _ in range(4)]
    assert sorted(owners[:3]) == ["a", "b", "c"]
    assert owners[3] == "a"
    assert await store.claim(LEASE_S, ["a"]) is None
    assert (await claimed(store)).owner == "a"


async def test_claims_that_are_lost_in_a_row_are_counted_until_there_is_a_result(make: Make) -> None:
    store = make()
    await store.add_batch(batch(), 20)

    async def lose() -> BatchClaim:
        claim = await store.claim(0.05)
        assert claim is not None
        await asyncio.sleep(0.1)
        return claim

    assert [(await lose()).lost for _ in range(3)] == [0, 1, 2]
    claim = await claimed(store)
    assert claim.lost == 3
    await store.renew(claim, 0)
    claim = await claimed(store)
    assert claim.lost == 3, "one that was given up is not lost"
    await store.record(claim, 0, LineResult(True, [b""]))
    await store.renew(claim, 0)
    assert (await claimed(store)).lost == 0


async def test_batch_that_is_cancelled_does_not_become_one_in_progress(make: Make) -> None:
    store = make()
    await store.add_batch(batch(), 20)
    claim = await claimed(store)
    assert await store.cancel("a", "batch_1", 7)
    assert not await store.cancel("a", "batch_1", 8)
    assert not await store.cancel("b", "batch_1", 8)
    assert not await store.save(claim, ended("in_progress"))
    assert await store.renew(claim, LEASE_S) == "cancelling"
    stored = await store.batch("a", "batch_1")
    assert stored is not None
    assert (stored.record.status, stored.record.times["cancelling_at"]) == ("cancelling", 7)


async def test_batches_are_listed_by_tenant_and_bounded(make: Make) -> None:
    store = make(batches=2)
    await store.add_batch(batch("batch_1"), 1)
    await store.add_batch(batch("batch_2"), 1)
    await store.add_batch(batch("batch_3", owner="b"), 1)
    with raises_error(kind=ErrorKind.OVERLOADED):
        await store.add_batch(batch("batch_4"), 1)
    assert {stored.record.id for stored in await store.batches("a")} == {"batch_1", "batch_2"}
    assert await store.batch("b", "batch_1") is None
    names = {(await claimed(store)).batch_id for _ in range(3)}
    assert names == {"batch_1", "batch_2", "batch_3"}


async def test_unreachable_redis_is_reported_as_unavailable() -> None:
    store = RedisBatchStore(f"redis://127.0.0.1:{free_port()}", Limits(1, 1, 1, 1), 60, timeout_s=1)
    try:
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="store_unavailable"):
            await store.claim(LEASE_S)
    finally:
        await store.close()
