"""The worker registry, adapters, the flood guard, inboxes and settings."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.common.base.errors import ErrorKind, SluiceError, invalid
from services.router.registration.stream_messages import (
    MAX_MESSAGES_OF_RANK,
    MAX_TURNOVERS,
    MIN_HASHES,
    WINDOW_S,
    FloodGuard,
    Inbox,
)
from services.router.settings import RouterSettings
from services.router.state.workers.registry import RETURN_S, Registry, UpdateKind, WorkerUpdate
from services.router.state.workers.worker import Role, Worker, WorkerRank, with_adapter
from tests.support.oracles.errors import raises_error


def worker(worker_id: str, epoch: int = 1, model: str = "m", adapters: tuple[str, ...] = ()) -> Worker:
    return Worker(worker_id, "x:1", epoch, model, Role.AGGREGATED, 16, "s", 10, 2, b"\xffdoc", adapters=adapters)


async def test_a_watch_starts_with_who_is_there() -> None:
    registry = Registry()
    registry.up(worker("a"))
    registry.up(worker("b", model="other"))
    watch = registry.watch("m")
    assert await watch.next() == [WorkerUpdate(UpdateKind.UP, worker("a")), WorkerUpdate(UpdateKind.SYNCED, None)]
    assert len(await registry.watch().next()) == 3


async def test_a_slow_watcher_gets_only_the_latest_of_each_worker() -> None:
    registry = Registry()
    watch = registry.watch()
    await watch.next()
    for epoch in range(1, 1000):
        registry.up(worker("a", epoch))
        registry.up(worker("b", epoch))
        registry.down("m", "b", epoch)
    assert await watch.next() == [
        WorkerUpdate(UpdateKind.UP, worker("a", 999)),
        WorkerUpdate(UpdateKind.DOWN, worker("b", 999)),
    ]


async def test_draining_is_reported_once() -> None:
    registry = Registry()
    registry.up(worker("a"))
    watch = registry.watch()
    await watch.next()
    registry.drain("m", "a", 1)
    assert await watch.next() == [WorkerUpdate(UpdateKind.DOWN, replace(worker("a"), draining=True))]
    assert registry.down("m", "a", 1) is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watch.next(), 0.02)


def test_another_epoch_changes_nothing() -> None:
    registry = Registry()
    registry.up(worker("a", 2))
    registry.drain("m", "a", 1)
    assert registry.down("m", "a", 1) is None
    assert registry.workers("m") == [worker("a", 2)]


def test_last_worker_that_is_lost_may_return_and_one_that_left_may_not() -> None:
    registry = Registry()
    for name in ("a", "b"):
        registry.up(worker(name))
    registry.down("m", "a", 1)
    assert registry.returning_ms("m") == 0, "another one serves the model"
    registry.down("m", "b", 1)
    assert 0 < registry.returning_ms("m") <= 1_000 * RETURN_S
    registry.up(worker("a", 2, model="left"))
    registry.drain("left", "a", 2)
    registry.down("left", "a", 2)
    assert registry.returning_ms("left") == registry.returning_ms("unknown") == 0


async def test_closing_ends_watches() -> None:
    registry = Registry()
    watch = registry.watch()
    await watch.next()
    registry.close()
    assert await watch.next() == []
    assert watch.ended


def test_workers_survive_json() -> None:
    assert Worker.from_json(worker("a", 2**63).to_json()) == worker("a", 2**63)
    assert Worker.from_json(worker("a").to_json(), draining=True).draining
    assert WorkerRank.of_field(WorkerRank("a/b", 3).field) == WorkerRank("a/b", 3)


async def test_an_inbox_gives_all_there_is_and_bounds_the_reader() -> None:
    inbox: Inbox[int] = Inbox(2)
    await inbox.put(1)
    await inbox.put(2)
    waiting = asyncio.create_task(inbox.put(3))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await inbox.take(1) == [1, 2]
    await waiting
    inbox.end()
    assert await inbox.take(1) == [3]
    assert await inbox.take(1) == []


async def test_failed_inbox_raises_its_reason() -> None:
    inbox: Inbox[int] = Inbox(2)
    await inbox.put(1)
    inbox.end(invalid("nonsense"))
    with pytest.raises(SluiceError, match="nonsense"):
        await inbox.take(1)
    with pytest.raises(TimeoutError):
        await Inbox[int](1).take(0.01)


def test_settings_refuse_bad_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert RouterSettings.load(["--policy", "round_robin"]).policy == "round_robin"
    with pytest.raises(SystemExit) as ended:
        RouterSettings.load(["--policy", "best"])
    assert ended.value.code == 2
    assert "--policy" in capsys.readouterr().err


def test_workers_are_listed_by_id_after_every_change() -> None:
    registry = Registry()
    for name in ("b", "a"):
        registry.up(worker(name))
    assert registry.workers("m") == [worker("a"), worker("b")]
    registry.workers("m").clear()  # the caller's own copy
    registry.drain("m", "a", 1)
    assert registry.workers("m") == registry.workers() == [replace(worker("a"), draining=True), worker("b")]
    registry.down("m", "b", 1)
    assert registry.workers("m") == [replace(worker("a"), draining=True)]
    registry.up(worker("a", 2))
    assert registry.workers("m") == [worker("a", 2)]
    registry.down("m", "a", 2)
    assert registry.workers("m") == registry.workers("unknown") == []


def guard(now: list[float], total_blocks: int = 100, ranks: int = 1) -> FloodGuard:
    worker = Worker("w", "w:1", 1, "m", Role.AGGREGATED, 16, "sluice-xxh3-v1", total_blocks, ranks, b"")
    return FloodGuard(worker, lambda: now[0])


def test_too_many_messages() -> None:
    flood = guard([0.0])
    flood.count(MAX_MESSAGES_OF_RANK, 0)
    with raises_error(match="Worker w sent too much", kind=ErrorKind.OVERLOADED, code="flood"):
        flood.count(1, 0)


def test_flood_limit_grows_with_the_cache_and_counts_by_rank() -> None:
    flood = guard([0.0], total_blocks=MIN_HASHES, ranks=2)
    flood.count(2 * MAX_MESSAGES_OF_RANK, 2 * MAX_TURNOVERS * MIN_HASHES)
    with pytest.raises(SluiceError):
        flood.count(0, 1)


def test_a_new_window_starts_from_nothing() -> None:
    now = [0.0]
    flood = guard(now)
    for _ in range(5):
        flood.count(10, MIN_HASHES)
        now[0] += WINDOW_S
    flood.count(10, MIN_HASHES)
    with pytest.raises(SluiceError):
        flood.count(10, 1)


def test_adapter_of_some_workers_selects_those_workers() -> None:
    workers = [worker("a"), worker("b", adapters=("poet",)), worker("c", adapters=("poet", "clerk"))]
    assert [one.worker_id for one in with_adapter(workers, "poet")] == ["b", "c"]
    assert with_adapter(workers, "") == workers
    assert with_adapter(workers[:2], "clerk") == workers[:2], "unknown to every card: the worker decides"
    assert Worker.from_json(workers[1].to_json()) == workers[1]
