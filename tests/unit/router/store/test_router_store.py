"""The store contract: the same suite for memory, for a real Redis, and for a Redis Cluster of three nodes."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import cast

import pytest
from redis.asyncio import Redis

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u64, unpack_u64
from services.router.state.kv_index.events import (
    BlockOp,
    BlocksChanged,
    BlocksReplaced,
    CacheOperation,
    Change,
    EventBatch,
    Snapshot,
    Tier,
    WorkerDown,
    WorkerDraining,
    WorkerUp,
)
from services.router.state.kv_index.rank_cache import ApplyResult
from services.router.state.reservations.cost import Limits, Load, Offer
from services.router.state.reservations.table import AllBusy, Owner, Reservation, ReservationParams
from services.router.state.store.base import FellBehind, Lease, Position, Store
from services.router.state.store.memory import MemoryStore, unix_ms
from services.router.state.store.redis import FEED_PACE_S, RedisStore
from services.router.state.workers.claims import Claim, Hold, Taken
from services.router.state.workers.worker import Role, Worker, WorkerRank
from tests.support.oracles.errors import raises_error
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.redis_topologies import RedisCluster

M = "org/model"
LEASE_MS = 6_000
A, B, C = WorkerRank("a", 0), WorkerRank("b", 0), WorkerRank("c", 0)


@pytest.fixture(scope="module")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("redis-cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(params=["memory", "redis", "redis_cluster"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        made: Store = MemoryStore(random=Random(1), feed_limit=100)
    else:
        server: RedisServer | RedisCluster = request.getfixturevalue(
            "shared_redis" if request.param == "redis" else request.param
        )
        made = RedisStore(server.url, prefix=tmp_path.name, timeout_s=10, random=Random(1), feed_limit=100)
    await made.ping()
    yield made
    await made.close()


def worker(worker_id: str = "a", epoch: int = 1, model: str = M, ranks: int = 1, total_blocks: int = 10_000) -> Worker:
    return Worker(
        worker_id,
        f"{worker_id}:1",
        epoch,
        model,
        Role.AGGREGATED,
        16,
        "sluice-xxh3-v1",
        total_blocks,
        ranks,
        b"\x00doc",
    )


def batch(
    sequence: int, *hashes: int, rank: int = 0, kind: CacheOperation = CacheOperation.STORED, tier: Tier = Tier.DEVICE
) -> EventBatch:
    return EventBatch(rank, sequence, (BlockOp(kind, tier, pack_u64(hashes)),))


def offer(slot: WorkerRank, uncached: float = 10, added: float = 10, held: int = 0) -> Offer:
    return Offer(slot, uncached, added, held, int(uncached * 1000), int(added * 1000))


async def held(store: Store, slot: WorkerRank, model: str = M) -> list[list[int]] | None:
    found = await store.blocks(model, slot)
    return None if found is None else [sorted(unpack_u64(tier)) for tier in found[1].tiers]


async def apply(
    store: Store, *batches: EventBatch, epoch: int = 1, capacity: int = 10_000
) -> list[tuple[ApplyResult, int]]:
    return [(applied.outcome, applied.sequence) for applied in await store.apply(M, "a", epoch, capacity, batches)]


async def changes_after(store: Store, position: Position, count: int) -> list[Change]:
    found: list[Change] = []
    async with asyncio.timeout(10), aclosing(cast(AsyncGenerator[list[Change]], store.follow(M, position))) as feed:
        async for changes in feed:
            found += changes
            if len(found) >= count:
                break
    return found


async def test_follower_of_a_busy_feed_reads_it_at_a_pace(shared_redis: RedisServer, tmp_path: Path) -> None:
    store = RedisStore(shared_redis.url, prefix=tmp_path.name, timeout_s=10)
    await store.register(worker("a"), "s", 60_000)
    position = (await store.load(M)).position
    reads, changes, count, started = 0, 0, 300, time.monotonic()

    async def change() -> None:
        for sequence in range(1, count + 1):
            await apply(store, batch(sequence, sequence))

    changing = asyncio.create_task(change())
    async with asyncio.timeout(20), aclosing(cast(AsyncGenerator[list[Change]], store.follow(M, position))) as feed:
        async for some in feed:
            reads, changes = reads + bool(some), changes + len(some)
            if changes >= count:
                break
    assert reads <= (time.monotonic() - started) / FEED_PACE_S + 1
    await changing
    await store.close()


async def test_registered_workers_are_loaded(store: Store) -> None:
    assert await store.register(worker("a"), "s1", 5000) == {}
    await store.register(worker("b"), "s2", 5000)
    state = await store.load(M)
    assert sorted(state.workers, key=lambda each: each.worker_id) == [worker("a"), worker("b")]
    assert await store.models() == [M]


ONE = Claim("a", 10, "worker", "one", "token 1 at h1")


@pytest.mark.parametrize(
    ("claim", "taken"),
    [
        (ONE, False),
        (replace(ONE, epoch=5), False),
        (replace(ONE, lease_digest="two", epoch=99), True),
        (replace(ONE, caller="", epoch=99), True),
        (replace(ONE, caller="operator", epoch=99), True),
        (replace(ONE, lease_digest="", epoch=99), True),
        (replace(ONE, caller="worker/b", lease_digest="two", epoch=99), True),
        (replace(ONE, caller="worker/a", lease_digest="two", epoch=1), False),
    ],
)
async def test_an_id_is_kept_for_the_process_that_claimed_it(store: Store, claim: Claim, taken: bool) -> None:
    await store.claim(ONE, "s1", 60_000)
    if not taken:
        await store.claim(claim, "s2", 60_000)
        assert await store.renew_claim("a", "s1", 60_000) is Hold.REPLACED
        assert await store.renew_claim("a", "s2", 60_000) is Hold.HELD
        return
    with pytest.raises(Taken) as refused:
        await store.claim(claim, "s2", 60_000)
    assert 0 < refused.value.left_ms <= 60_000
    assert (refused.value.holder.caller, refused.value.holder.proof) == (ONE.caller, ONE.proof)
    assert "token 1" not in refused.value.error.message
    assert await store.renew_claim("a", "s1", 60_000) is Hold.HELD


async def test_of_two_processes_with_one_identity_the_later_has_the_id(store: Store) -> None:
    await store.claim(Claim("a", 10, "worker/a", "one"), "s1", 60_000)
    for epoch in (9, 10):
        with pytest.raises(Taken):
            await store.claim(Claim("a", epoch, "worker/a", "two"), "s2", 60_000)
    await store.claim(Claim("a", 2**63, "worker/a", "two"), "s2", 60_000)
    with pytest.raises(Taken):
        await store.claim(Claim("a", 10, "worker/a", "one"), "s1", 60_000)


async def test_an_attachment_without_a_lease_key_may_claim_again_and_no_other(store: Store) -> None:
    bare = Claim("a", 10)
    await store.claim(bare, "s1", 60_000)
    await store.claim(bare, "s1", 60_000)
    with pytest.raises(Taken):
        await store.claim(bare, "s2", 60_000)


async def test_an_id_is_free_when_it_is_given_back_and_when_its_lease_ends(store: Store) -> None:
    await store.claim(ONE, "s1", 60_000)
    await store.release_claim("a", "another")
    assert await store.renew_claim("a", "s1", 60_000) is Hold.HELD
    await store.release_claim("a", "s1")
    assert await store.renew_claim("a", "s1", 60_000) is Hold.GONE
    await store.claim(replace(ONE, lease_digest="two"), "s2", 1)
    while await store.renew_claim("a", "s1", 60_000) is not Hold.GONE:  # noqa: ASYNC110  # a lease of a millisecond
        await asyncio.sleep(0.001)
    await store.claim(replace(ONE, lease_digest="three"), "s3", 60_000)
    assert await store.renew_claim("a", "s2", 60_000) is Hold.REPLACED


async def test_another_process_starts_anew_whatever_its_epoch(store: Store) -> None:
    old = replace(worker(epoch=7), caller="worker", lease_digest="one")
    await store.register(old, "s1", 5000)
    await apply(store, batch(1, 1, 2), epoch=7)
    await store.select(M, [offer(A)], ReservationParams("r", 60_000))
    position = (await store.load(M)).position
    new = replace(worker(epoch=3), caller="worker", lease_digest="two")
    assert await store.register(new, "s2", 5000) == {}
    assert await changes_after(store, position, 2) == [WorkerDown("a", 7), WorkerUp(new)]
    assert await held(store, A) == [[], [], []]
    assert (await store.pulse(M)).loads == {}
    assert (await apply(store, batch(1, 1), epoch=7))[0][0] is ApplyResult.STALE
    assert (await apply(store, batch(1, 1), epoch=3))[0][0] is ApplyResult.APPLIED


async def test_models_do_not_mix(store: Store) -> None:
    await store.register(worker("a"), "s1", 5000)
    await store.register(worker("a", model="{other}"), "s2", 5000)
    await apply(store, batch(1, 7))
    await store.select("{other}", [offer(A)], ReservationParams("r", 1000))
    assert await held(store, A) == [[7], [], []]
    assert await held(store, A, "{other}") == [[], [], []]
    assert (await store.pulse(M)).loads == {}
    assert (await store.load("third")).workers == []
    assert sorted(await store.models()) == sorted([M, "{other}"])


async def test_a_higher_epoch_starts_empty_and_a_lower_is_refused(store: Store) -> None:
    await store.register(worker(epoch=1), "s1", 5000)
    await apply(store, batch(1, 1, 2))
    await store.select(M, [offer(A)], ReservationParams("r", 1000))
    assert await store.register(worker(epoch=2**63), "s2", 5000) == {}
    assert await held(store, A) == [[], [], []]
    assert (await store.pulse(M)).loads == {}
    with raises_error(kind=ErrorKind.FAILED_PRECONDITION):
        await store.register(worker(epoch=2**63 - 1), "s3", 5000)


async def test_registration_with_the_same_epoch_keeps_blocks_and_returns_the_sequence(store: Store) -> None:
    await store.register(worker(ranks=2), "s1", 5000)
    await apply(store, batch(1, 1), batch(2, 2), batch(1, 9, rank=1))
    assert await store.register(worker(ranks=2), "s2", 5000) == {0: 2, 1: 1}
    assert await held(store, A) == [[1, 2], [], []]
    assert await held(store, WorkerRank("a", 1)) == [[9], [], []]


async def test_sequence_rules(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    assert await apply(store, batch(1, 1), batch(2, 2)) == [(ApplyResult.APPLIED, 1), (ApplyResult.APPLIED, 2)]
    assert await apply(store, batch(2, 3)) == [(ApplyResult.DUPLICATE, 2)]
    assert await apply(store, batch(4, 4)) == [(ApplyResult.GAP, 2)]
    assert (await apply(store, batch(3, 5), epoch=2))[0][0] is ApplyResult.STALE
    assert (await store.apply(M, "unknown", 1, 10, [batch(1, 1)]))[0].outcome is ApplyResult.STALE
    assert await held(store, A) == [[1, 2], [], []]


async def test_tiers_removal_and_clearing(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    await apply(store, batch(1, 1, 2), batch(2, 2, 3, tier=Tier.HOST), batch(3, 4, tier=Tier.DISK))
    assert await held(store, A) == [[1, 2], [2, 3], [4]]
    await apply(
        store, batch(4, 1, 99, kind=CacheOperation.REMOVED), batch(5, 2, kind=CacheOperation.REMOVED, tier=Tier.HOST)
    )
    assert await held(store, A) == [[2], [3], [4]]
    await apply(store, EventBatch(0, 6, (BlockOp(CacheOperation.CLEARED, Tier.DEVICE, b""),)))
    assert await held(store, A) == [[], [], []]


async def test_large_batches(store: Store) -> None:
    await store.register(worker(total_blocks=50_000), "s1", 5000)
    many = range(1, 20_001)
    assert await apply(store, batch(1, *many), capacity=50_000) == [(ApplyResult.APPLIED, 1)]
    assert await held(store, A) == [list(many), [], []]
    await apply(store, batch(2, *range(1, 15_001), kind=CacheOperation.REMOVED), capacity=50_000)
    assert await held(store, A) == [list(range(15_001, 20_001)), [], []]


async def test_more_blocks_than_the_capacity_overflow(store: Store) -> None:
    await store.register(worker(total_blocks=2), "s1", 5000)
    assert await apply(store, batch(1, 1, 2), batch(2, 2, 1), capacity=2) == [
        (ApplyResult.APPLIED, 1),
        (ApplyResult.APPLIED, 2),
    ]
    assert (await apply(store, batch(3, 3), capacity=2))[0][0] is ApplyResult.OVERFLOW
    too_many = Snapshot(0, 9, (pack_u64([1, 2, 3]), b"", b""))
    assert (await store.replace(M, "a", 1, 2, too_many)).outcome is ApplyResult.OVERFLOW


async def test_a_snapshot_replaces_unless_it_is_older(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    await apply(store, batch(1, 1, 2), batch(2, 5, tier=Tier.HOST))
    snapshot = Snapshot(0, 7, (pack_u64([3]), b"", pack_u64([4])))
    assert await store.replace(M, "a", 1, 10_000, snapshot) == (ApplyResult.APPLIED, 7)
    assert await held(store, A) == [[3], [], [4]]
    assert await store.replace(M, "a", 1, 10_000, Snapshot(0, 6, (b"", b"", b""))) == (ApplyResult.DUPLICATE, 7)
    assert (await store.replace(M, "a", 2, 10_000, snapshot)).outcome is ApplyResult.STALE
    assert await apply(store, batch(8, 8)) == [(ApplyResult.APPLIED, 8)]


async def test_changes_are_ordered_and_complete(store: Store) -> None:
    start = (await store.load(M)).position
    await store.register(worker(), "s1", 5000)
    first, second = batch(1, 1), batch(2, 1, kind=CacheOperation.REMOVED)
    await apply(store, first, second, batch(2, 2), batch(9, 2))
    await store.replace(M, "a", 1, 10_000, Snapshot(0, 5, (pack_u64([3]), b"", b"")))
    await store.leave(M, "a", "s1")
    await store.remove(M, "a", "s1")
    assert await changes_after(store, start, 6) == [
        WorkerUp(worker()),
        BlocksChanged(A, 1, first),
        BlocksChanged(A, 1, second),
        BlocksReplaced(A, 1, 5),
        WorkerDraining("a", 1),
        WorkerDown("a", 1),
    ]


async def test_following_from_the_middle(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    await apply(store, batch(1, 1))
    middle = (await store.load(M)).position
    await apply(store, batch(2, 2))
    assert await changes_after(store, middle, 1) == [BlocksChanged(A, 1, batch(2, 2))]


async def test_a_follower_that_fell_behind_hears_of_it(store: Store) -> None:
    start = (await store.load(M)).position
    await store.register(worker(), "s1", 5000)
    for first in range(1, 2_000, 200):
        await apply(store, *(batch(sequence, 1) for sequence in range(first, first + 200)))
    with pytest.raises(FellBehind):
        await changes_after(store, start, 2_001)


async def test_a_lease_has_one_owner(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    assert await store.renew(M, "a", "s1", 5000, b"report") is Lease.HELD
    assert (await store.pulse(M)).reports == {"a": b"report"}
    await store.register(worker(), "s2", 5000)
    assert await store.renew(M, "a", "s1", 5000, None) is Lease.REPLACED
    await store.remove(M, "a", "s1")
    await store.leave(M, "a", "s1")
    assert (await store.load(M)).workers == [worker()]
    await store.remove(M, "a", "s2")
    assert await store.renew(M, "a", "s2", 5000, None) is Lease.GONE
    assert await held(store, A) is None


@pytest.mark.parametrize("again", ["same", "restarted", "another", "never"])
async def test_reservations_of_a_departed_worker_wait_for_the_same_process(store: Store, again: str) -> None:
    process = replace(worker("a"), epoch=5, caller="w", lease_digest="key")
    await store.register(process, "s1", 60_000)
    await store.select(M, [offer(A)], ReservationParams("r", 60_000))
    await apply(store, batch(1, 1), epoch=5)
    assert await store.remove(M, "a", "s1", awaited_ms=200)
    assert ((await store.load(M)).workers, await held(store, A)) == ([], None)
    assert (await store.pulse(M)).loads == {A: Load(10, 10, 1)}
    if again != "never":
        changed = {"same": {}, "restarted": {"epoch": 6}, "another": {"lease_digest": "other"}}[again]
        assert await store.register(replace(process, **changed), "s2", 60_000) == {}  # type: ignore[arg-type]
    await store.sweep(M, LEASE_MS)
    kept = {A: Load(10, 10, 1)}
    assert (await store.pulse(M)).loads == (kept if again in ("same", "never") else {})
    await asyncio.sleep(0.25)
    await store.sweep(M, LEASE_MS)
    assert (await store.pulse(M)).loads == (kept if again == "same" else {})


async def test_reservations_of_a_worker_that_left_remain(store: Store) -> None:
    await store.register(worker("a"), "s1", 60_000)
    await store.select(M, [offer(A)], ReservationParams("r", 60_000))
    assert await store.remove(M, "a", "s1", keep_reservations=True, awaited_ms=1)
    await asyncio.sleep(0.01)
    await store.sweep(M, LEASE_MS)
    assert (await store.pulse(M)).loads == {A: Load(10, 10, 1)}


async def test_expired_leases_are_swept_with_blocks_and_reservations(store: Store) -> None:
    await store.register(worker("a"), "s1", 1)
    await store.register(worker("b"), "s2", 60_000)
    await apply(store, batch(1, 1))
    await store.select(M, [offer(A)], ReservationParams("r", 60_000))
    position = (await store.load(M)).position
    await asyncio.sleep(0.01)
    assert await store.sweep(M, 200) >= 1
    assert (await store.load(M)).workers == [worker("b")]
    assert await held(store, A) is None
    assert (await store.pulse(M)).loads == {A: Load(10, 10, 1)}, "the same process may register again"
    await asyncio.sleep(0.25)
    await store.sweep(M, 200)
    assert (await store.pulse(M)).loads == {}
    assert await changes_after(store, position, 1) == [WorkerDown("a", 1)]


async def test_draining_is_kept_and_ends_with_a_new_registration(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    await store.leave(M, "a", "s1")
    assert (await store.load(M)).workers[0].draining
    await store.register(worker(), "s2", 5000)
    assert not (await store.load(M)).workers[0].draining


async def test_a_worker_that_left_keeps_its_reservations_when_it_goes(store: Store) -> None:
    await store.register(worker(), "s1", 5000)
    await store.select(M, [offer(A)], ReservationParams("r", 60_000))
    await store.remove(M, "a", "s1", keep_reservations=True)
    assert (await store.pulse(M)).loads == {A: Load(10, 10, 1)}
    assert await store.free(M, ["r"]) == []
    assert (await store.pulse(M)).loads == {}


async def test_select_books_the_cheapest_by_what_is_booked(store: Store) -> None:
    offers = [offer(A, uncached=2, added=2), offer(B, uncached=10, added=10)]
    first = await store.select(M, offers, ReservationParams("r1", 60_000))
    assert first.slot == A
    assert not first.repeated
    assert abs(first.expires_unix_ms - unix_ms() - 60_000) < 30_000
    for number in range(2, 7):
        await store.select(M, offers, ReservationParams(f"r{number}", 60_000))
    loads = (await store.pulse(M)).loads
    assert loads[B].requests >= 1
    assert loads[A].requests + loads[B].requests == 6


async def test_select_without_a_request_id_books_nothing(store: Store) -> None:
    choice = await store.select(M, [offer(A, 5), offer(B, 1)], ReservationParams("", 1000))
    assert (choice.slot, choice.expires_unix_ms) == (B, 0)
    assert (await store.pulse(M)).loads == {}


async def test_limits_keep_ranks_from_taking_more_and_refuse_when_all_are_at_theirs(store: Store) -> None:
    two = offer(A, uncached=0, added=0)._replace(limits=Limits(math.inf, math.inf, 2))
    ten = offer(B)._replace(limits=Limits(100, 25, math.inf))  # 10 of each are booked a request
    free = offer(C, uncached=99, added=99)
    taken = [(await store.select(M, [two, ten], ReservationParams(f"r{n}", 60_000))).slot for n in range(5)]
    assert (taken.count(A), taken.count(B)) == (2, 3)
    for request in ("", "r5"):
        with pytest.raises(AllBusy):
            await store.select(M, [two, ten], ReservationParams(request, 60_000))
    again = await store.select(M, [two, ten], ReservationParams("r0", 60_000))
    assert (again.slot, again.repeated) == (taken[0], True)
    assert (await store.select(M, [two, free, ten], ReservationParams("r6", 60_000))).slot == C
    await store.free(M, [f"r{taken.index(B)}"])
    hot = ReservationParams("r7", 60_000, temperature=100)
    assert (await store.select(M, [two, ten], hot)).slot == B
    prefill = offer(B)._replace(limits=Limits(25, math.inf, math.inf))
    with pytest.raises(AllBusy):
        await store.select(M, [prefill], ReservationParams("r8", 60_000))
    await store.mark_prefill_complete(M, ["r7"])
    assert (await store.select(M, [prefill], ReservationParams("r8", 60_000))).slot == B


async def test_sessions_are_remembered_by_model_for_their_time(store: Store) -> None:
    assert await store.session(M, "s") is None
    await store.remember_session(M, "s", A, 60_000)
    await store.remember_session(M, "s", WorkerRank("b/c", 3), 60_000)
    assert await store.session(M, "s") == WorkerRank("b/c", 3)
    assert await store.session("other", "s") is None
    await store.remember_session(M, "short", A, 1)
    await asyncio.sleep(0.05)
    assert await store.session(M, "short") is None


async def test_pin_of_a_name_holds_for_its_time_until_it_is_replaced(store: Store) -> None:
    assert await store.pin(M, "", 60_000, False) == ""
    assert await store.pin(M, "one", 60_000, False) == "one"
    assert await store.pin(M, "two", 60_000, False) == "one"
    assert await store.pin("other", "", 60_000, False) == ""
    assert await store.pin(M, "two", 60_000, True) == "two"
    assert await store.pin(M, "", 60_000, False) == "two"
    assert await store.pin(M, "one", 1, False) == "two"
    await asyncio.sleep(0.05)
    assert await store.pin(M, "one", 60_000, False) == "one"


async def test_select_is_idempotent_by_request_id(store: Store) -> None:
    first = await store.select(M, [offer(A)], ReservationParams("r", 60_000))
    again = await store.select(M, [offer(B)], ReservationParams("r", 60_000))
    assert (again.slot, again.expires_unix_ms, again.repeated) == (A, first.expires_unix_ms, True)
    moved = await store.select(M, [offer(B)], ReservationParams("r", 60_000, allowed=frozenset({"b", "c"})))
    assert (moved.slot, moved.repeated) == (B, False)
    assert list((await store.pulse(M)).loads) == [B]


async def test_ties_go_to_the_emptiest_then_to_any(store: Store) -> None:
    for _ in range(20):
        assert (await store.select(M, [offer(A, held=3), offer(B, held=2)], ReservationParams("", 1))).slot == B
    seen = {
        (await store.select(M, [offer(A, held=3), offer(B, held=3)], ReservationParams("", 1))).slot for _ in range(60)
    }
    assert seen == {A, B}


async def test_temperature_samples(store: Store) -> None:
    terms = ReservationParams("", 1, temperature=1.0)
    offers = [offer(WorkerRank(name, 0), cost, 0) for name, cost in (("x", 1), ("y", 2), ("z", 3))]
    seen = [(await store.select(M, offers, terms)).slot.worker_id for _ in range(1_500)]
    shares = [seen.count(name) / 1_500 for name in "xyz"]
    assert shares == pytest.approx([0.506, 0.307, 0.186], abs=0.06)


async def test_prefill_scale_weighs(store: Store) -> None:
    offers = [offer(A, uncached=10, added=1), offer(B, uncached=1, added=5)]
    assert (await store.select(M, offers, ReservationParams("", 1, prefill_load_scale=1.0))).slot == B
    assert (await store.select(M, offers, ReservationParams("", 1, prefill_load_scale=0.1))).slot == A


async def test_mark_and_free_are_batched_and_count_the_unknown(store: Store) -> None:
    for number in range(3):
        await store.select(M, [offer(A)], ReservationParams(f"r{number}", 60_000))
    assert await store.mark_prefill_complete(M, ["r0", "x", "r1"]) == ["x"]
    assert await store.mark_prefill_complete(M, ["r0"]) == []
    assert (await store.pulse(M)).loads == {A: Load(10, 30, 3)}
    assert await store.free(M, ["r0", "y", "r2"]) == ["y"]
    assert (await store.pulse(M)).loads == {A: Load(0, 10, 1)}
    assert await store.free(M, ["r1", "r1"]) == ["r1"]
    assert (await store.pulse(M)).loads == {}


async def test_expired_reservations_are_swept(store: Store) -> None:
    await store.select(M, [offer(A)], ReservationParams("r", 1))
    await asyncio.sleep(0.01)
    assert await store.sweep(M, LEASE_MS) == 1
    assert (await store.pulse(M)).loads == {}
    assert await store.free(M, ["r"]) == ["r"]


@pytest.mark.parametrize("moved_s", [600, -600, 7, -7])
async def test_clock_of_redis_that_moves_ends_no_lease_and_no_reservation(
    shared_redis: RedisServer, tmp_path: Path, moved_s: int
) -> None:
    stores = [RedisStore(shared_redis.url, prefix=tmp_path.name, timeout_s=1) for _ in range(2)]
    one, other = stores
    await one.register(worker("a"), "s1", 6_000)
    await one.register(worker("dead"), "s2", 300)
    owner = Owner("gateway", 4_000)
    await one.select(M, [offer(A)], ReservationParams("r", 60_000, owner=owner))
    for store in stores:
        assert await store.sweep(M, 500) == 0
    expiry, booked = await times_of(shared_redis, tmp_path, "r")
    for store in stores:
        move_clock(store, moved_s)
    for store in stores:
        assert await store.sweep(M, 500) == 0
        assert await store.sweep_owners(M) == 0
    moved = [
        now - before for now, before in zip(await times_of(shared_redis, tmp_path, "r"), (expiry, booked), strict=True)
    ]
    assert moved == pytest.approx([max(moved_s, 0) * 1000, moved_s * 1000], abs=2_000)
    await one.renew(M, "a", "s1", 6_000, None)
    await asyncio.sleep(0.6)
    assert await other.sweep(M, 500) == 1, "the lease of a worker that does not renew it ends in its time"
    assert [one.worker_id for one in (await other.load(M)).workers] == ["a"]
    assert (await other.pulse(M)).loads == {A: Load(10, 10, 1)}
    assert await other.sweep_owners(M) == 1
    for store in stores:
        await store.close()


async def times_of(redis: RedisServer, home: Path, request_id: str) -> list[int]:
    """Returns expiry and time of a reservation, Unix ms."""
    script = "local held = cmsgpack.unpack(redis.call('HGET', KEYS[1], ARGV[1])) return {held.x, held.b}"
    async with Redis(port=redis.port) as client:
        return list(await client.eval(script, 1, f"{{{home.name}:{M}}}:reservations", request_id))


def move_clock(store: RedisStore, seconds: int) -> None:
    """Lets scripts that a store runs from now on see another time of day than Redis'."""
    for script in store._client._scripts.values():
        script.text = script.text.replace("time[1] * 1000", f"(time[1] + {seconds}) * 1000")
        script.sha = hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()


