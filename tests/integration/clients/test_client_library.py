"""The client library against the real router and a real worker, each a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from uuid import uuid4

import pytest
from sluice_client import (
    FinishReason,
    NotFoundError,
    RouterClient,
    StopOptions,
    UnavailableError,
    WorkerChangeKind,
    WorkerClient,
    block_hashes,
    hashed_here,
    unpack_u64,
)
from sluice_client.wire import CacheTier, CostOverrides

ROOT = Path(__file__).parents[3]
CLIENT = ROOT / "clients/python"
MODEL = "tekken"
BLOCK = 16


class Process:
    """`python -m services.NAME` on a free port, from its first log line to SIGTERM."""

    def __init__(self, service: str, *flags: str) -> None:
        self.log: list[str] = []
        self._listens = threading.Event()
        self._address = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"services.{service}", "--listen", "127.0.0.1:0", "--log-format", "json", *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            if "gRPC server listens" in line:
                self._address = json.loads(line)["address"]
                self._listens.set()
        self._listens.set()

    @property
    def address(self) -> str:
        """host:port, once it listens."""
        assert self._listens.wait(60), "".join(self.log)
        assert self._address, "".join(self.log)
        return self._address

    def stop(self) -> None:
        """Ends it, by force if it has to be."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()


async def until_worker(address: str) -> None:
    """Waits until the router knows a worker."""
    async with RouterClient(address) as client:
        deadline = time.monotonic() + 90
        while True:
            try:
                if await client.list_workers(MODEL):
                    return
            except UnavailableError:
                pass  # still starting
            assert time.monotonic() < deadline, "no worker registered with the router"
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def services() -> Iterator[str]:
    """A router with one worker; the router's address."""
    processes = [router := Process("router")]
    try:
        flags = ("--routers", router.address, "--worker-id", "w1", "--speedup", "20", "--block-size", str(BLOCK))
        processes.append(Process("worker", *flags))
        asyncio.run(until_worker(router.address))
        yield router.address
    finally:
        for process in reversed(processes):
            process.stop()


@pytest.fixture
async def router(services: str) -> AsyncIterator[RouterClient]:
    """A client; whatever a test does, no reservation may be left."""
    async with RouterClient(services, timeout_s=20) as client:
        yield client
        assert await booked(client) == 0


async def booked(client: RouterClient) -> int:
    return sum(load.requests for load in await client.get_loads(MODEL))


def fresh_id() -> str:
    return str(uuid4())


def fresh_prompt(length: int = 64) -> list[int]:
    """Token ids that no other test has used."""
    return [1000 + byte for byte in os.urandom(length)]


async def run_once(client: RouterClient, prompt: Sequence[int], max_tokens: int = 4) -> list[int]:
    request_id = fresh_id()
    output: list[int] = []
    stop = StopOptions(max_tokens=max_tokens, ignore_eos=True)
    async with (
        await client.select_and_reserve(request_id, MODEL, prompt) as reservation,
        WorkerClient(reservation.target.address) as worker,
    ):
        async for delta in worker.generate(request_id, MODEL, prompt, stop=stop):
            output += delta.token_ids
            await reservation.mark_prefill_complete()
    return output


def test_the_example_schedules_a_request(services: str) -> None:
    ids = [str(token_id) for token_id in fresh_prompt(40)]
    answer = run_example(services, MODEL, *ids)
    assert answer.returncode == 0, answer.stderr
    worker_id, _, output = answer.stdout.partition(": ")
    assert worker_id == "w1"
    assert 1 <= len([int(token_id) for token_id in output.split()]) <= 16


def test_the_example_says_what_is_wrong(services: str) -> None:
    answer = run_example(services, "unknown", "1")
    assert answer.returncode == 1
    assert answer.stderr.startswith("not_found (model_not_found): ")
    assert "Traceback" not in answer.stderr


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CLIENT / "examples/scheduler.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(CLIENT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_a_query_books_nothing_and_explains(router: RouterClient) -> None:
    answer = await router.query(
        MODEL, fresh_prompt(), explain=True, cost=CostOverrides(temperature=0.0), policy="kv", priority=1
    )
    assert answer.reservation_id == ""
    assert answer.tokens_to_compute == 64
    assert [score.worker_id for score in answer.scores] == ["w1"]
    assert await booked(router) == 0


async def test_a_reservation_is_booked_and_freed(router: RouterClient) -> None:
    async with await router.select_and_reserve(fresh_id(), MODEL, fresh_prompt(), ttl_s=60) as reservation:
        assert (reservation.target.worker_id, reservation.prefill) == ("w1", None)
        assert 50 < reservation.expires_unix_ms / 1000 - time.time() <= 61
        [load] = await router.get_loads(MODEL)
        assert (load.worker_id, load.requests, load.prefill_blocks) == ("w1", 1, 64 / BLOCK)
        await reservation.mark_prefill_complete()
        [load] = await router.get_loads(MODEL)
        assert (load.requests, load.prefill_blocks) == (1, 0)
    assert await booked(router) == 0
    assert await router.free(reservation.id) == 1, "it is unknown by now"


