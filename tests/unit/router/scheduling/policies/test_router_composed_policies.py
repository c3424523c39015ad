"""Composed policies in a router with the memory store: order, filters, sessions, failures, hints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.common.base.errors import ErrorKind
from services.common.base.packing import pack_u64
from services.common.observability.instruments import read
from services.common.types.hashing import block_hashes
from services.router.router import RouterConfig
from services.router.scheduling.policies.composition import Composition, StageConfig
from services.router.scheduling.policies.config import PolicyFile
from services.router.scheduling.policies.registry import ComposedPolicies
from services.router.scheduling.selection import Thresholds
from services.router.state.workers.worker import Role, WorkerRank
from tests.support.oracles.errors import raises_error
from tests.support.servers.routing import BLOCK, COST, Cluster, prompt, tokens, worker
from tests.support.waiting import until

OWN = "tests.support.fakes.own_policies"


def composition(**given: Any) -> Composition:
    def stages(kind: str) -> tuple[StageConfig, ...]:
        return tuple(StageConfig(kind, name, parameters) for name, parameters in given.get(f"{kind}s", {}).items())

    picker = StageConfig("picker", *given.get("picker", ("max_score",)))
    options = given.get("cost", "kv"), given.get("on_failure", "")
    return Composition("p", stages("filter"), stages("scorer"), picker, *options)


@asynccontextmanager
async def cluster(
    composed: Composition, thresholds: Thresholds | None = None, timeout_s: float = 5.0, **config: Any
) -> AsyncIterator[tuple[Cluster, ComposedPolicies]]:
    policies = ComposedPolicies(PolicyFile({"p": composed}, "p"), timeout_s, memory_mb=512)
    await policies.start()
    try:
        async with Cluster(RouterConfig(thresholds=thresholds or Thresholds(), **config), policies=policies) as made:
            yield made, policies
    finally:
        await policies.close()


def failures(why: str) -> float:
    return read("sluice_router_policy_failures").get(("p", why), 0.0)


async def cache(cluster: Cluster, worker_id: str, blocks: str) -> None:
    await cluster.cache("m", WorkerRank(worker_id, 0), pack_u64(block_hashes(tokens(blocks), BLOCK)))


async def test_policy_with_the_prefix_scorer_chooses_the_prefix_at_any_load() -> None:
    async with cluster(composition(scorers={"prefix_cache": {}})) as (made, _):
        await made.add(worker("a"), worker("b"))
        await cache(made, "b", "AB")
        names = [(await made.ask(prompt("ABCDEFGH"), request_id=f"r{n}")).worker.worker_id for n in range(20)]
        assert names == ["b"] * 20
        route = await made.ask(prompt("ABCDEFGH"), explain=True)
        assert (route.policy, route.degraded) == ("p", "")
        assert [(score.slot.worker_id, score.policy_score) for score in route.scores] == [("b", 1.0), ("a", 0.0)]


async def test_policy_without_scorers_chooses_by_cost_like_policy_kv() -> None:
    async with cluster(composition()) as (made, _):
        await made.add(worker("a"), worker("b"))
        await cache(made, "b", "ABCDEFGH")
        names = [(await made.ask(prompt(f"ABCDEFGH{n}"), request_id=f"r{n}")).worker.worker_id for n in range(9)]
        assert names[:3] == ["b", "b", "b"]
        assert "a" in names


async def test_policy_of_the_query_takes_precedence() -> None:
    async with cluster(composition(filters={"worker": {"prefix": "a"}})) as (made, _):
        await made.add(worker("a"), worker("b"))
        assert {(await made.ask(prompt("A"))).worker.worker_id for _ in range(10)} == {"a"}
        turns = {(await made.ask(prompt("A"), policy="round_robin")).worker.worker_id for _ in range(4)}
        assert turns == {"a", "b"}
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="policy", match="direct, p"):
            await made.ask(prompt("A"), policy="q")


async def test_workers_that_a_filter_excludes_get_nothing_even_if_the_others_are_busy() -> None:
    thresholds = Thresholds(requests=2)
    async with cluster(composition(filters={"worker": {"prefix": "a"}}), thresholds) as (made, _):
        await made.add(worker("a1"), worker("a2"), worker("b"))
        names = [(await made.ask(prompt(f"{n}"), request_id=f"r{n}")).worker.worker_id for n in range(4)]
        assert sorted(names) == ["a1", "a1", "a2", "a2"]
        with raises_error(code="overloaded"):
            await made.ask(prompt("X"), request_id="r4")
        assert (await made.ask(prompt("0"), request_id="r0")).repeated
    async with cluster(composition(filters={"worker": {"prefix": "z"}})) as (made, _):
        await made.add(worker("a"))
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="workers_excluded"):
            await made.ask(prompt("A"), request_id="r")


async def test_fallbacks_follow_the_order_of_the_policy_and_its_filters() -> None:
    stages = {"filters": {"worker": {"prefix": "a"}}, "scorers": {"prefix_cache": {}}}
    async with cluster(composition(**stages)) as (made, _):
        await made.add(*(worker(name) for name in ("a1", "a2", "a3", "b")))
        await cache(made, "a3", "ABC")
        await cache(made, "a2", "AB")
        await cache(made, "b", "ABCD")
        route = await made.ask(prompt("ABCD"), fallbacks=5)
        assert [each.worker_id for each in (route.worker, *route.fallbacks)] == ["a3", "a2", "a1"]
        assert route.peer is not None
        assert route.peer.worker.worker_id == "b"


async def test_busy_candidates_are_passed_over_in_the_order_of_the_policy() -> None:
    own = composition(scorers={f"{OWN}:Misbehaving": {}})
    async with cluster(own, Thresholds(requests=1)) as (made, _):
        await made.add(*(worker(name) for name in "abcd"))
        first = await made.ask(prompt("A"), request_id="r1", headers={"prefer": "c"})
        second = await made.ask(prompt("A"), request_id="r2", headers={"prefer": "c"})
        assert first.worker.worker_id == "c"
        assert second.worker.worker_id != "c"
        await made.router.lifecycle.free([first.reservation_id])
        again = await made.ask(prompt("A"), request_id="r3", headers={"prefer": "c"})
        assert again.worker.worker_id == "c"


async def test_picker_of_one_candidate_falls_back_to_the_others_when_it_is_busy() -> None:
    async with cluster(composition(picker=("round_robin",)), Thresholds(requests=1)) as (made, _):
        await made.add(*(worker(name) for name in "abc"))
        routes = [await made.ask(prompt("A"), request_id=f"r{n}") for n in range(3)]
        assert [route.worker.worker_id for route in routes] == ["a", "b", "c"]
        await made.router.lifecycle.free([routes[1].reservation_id])
        assert (await made.ask(prompt("A"), request_id="r3")).worker.worker_id == "b"


async def test_session_scorer_keeps_a_session_together_and_other_policies_ignore_it() -> None:
    async with cluster(composition(scorers={"session": {}})) as (made, _):
        await made.add(*(worker(name) for name in "abcd"))
        routes = [await made.ask(prompt(f"{n}"), request_id=f"r{n}", session_id="s") for n in range(12)]
        assert len({route.worker.worker_id for route in routes}) == 1
    async with cluster(composition(picker=("round_robin",))) as (made, _):
        await made.add(worker("a"), worker("b"))
        turns = [(await made.ask(prompt("A"), session_id="s")).worker.worker_id for _ in range(4)]
        assert turns == ["a", "b", "a", "b"]


async def test_parts_of_a_pair_are_ranked_separately() -> None:
    async with cluster(composition(picker=("round_robin",))) as (made, _):
        await made.add(*(worker(f"p{n}", role=Role.PREFILL) for n in range(2)))
        await made.add(*(worker(f"d{n}", role=Role.DECODE) for n in range(2)))
        routes = [await made.ask(prompt("AB"), request_id=f"r{n}") for n in range(3)]
        assert [route.worker.worker_id for route in routes] == ["d0", "d1", "d0"]
        assert [route.prefill_worker and route.prefill_worker.worker_id for route in routes] == ["p0", "p1", "p0"]
        loads = await made.loads()
        assert (loads["p0"].decode, loads["d0"].prefill) == (0, 0)


@pytest.mark.parametrize(
    "do", ["raise", "nan", "high", "low", "text", "few", "none", "change", "reorder", "memory", "environment"]
)
async def test_stage_that_breaks_its_contract_is_replaced_by_policy_kv_for_that_query(do: str) -> None:
    async with cluster(composition(scorers={f"{OWN}:Misbehaving": {}})) as (made, policies):
        await made.add(worker("a"), worker("b"))
        await cache(made, "b", "ABCDEFGH")
        before = failures("raised")
        route = await made.ask(prompt("ABCDEFGH"), request_id="r1", headers={"do": do})
        assert (route.worker.worker_id, route.degraded) == ("b", "policy_failed")
        assert failures("raised") == before + 1
        fine = await made.ask(prompt("ABCDEFGH"), request_id="r2", headers={"prefer": "a"})
        assert (fine.worker.worker_id, fine.degraded) == ("a", "")
        assert policies.process is not None


@pytest.mark.parametrize(("do", "why"), [("hang", "slow"), ("exit", "died")])
async def test_stage_that_hangs_or_ends_its_process_is_started_again(do: str, why: str) -> None:
    async with cluster(composition(scorers={f"{OWN}:Misbehaving": {}}), timeout_s=1.0) as (made, policies):
        await made.add(worker("a"), worker("b"))
        process = policies.process
        assert process is not None
        pid, before = process.pid, failures(why)
        route = await made.ask(prompt("A"), request_id="r1", headers={"do": do})
        assert route.degraded == "policy_failed"
        assert failures(why) == before + 1
        await until(lambda: process.pid not in (0, pid))
        fine = await made.ask(prompt("A"), request_id="r2", headers={"prefer": "b"})
        assert (fine.worker.worker_id, fine.degraded) == ("b", "")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"scorers": {f"{OWN}:Unmakeable": {"size": 3}}}, "size must not be 3"),
        ({"scorers": {f"{OWN}:Abstract": {}}}, "it lacks the method score"),
        ({"scorers": {f"{OWN}:Inventing": {}}}, "it is not a scorer"),
        ({"filters": {"tests.support.fakes.none:Such": {}}}, "ModuleNotFoundError"),
        ({"filters": {f"{OWN}:Such": {}}}, "AttributeError"),
    ],
)
async def test_stage_of_ones_own_that_cannot_be_made_ends_the_start(stages: Any, message: str) -> None:
    policies = ComposedPolicies(PolicyFile({"p": composition(**stages)}, "p"))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="policies", match=message):
        await policies.start()
    await policies.close()


BROKEN_STAGES: dict[str, dict[str, Any]] = {
    "filter": {"filters": {f"{OWN}:Inventing": {}}},
    "scorer": {"scorers": {f"{OWN}:Misbehaving": {}}},
    "picker": {"picker": (f"{OWN}:Doubling",)},
    "scorer after a filter": {"filters": {"worker": {"prefix": "a"}}, "scorers": {f"{OWN}:Misbehaving": {}}},
}


@pytest.mark.parametrize("on_failure", ["", "reject", "ignore"])
@pytest.mark.parametrize("stage", BROKEN_STAGES)
async def test_policy_failure_rejects_the_query_where_filters_would_be_left_out(stage: str, on_failure: str) -> None:
    rejects = on_failure == "reject" or (not on_failure and "filter" in stage)
    async with cluster(composition(**BROKEN_STAGES[stage], on_failure=on_failure)) as (made, _):
        await made.add(worker("a"), worker("b"))
        asked = made.ask(prompt("A"), request_id="r", headers={"do": "raise"})
        if rejects:
            with raises_error(kind=ErrorKind.UNAVAILABLE, code="policy_failed", match="'p' failed"):
                await asked
            assert {name: load.requests for name, load in (await made.loads()).items()} == {"a": 0, "b": 0}
        else:
            assert (await asked).degraded == "policy_failed"


async def test_policy_with_filters_rejects_queries_while_its_process_is_away() -> None:
    stages = {"filters": {"worker": {"prefix": "a"}}, "scorers": {f"{OWN}:Misbehaving": {}}}
    async with cluster(composition(**stages), timeout_s=1.0) as (made, policies):
        await made.add(worker("a"), worker("b"))
        assert policies.process is not None
        pid = policies.process.pid
        for request_id, do in (("r1", "exit"), ("r2", "")):
            with raises_error(kind=ErrorKind.UNAVAILABLE, code="policy_failed"):
                await made.ask(prompt("A"), request_id=request_id, headers={"do": do})
        await until(lambda: policies.process is not None and policies.process.pid not in (0, pid))
        assert (await made.ask(prompt("A"), request_id="r3", headers={"prefer": "a"})).worker.worker_id == "a"


async def test_costs_of_a_query_cannot_outweigh_the_order_of_a_policy() -> None:
    async with cluster(composition(scorers={"prefix_cache": {}})) as (made, _):
        await made.add(worker("a"), worker("b"))
        await cache(made, "b", "AB")
        huge = type(COST)(prefill_load_scale=1e300, temperature=9.0)
        names = {(await made.ask(prompt("ABCD"), request_id=f"r{n}", cost=huge)).worker.worker_id for n in range(9)}
        assert names == {"b"}


async def test_hint_names_the_peer_with_the_longest_prefix_if_it_is_longer() -> None:
    async with Cluster() as made:
        await made.add(worker("a"), worker("b"), worker("c", ranks=2))
        assert (await made.ask(prompt("ABC"))).peer is None
        await cache(made, "a", "ABC")
        await cache(made, "b", "A")
        await made.cache("m", WorkerRank("c", 1), pack_u64(block_hashes(tokens("AB"), BLOCK)))
        chosen = await made.ask(prompt("ABCD"), candidates=frozenset({"b", "c"}))
        assert (chosen.worker.worker_id, chosen.rank, chosen.peer) == ("c", 1, None)
        with_all = await made.ask(prompt("ABCD"), policy="round_robin")
        assert (with_all.worker.worker_id, with_all.peer) == ("a", None)
        second = await made.ask(prompt("ABCD"), policy="round_robin")
        assert second.worker.worker_id == "b"
        assert second.peer is not None
        assert (second.peer.worker.worker_id, second.peer.rank, second.peer.blocks) == ("a", 0, 3)
