"""How batches are claimed, run and ended, whatever a tenant's files hold and whatever fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from services.common.base.budgets import Budget
from services.common.net.intake.pace import BodyPace
from services.gateway.apis.batches.executor import BatchExecutor
from services.gateway.apis.batches.lines import BatchLine, line_parser
from services.gateway.apis.batches.memory_store import MemoryBatchStore
from services.gateway.apis.batches.records import UPLOAD, BatchRecord, FileRecord
from services.gateway.apis.batches.runner import BatchRunner
from services.gateway.apis.batches.shares import FairShares
from services.gateway.apis.batches.store import Limits, StoredBatch, result_file
from services.gateway.apis.batches.work import MAX_LOST_CLAIMS, Work
from tests.support.waiting import until

PATH = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


class Executor(BatchExecutor):
    """Answers each request with its body, after `before`."""

    def __init__(self, before: Callable[[BatchLine], Any] = lambda line: None) -> None:
        self._before = before
        self.running = 0

    async def run(self, path: str, key_id: str, line: BatchLine) -> tuple[int, bytes]:
        self.running += 1
        try:
            waiting = self._before(line)
            if waiting is not None:
                await waiting
        finally:
            self.running -= 1
        return 200, line.body


def requests(number: int, size: int = 0) -> bytes:
    return b"".join(
        orjson.dumps({"custom_id": f"{at}", "url": PATH, "body": {"prompt": "x" * size}}) + b"\n"
        for at in range(number)
    )


class Rig:
    """A store, a runner with a short lease, and files and batches of tenants."""

    def __init__(self, executor: Executor, file_bytes: int = 1 << 26, max_broken: int = 5, lease_s: float = 30) -> None:
        self.moved_s = 0.0
        self.store = MemoryBatchStore(Limits(100, file_bytes, 100, 1 << 30), 3_600, self.clock)
        budgets = Budget("batch_lines", 100_000, ""), Budget("broken_lines", max_broken, "")
        parse = line_parser(Budget("body_values", 10_000, ""), BodyPace())
        shares = FairShares(4), FairShares(1 << 20)
        work = Work(self.store, executor, parse, *budgets, 1 << 20, 4, *shares, 3_600, self.clock, lease_s)
        self.runner = BatchRunner(work)

    def clock(self) -> float:
        return time.time() + self.moved_s

    async def add(self, data: bytes, owner: str = "a", name: str = "batch_1", window_s: int = 86_400) -> None:
        now = int(self.clock())
        file = FileRecord(f"file-{name}", "x", UPLOAD, len(data), now, now + 3_600)
        await self.store.add_file(owner, file, data)
        times = {"expires_at": now + window_s}
        await self.store.add_batch(BatchRecord(name, owner, "key", PATH, file.id, "24h", now, times=times), 200_000)

    async def found(self, owner: str = "a", name: str = "batch_1") -> StoredBatch:
        stored = await self.store.batch(owner, name)
        assert stored is not None
        return stored

    async def ended(self, owner: str = "a", name: str = "batch_1") -> BatchRecord:
        async with asyncio.timeout(30):
            while (stored := await self.found(owner, name)).record.status not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return stored.record

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.runner.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def forever(line: BatchLine) -> None:
    await asyncio.sleep(3_600)


async def test_results_of_a_batch_are_its_responses_and_its_broken_lines() -> None:
    rig = Rig(Executor())
    await rig.add(requests(50, 300) + b"{\n" + requests(1))
    async with rig.running():
        batch = await rig.ended()
    assert (batch.status, batch.total, batch.errors) == ("completed", 52, [])
    output, errors = [await rig.store.read("a", name or "", 0, 1 << 20) for name in batch_files(batch)]
    lines = [orjson.loads(line) for line in (output or b"").splitlines()]
    assert sorted(int(line["custom_id"]) for line in lines) == list(range(50))
    assert lines[0]["response"]["body"] == {"prompt": "x" * 300}
    codes = {orjson.loads(line)["error"]["code"] for line in (errors or b"").splitlines()}
    assert codes == {"invalid_json_line", "duplicate_custom_id"}


def batch_files(batch: BatchRecord) -> tuple[str | None, str | None]:
    return batch.output_file_id, batch.error_file_id


async def test_batch_of_too_many_broken_lines_fails_before_it_runs() -> None:
    rig = Rig(Executor(lambda line: pytest.fail("it ran")))
    await rig.add(requests(3) + b"1\n" * 50_000)
    async with rig.running():
        batch = await rig.ended()
    assert (batch.status, batch.errors[0]["code"], len(batch.errors)) == ("failed", "too_many_broken_lines", 7)
    assert batch_files(batch) == (None, None)


async def test_batch_whose_results_reach_the_limit_fails_and_keeps_what_it_has() -> None:
    data = requests(40, 1_000)
    rig = Rig(Executor(), file_bytes=len(data) + 60_000)
    await rig.add(data)
    async with rig.running():
        batch = await rig.ended()
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "storage_limit_exceeded")
    stored = await rig.found()
    output = await rig.store.read("a", batch.output_file_id or "", 0, 1 << 20)
    assert len((output or b"").splitlines()) == stored.completed
    assert 5 < stored.completed < 40
    used, total = await rig.store.used("a")
    assert used == total <= len(data) + 60_000
    assert await rig.store.remove_batch("a", "batch_1")
    assert await rig.store.used("a") == (len(data) + 1_024, len(data) + 1_024)


async def test_batch_beyond_its_window_expires_before_it_begins() -> None:
    rig = Rig(Executor(lambda line: pytest.fail("it ran")))
    await rig.add(b"\n" * (8 << 20) + requests(3), window_s=-1)
    async with rig.running():
        assert (await rig.ended()).status == "expired"


async def test_batch_expires_and_is_cancelled_while_its_file_is_checked() -> None:
    rig = Rig(Executor(), lease_s=0.3)
    for name in ("batch_1", "batch_2"):
        await rig.add(b"\n" * (15 << 20), name=name)
    async with rig.running():
        async with asyncio.timeout(10):
            while (await rig.found()).record.status == "validating":
                claimed = [found.lease_until for found in rig.store._tenants["a"].batches.values()]
                if all(claimed):
                    break
                await asyncio.sleep(0)
        assert await rig.store.cancel("a", "batch_2", int(rig.clock()))
        rig.store._tenants["a"].batches["batch_1"].record.times["expires_at"] = 0
        assert (await rig.ended()).status == "expired"
        batch = await rig.ended(name="batch_2")
    assert batch.status == "cancelled"
    assert batch.times["cancelling_at"]


async def test_lease_is_renewed_while_a_long_file_is_checked() -> None:
    rig = Rig(Executor(), lease_s=0.2)
    await rig.add(b" \n" * (4 << 20) + requests(2))
    async with rig.running():
        assert (await rig.ended()).status == "completed"
    assert rig.store._tenants["a"].batches["batch_1"].epoch == 1


async def test_batch_that_ends_its_gateways_fails_after_three_of_them() -> None:
    rig = Rig(Executor(forever))
    await rig.add(requests(3))
    for _ in range(MAX_LOST_CLAIMS):
        assert await rig.store.claim(0.01) is not None
        await asyncio.sleep(0.02)
    async with rig.running():
        batch = await rig.ended()
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "batch_interrupted")


async def test_failure_within_one_batch_leaves_the_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(line: BatchLine) -> None:
        if b"xx" in line.body:
            raise RuntimeError("defect")

    rig = Rig(Executor(fail), lease_s=0.2)
    await rig.add(requests(1, 2))
    await rig.add(requests(20), owner="b", name="batch_2")
    async with rig.running():
        assert (await rig.ended("b", "batch_2")).status == "completed"
        batch = await rig.ended()
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "batch_interrupted")
    assert "defect" in caplog.text


async def test_long_lines_of_one_tenant_delay_no_line_of_another() -> None:
    executor = Executor(lambda line: forever(line) if b"xx" in line.body else None)
    rig = Rig(executor)
    for index in range(5):
        await rig.add(requests(20, 200_000), name=f"batch_{index}")
    async with rig.running():
        await until(lambda: executor.running >= 4)
        for owner in "bcd":
            await rig.add(requests(5), owner=owner, name="batch_9")
            assert (await rig.ended(owner, "batch_9")).status == "completed"
        assert executor.running == 4, "no more than the limit"


async def test_batch_whose_file_is_deleted_meanwhile_fails_with_the_results_that_it_has() -> None:
    rig = Rig(Executor(lambda line: asyncio.sleep(0.01)))
    await rig.add(requests(2_000, 300))
    async with rig.running():
        async with asyncio.timeout(10):
            while not (await rig.found()).completed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await rig.store.remove_file("a", "file-batch_1")
        batch = await rig.ended()
    assert (batch.status, batch.errors[0]["code"]) == ("failed", "file_not_found")
    assert batch.output_file_id == result_file("batch_1", True)
    assert await rig.store.remove_batch("a", "batch_1")
    assert await rig.store.used("a") == (0, 0)