async def test_booking_a_reservation_made_elsewhere(store: Store) -> None:
    reservation = Reservation("r", A, 2_500, 4_000, unix_ms() + 60_000)
    await store.book(M, reservation)
    await store.book(M, reservation)
    assert (await store.pulse(M)).loads == {A: Load(2.5, 4, 1)}


async def test_concurrent_selects_do_not_herd(store: Store) -> None:
    slots = [WorkerRank(f"w{number}", 0) for number in range(8)]
    await asyncio.gather(
        *(
            store.select(M, [offer(slot) for slot in slots], ReservationParams(f"r{number}", 60_000))
            for number in range(64)
        )
    )
    loads = (await store.pulse(M)).loads
    assert [loads[slot].requests for slot in slots] == [8] * 8


async def test_booking_elsewhere_replaces_an_earlier_reservation_only(store: Store) -> None:
    now = unix_ms()
    await store.book(M, Reservation("r", A, 2_500, 4_000, now + 60_000))
    await store.book(M, Reservation("r", B, 1_000, 1_000, now + 50_000))
    assert (await store.pulse(M)).loads == {A: Load(2.5, 4, 1)}
    await store.book(M, Reservation("r", B, 1_000, 1_000, now + 70_000))
    assert (await store.pulse(M)).loads == {B: Load(1, 1, 1)}


async def test_freed_request_is_booked_only_if_it_was_reserved_again(store: Store) -> None:
    reservation = Reservation("r", A, 2_500, 4_000, unix_ms() + 60_000)
    assert await store.free(M, ["r"]) == ["r"]
    await store.book(M, reservation)
    assert (await store.pulse(M)).loads == {}
    await store.select(M, [offer(A)], ReservationParams("r", 10))
    assert await store.sweep(M, LEASE_MS) in (0, 1)
    await store.book(M, replace(reservation, slot=B))
    assert list((await store.pulse(M)).loads) == [B]