async def test_a_reservation_is_freed_when_its_body_raises(router: RouterClient) -> None:
    async def fail() -> None:
        async with await router.select_and_reserve(fresh_id(), MODEL, fresh_prompt()):
            assert await booked(router) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await booked(router) == 0


async def test_a_reservation_is_freed_when_its_body_is_cancelled(router: RouterClient) -> None:
    reserved = asyncio.Event()

    async def hold() -> None:
        async with await router.select_and_reserve(fresh_id(), MODEL, fresh_prompt()):
            reserved.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await asyncio.wait_for(reserved.wait(), 20)
    assert await booked(router) == 1
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert await booked(router) == 0


async def test_a_repeated_request_gets_the_same_reservation(router: RouterClient) -> None:
    request_id, prompt = fresh_id(), fresh_prompt()
    first = await router.select_and_reserve(request_id, MODEL, prompt)
    again = await router.select_and_reserve(request_id, MODEL, prompt)
    assert (again.id, again.target) == (first.id, first.target)
    assert await booked(router) == 1
    await first.free()
    await again.free()
    assert await booked(router) == 0


async def test_a_worker_of_one_s_own_choice_is_booked(router: RouterClient) -> None:
    async with await router.add_request(fresh_id(), MODEL, "w1", fresh_prompt()) as reservation:
        assert reservation.target.worker_id == "w1"
        assert await booked(router) == 1
    with pytest.raises(NotFoundError) as caught:
        await router.add_request(fresh_id(), MODEL, "w9", fresh_prompt())
    assert caught.value.param == "worker_id"


async def test_workers_are_listed_and_watched(router: RouterClient) -> None:
    [worker] = await router.list_workers()
    assert (worker.worker_id, worker.engine, worker.draining) == ("w1", "mock", False)
    assert worker.card is not None
    assert (worker.card.model, worker.card.block_size) == (MODEL, BLOCK)
    assert worker.worker_load is not None
    async with aclosing(router.watch_workers(MODEL)) as changes:
        seen = [await asyncio.wait_for(anext(changes), 20) for _ in range(2)]
    assert [change.kind for change in seen] == [WorkerChangeKind.UP, WorkerChangeKind.SYNCED]
    assert seen[0].worker is not None
    assert seen[0].worker.address == worker.address


async def test_what_a_worker_computed_is_found_by_ids_and_by_hashes(router: RouterClient) -> None:
    prompt = fresh_prompt(5 * BLOCK + 3)
    await run_once(router, prompt)
    deadline = time.monotonic() + 20
    while not (overlaps := await router.get_overlaps(MODEL, prompt)):
        assert time.monotonic() < deadline, "the worker's blocks never reached the router"
        await asyncio.sleep(0.02)
    by_hashes = await router.get_overlaps(MODEL, hashed_here(prompt, BLOCK))
    assert overlaps == by_hashes
    assert overlaps[0].overlap is not None
    assert (overlaps[0].worker_id, overlaps[0].overlap.device_blocks) == ("w1", 5)
    assert not await router.get_overlaps(MODEL, prompt, cache_salt="tenant")

    answer = await router.query(MODEL, hashed_here(prompt, BLOCK))
    assert (answer.tokens_to_compute, answer.best_overlap_blocks) == (3, 5)

    pieces = [piece async for piece in router.dump_index(MODEL)]
    assert {(piece.worker_id, piece.tier) for piece in pieces} == {("w1", CacheTier.DEVICE)}
    known = {block for piece in pieces for block in unpack_u64(piece.block_hashes)}
    assert known.issuperset(block_hashes(prompt, BLOCK))


async def test_a_generation_of_the_mock_engine_arrives_whole(router: RouterClient) -> None:
    [info] = await router.list_workers(MODEL)
    async with WorkerClient(info.address) as worker:
        stop = StopOptions(max_tokens=5, ignore_eos=True)
        deltas = [delta async for delta in worker.generate(fresh_id(), MODEL, fresh_prompt(), stop=stop)]
        card = (await worker.get_info()).card
    assert sum(len(delta.token_ids) for delta in deltas) == 5
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (64, 5)
    assert card is not None
    assert card.model == MODEL


async def test_a_generation_can_be_aborted_by_its_id(router: RouterClient) -> None:
    [info] = await router.list_workers(MODEL)
    request_id, stop = fresh_id(), StopOptions(max_tokens=20_000, ignore_eos=True)
    async with WorkerClient(info.address) as worker:
        generation = worker.generate(request_id, MODEL, fresh_prompt(), stop=stop)
        await anext(generation)
        assert await worker.abort(request_id)
        *_, last = [delta async for delta in generation]
    assert last.finish_reason == FinishReason.CANCELLED


async def test_many_requests_at_once_leave_nothing_behind(router: RouterClient) -> None:
    outputs = await asyncio.gather(*(run_once(router, fresh_prompt(), max_tokens=6) for _ in range(40)))
    assert [len(output) for output in outputs] == [6] * 40
