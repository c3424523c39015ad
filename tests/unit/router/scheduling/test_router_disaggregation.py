"""Pairs of a prefill and a decode worker: who is chosen, what is booked, and what happens while there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u64
from services.common.types.hashing import block_hashes
from services.router.router import RouterConfig
from services.router.rpc.queries import decision_of, query_of, response_of
from services.router.scheduling.disaggregation import FEW_UNCACHED, NO_PARTNER, DisaggRules
from services.router.scheduling.queries import RouteResult
from services.router.scheduling.selection import Thresholds
from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import CostModel, Load
from services.router.state.workers.worker import Role, Worker, WorkerRank
from sluice.v1 import router_pb2
from tests.support.oracles.errors import raises_error
from tests.support.servers.routing import BLOCK, Cluster, prompt, tokens, worker

NEVER_S = 3600.0


def prefill(name: str, runs: str = "") -> Worker:
    return worker(name, role=Role.PREFILL, handoff_form=runs)


def decode(name: str, alone: bool = False, runs: str = "") -> Worker:
    return worker(name, role=Role.DECODE, capabilities=("local_prefill",) if alone else (), handoff_form=runs)


def disagg(**rules: object) -> Cluster:
    return Cluster(RouterConfig(disagg=DisaggRules(**rules)))  # type: ignore[arg-type]


def pair(route: RouteResult) -> tuple[str | None, str]:
    prefill = route.prefill_worker
    return None if prefill is None else prefill.worker_id, route.worker.worker_id


async def test_four_growing_prompts_go_to_one_prefill_worker() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
        chosen = []
        for number, blocks in enumerate(("ABC", "ABCDEF", "ABCDEFGHI", "ABCDEFGHIJKL")):
            route = await cluster.ask(prompt(blocks), request_id=f"r{number}")
            assert route.prefill_worker is not None
            assert route.overlap == Overlap(3 * number)
            chosen.append(pair(route))
            hashes = pack_u64(block_hashes(tokens(blocks), BLOCK))
            await cluster.cache("m", WorkerRank(route.prefill_worker.worker_id, route.prefill_rank), hashes)
            await cluster.router.lifecycle.mark_prefill_complete([route.reservation_id])
        prefills, decodes = {p for p, _ in chosen}, {d for _, d in chosen}
        assert len(prefills) == 1
        assert prefills <= {"p1", "p2"}
        assert decodes == {"d1", "d2"}


async def test_each_part_is_reserved_on_its_worker_and_released_at_its_end() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"))
        route = await cluster.ask(prompt("ABCD"), request_id="r", expected_output_tokens=2 * BLOCK)
        assert await cluster.loads() == {"p": Load(4, 0, 1), "d": Load(0, 6, 1)}
        assert await cluster.router.lifecycle.mark_prefill_complete([route.reservation_id]) == 0
        assert await cluster.loads() == {"p": Load(), "d": Load(0, 6, 1)}
        assert await cluster.router.lifecycle.free([route.reservation_id]) == 0
        assert await cluster.loads() == {"p": Load(), "d": Load()}
        assert await cluster.router.lifecycle.free([route.reservation_id]) == 1


async def test_freeing_alone_gives_both_halves_back() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"))
        route = await cluster.ask(prompt("ABCD"), request_id="r")
        assert await cluster.router.lifecycle.free([route.reservation_id]) == 0
        assert await cluster.loads() == {"p": Load(), "d": Load()}


async def test_a_repeated_request_gets_the_same_pair() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
        first = await cluster.ask(prompt("ABCD"), request_id="r")
        for _ in range(10):
            again = await cluster.ask(prompt("ABCD"), request_id="r")
            assert (pair(again), again.reservation_id) == (pair(first), first.reservation_id)
        assert sum(load.requests for load in (await cluster.loads()).values()) == 2


async def test_decode_workers_are_chosen_by_decode_load_and_prefill_workers_by_prefill_load() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
        long = await cluster.ask(prompt("ABCDEFGH"), request_id="long")
        short = await cluster.ask(prompt("XY"), request_id="short")
        assert long.prefill_worker != short.prefill_worker
        assert long.worker != short.worker
        await cluster.router.lifecycle.mark_prefill_complete([long.reservation_id])
        third = await cluster.ask(prompt("UVW"), request_id="third")
        assert (third.prefill_worker, third.worker) == (long.prefill_worker, short.worker)


async def test_prefill_workers_that_come_later_are_found() -> None:
    async with disagg() as cluster:
        await cluster.add(decode("d", alone=True))
        assert pair(await cluster.ask(prompt("A"))) == (None, "d")
        await cluster.add(prefill("p"))
        assert pair(await cluster.ask(prompt("A"))) == ("p", "d")
        await cluster.lose(cluster.attachments["m", "p"])
        assert pair(await cluster.ask(prompt("A"))) == (None, "d")


@pytest.mark.parametrize("enforce", [False, True])
async def test_not_waiting_answers_at_once(enforce: bool) -> None:
    async with disagg(wait_for_prefill=False, enforce=enforce, prefill_wait_s=NEVER_S) as cluster:
        await cluster.add(decode("d", alone=True))
        route = await asyncio.wait_for(cluster.ask(prompt("A")), 20)
        assert (pair(route), route.prefill_skipped) == ((None, "d"), "")


@pytest.mark.parametrize("enforce", [False, True])
async def test_waiting_ends_when_a_prefill_worker_comes(enforce: bool) -> None:
    async with disagg(wait_for_prefill=True, enforce=enforce, prefill_wait_s=NEVER_S) as cluster:
        await cluster.add(decode("d", alone=True))
        waiting = [asyncio.create_task(cluster.ask(prompt("A"), request_id=f"r{n}")) for n in range(3)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await cluster.add(prefill("p"))
        routes = await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert {pair(route) for route in routes} == {("p", "d")}


async def test_after_waiting_in_vain_one_worker_does_it_all() -> None:
    async with disagg(wait_for_prefill=True, enforce=False, prefill_wait_s=0.02) as cluster:
        await cluster.add(decode("d", alone=True))
        assert pair(await asyncio.wait_for(cluster.ask(prompt("A")), 20)) == (None, "d")


async def test_after_waiting_in_vain_it_fails_if_pairs_are_enforced() -> None:
    async with disagg(wait_for_prefill=True, enforce=True, prefill_wait_s=0.02) as cluster:
        await cluster.add(decode("d", alone=True), worker("a"))
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="no_prefill_workers"):
            await asyncio.wait_for(cluster.ask(prompt("A")), 20)


async def test_the_wait_runs_once_for_all() -> None:
    async with disagg(wait_for_prefill=True, prefill_wait_s=0.02) as cluster:
        await cluster.add(decode("d", alone=True))
        await asyncio.wait_for(cluster.ask(prompt("A")), 20)
        later = asyncio.create_task(cluster.ask(prompt("A")))
        for _ in range(20):  # no timer can have run out in between
            await asyncio.sleep(0)
        assert later.done()


async def test_only_so_many_wait_for_a_prefill_worker() -> None:
    rules = DisaggRules(wait_for_prefill=True, prefill_wait_s=NEVER_S)
    async with Cluster(RouterConfig(disagg=rules, queue_limit=2)) as cluster:
        await cluster.add(decode("d", alone=True))
        waiting = [asyncio.create_task(cluster.ask(prompt("A"))) for _ in range(2)]
        await asyncio.sleep(0)
        with raises_error(kind=ErrorKind.OVERLOADED):
            await asyncio.wait_for(cluster.ask(prompt("A")), 20)
        named = await cluster.ask(prompt("A"), candidates=frozenset({"d"}))
        assert pair(named) == (None, "d")
        await cluster.add(prefill("p"))
        assert {pair(route) for route in await asyncio.wait_for(asyncio.gather(*waiting), 20)} == {("p", "d")}


async def test_workers_that_need_no_prefill_worker_are_not_kept_waiting() -> None:
    async with disagg(wait_for_prefill=True, enforce=True, prefill_wait_s=NEVER_S) as cluster:
        await cluster.add(worker("a"))
        assert pair(await asyncio.wait_for(cluster.ask(prompt("A")), 20)) == (None, "a")


async def test_decode_workers_that_cannot_prefill_are_never_left_alone() -> None:
    async with disagg() as cluster:
        await cluster.add(decode("d"))
        with raises_error(code="no_prefill_workers"):
            await cluster.ask(prompt("A"))
        await cluster.add(worker("a"))
        assert pair(await cluster.ask(prompt("A"))) == (None, "a")


async def test_prompts_with_little_left_to_compute_skip_the_prefill_workers() -> None:
    async with disagg(bypass_uncached_tokens=2 * BLOCK) as cluster:
        await cluster.add(prefill("p"), decode("d"), worker("a"))
        short = await cluster.ask(prompt("XY"))
        assert (pair(short), short.prefill_skipped) == ((None, "a"), FEW_UNCACHED)
        assert pair(await cluster.ask(prompt("ABCD"))) == ("p", "d")
        await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABC"), BLOCK)))
        cached = await cluster.ask(prompt("ABCD"))
        assert (pair(cached), cached.prefill_skipped, cached.tokens_to_compute) == ((None, "a"), FEW_UNCACHED, BLOCK)


async def test_prefill_workers_are_required_if_no_decode_worker_can_prefill() -> None:
    async with disagg(bypass_uncached_tokens=1000) as cluster:
        await cluster.add(prefill("p"), decode("d"))
        assert pair(await cluster.ask(prompt("A"))) == ("p", "d")


@pytest.mark.parametrize(("enforce", "expected"), [(False, (None, "a")), (True, None)])
async def test_busy_prefill_workers_are_skipped_unless_pairs_are_enforced(
    enforce: bool, expected: tuple[str | None, str] | None
) -> None:
    config = RouterConfig(disagg=DisaggRules(enforce=enforce), thresholds=Thresholds(prefill_tokens=BLOCK))
    async with Cluster(config) as cluster:
        await cluster.add(prefill("p"), decode("d"), worker("a"))
        assert pair(await cluster.ask(prompt("ABC"), request_id="r1")) == ("p", "d")
        if expected is None:
            with raises_error(kind=ErrorKind.OVERLOADED):
                await cluster.ask(prompt("DEF"), request_id="r2")
        else:
            route = await cluster.ask(prompt("DEF"), request_id="r2")
            assert (pair(route), route.prefill_skipped) == (expected, "pair_busy")
        loads = await cluster.loads()
        assert (loads["p"].requests, loads["d"].requests) == (1, 1)


VERSIONS = ("", "vllm 1", "vllm 2", "sglang 1")


@settings(max_examples=60, deadline=None)
@given(
    prefills=st.lists(st.sampled_from(VERSIONS), min_size=1, max_size=4),
    decodes=st.lists(st.sampled_from(VERSIONS), min_size=1, max_size=4),
)
def test_pair_of_workers_that_cannot_hand_over_is_never_chosen(prefills: list[str], decodes: list[str]) -> None:
    async def ask() -> None:
        async with Cluster(RouterConfig(thresholds=Thresholds(requests=1))) as cluster:
            await cluster.add(*(prefill(f"p{at}", runs) for at, runs in enumerate(prefills)))
            await cluster.add(*(decode(f"d{at}", runs=runs) for at, runs in enumerate(decodes)))
            possible = any(not one or not other or one == other for one in prefills for other in decodes)
            for number in range(5):
                route, refused = None, ""
                try:
                    route = await cluster.ask(prompt("ABC"), request_id=f"r{number}")
                except SluiceError as error:
                    refused = error.code or error.kind.name
                if route is None:
                    assert refused == ("overloaded" if possible else "no_prefill_workers")
                    assert number > 0 or not possible
                    continue
                assert route.prefill_worker is not None
                ours, theirs = route.prefill_worker.handoff_form, route.worker.handoff_form
                assert not ours or not theirs or ours == theirs

    asyncio.run(ask())


async def test_busy_pair_of_one_version_leaves_the_pair_of_the_other() -> None:
    async with Cluster(RouterConfig(thresholds=Thresholds(requests=1))) as cluster:
        await cluster.add(prefill("p1", "vllm 1"), prefill("p2", "vllm 2"))
        await cluster.add(*(decode(f"d1{at}", runs="vllm 1") for at in range(4)), decode("d2", runs="vllm 2"))
        chosen = {pair(await cluster.ask(prompt("ABC"), request_id=f"r{number}"))[0] for number in range(2)}
        assert chosen == {"p1", "p2"}
        with raises_error(kind=ErrorKind.OVERLOADED):
            await cluster.ask(prompt("ABC"), request_id="r3")
        loads = await cluster.loads()
        assert sum(load.requests for load in loads.values()) == 4


@pytest.mark.parametrize("alone", [True, False])
async def test_prefill_worker_of_another_version_is_skipped_or_named_in_the_refusal(alone: bool) -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p", "vllm 1"), decode("d", alone, "vllm 2"))
        if alone:
            route = await cluster.ask(prompt("ABC"))
            assert (pair(route), route.prefill_skipped) == ((None, "d"), NO_PARTNER)
        for required in (True,) if alone else (True, False):
            with raises_error(match="in its version", code="no_prefill_workers"):
                await cluster.ask(prompt("ABC"), require_pair=required)


async def test_candidates_may_name_a_pair_or_one_part() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"), worker("a"))
        for names, expected in (
            ("p2 d1", ("p2", "d1")),
            ("d2", (None, "d2")),
            ("p1", (None, "p1")),
            ("a", (None, "a")),
        ):
            route = await cluster.ask(prompt("ABC"), candidates=frozenset(names.split()))
            assert pair(route) == expected
        direct = await cluster.ask(prompt("ABC"), candidates=frozenset({"p1", "d2"}), policy="direct")
        assert pair(direct) == ("p1", "d2")


async def test_a_session_keeps_its_decode_worker() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d1"), decode("d2"))
        routes = [await cluster.ask(prompt("ABC"), request_id=f"r{n}", session_id="s") for n in range(4)]
        assert len({route.worker for route in routes}) == 1
        assert [route.session_hit for route in routes] == [False, True, True, True]


async def test_scores_tell_of_both_parts() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
        await cluster.cache("m", WorkerRank("p2", 0), pack_u64(block_hashes(tokens("AB"), BLOCK)))
        route = await cluster.ask(prompt("ABC"), explain=True, cost=CostModel(prefill_load_scale=2))
        assert {score.slot.worker_id for score in route.scores[:2]} == {"d1", "d2"}
        assert [(score.slot.worker_id, score.cost) for score in route.scores[2:]] == [("p2", 2), ("p1", 6)]


async def test_a_request_booked_whole_before_there_were_pairs_stays_whole() -> None:
    async with disagg() as cluster:
        await cluster.add(worker("a"))
        first = await cluster.ask(prompt("ABC"), request_id="r")
        await cluster.add(prefill("p"), decode("d"))
        again = await cluster.ask(prompt("ABC"), request_id="r")
        assert (pair(again), again.reservation_id) == ((None, "a"), first.reservation_id)


async def test_prefill_half_names_no_decode_worker_and_has_its_headers_alone() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"))
        answer = response_of(await cluster.ask(prompt("ABCD"), request_id="r", role=Role.PREFILL))
        assert (answer.prefill.worker_id, answer.HasField("decode")) == ("p", False)
        assert answer.headers["x-sluice-prefill-worker"] == "p"
        assert answer.headers["x-dynamo-routing-mode"] == "disaggregated"
        assert not {"x-sluice-worker", "x-gateway-destination-endpoint"} & answer.headers.keys()
        assert await cluster.loads() == {"p": Load(4, 0, 1), "d": Load()}
        (record,) = map(decision_of, cluster.router.decisions.latest("m", 9))
        assert (record.prefill.worker_id, record.HasField("decode")) == ("p", False)
        assert await cluster.router.lifecycle.mark_prefill_complete([answer.reservation_id]) == 0
        assert await cluster.router.lifecycle.free([answer.reservation_id]) == 0
        assert await cluster.loads() == {"p": Load(), "d": Load()}


async def test_decode_half_reserves_on_the_decode_worker_alone() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"))
        answer = response_of(await cluster.ask(prompt("ABCD"), request_id="r", role=Role.DECODE))
        assert (answer.decode.worker_id, answer.HasField("prefill")) == ("d", False)
        assert answer.headers["x-sluice-worker"] == "d"
        assert answer.headers["x-dynamo-routing-mode"] == "disaggregated"
        assert "x-sluice-prefill-worker" not in answer.headers
        assert (await cluster.loads())["p"] == Load()
        assert await cluster.router.lifecycle.free([answer.reservation_id]) == 0
        assert await cluster.loads() == {"p": Load(), "d": Load()}


async def test_role_of_an_aggregated_request_selects_a_worker_that_runs_alone() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"), decode("alone", alone=True))
        answer = response_of(await cluster.ask(prompt("ABCD"), role=Role.AGGREGATED))
        assert (answer.decode.worker_id, answer.headers["x-dynamo-routing-mode"]) == ("alone", "aggregated")


@pytest.mark.parametrize(
    ("role", "code"),
    [(Role.PREFILL, "no_prefill_workers"), (Role.DECODE, "no_workers")],
)
async def test_half_without_a_worker_is_refused_at_once(role: Role, code: str) -> None:
    async with disagg(wait_for_prefill=True, prefill_wait_s=NEVER_S) as cluster:
        await cluster.add(worker("w"))
        with raises_error(kind=ErrorKind.UNAVAILABLE, code=code):
            await cluster.ask(prompt("A"), role=role)


async def test_halves_under_one_request_id_are_refused() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"))
        await cluster.ask(prompt("ABCD"), request_id="r", role=Role.PREFILL)
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="request_id"):
            await cluster.ask(prompt("ABCD"), request_id="r", role=Role.DECODE)
        assert await cluster.loads() == {"p": Load(4, 0, 1), "d": Load()}


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 9])
def test_role_of_a_message_is_read_or_refused(number: int) -> None:
    message = router_pb2.RouteQueryRequest(model="m", role=number)  # type: ignore[arg-type]
    if number > 3:
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="role"):
            query_of(message, CostModel())
        return
    assert query_of(message, CostModel()).role == (Role(number) if number else None)


REQUIRES = {"require_pair": True}


@pytest.mark.parametrize(
    ("kinds", "asked", "expected"),
    [
        ("p d", REQUIRES, ("p", "d")),
        ("p d a", REQUIRES, ("p", "d")),
        ("p alone", REQUIRES, ("p", "alone")),
        ("a", REQUIRES, None),
        ("d", REQUIRES, None),
        ("alone", REQUIRES, None),
        ("p", REQUIRES, None),
        ("p a", REQUIRES, None),
        ("p d a", REQUIRES | {"candidates": frozenset({"d", "a"})}, None),
        ("a", REQUIRES | {"bypass_uncached_tokens": 9 * BLOCK}, (None, "a")),
        ("p d a", REQUIRES | {"bypass_uncached_tokens": 9 * BLOCK}, (None, "a")),
        ("p d a", REQUIRES | {"bypass_uncached_tokens": 1}, ("p", "d")),
        ("p d a", {"bypass_uncached_tokens": 9 * BLOCK}, (None, "a")),
        ("p d a", {}, ("p", "d")),
    ],
)
async def test_query_that_requires_a_pair_or_bypasses_it_precedes_the_settings(
    kinds: str, asked: dict[str, Any], expected: tuple[str | None, str] | None
) -> None:
    made = {"p": prefill("p"), "d": decode("d"), "a": worker("a"), "alone": decode("alone", alone=True)}
    async with disagg() as cluster:
        await cluster.add(*(made[kind] for kind in kinds.split()))
        if expected is None:
            with raises_error(kind=ErrorKind.UNAVAILABLE, code="no_prefill_workers"):
                await cluster.ask(prompt("ABCD"), **asked)
        else:
            assert pair(await cluster.ask(prompt("ABCD"), **asked)) == expected


async def test_prompt_that_is_cached_to_its_end_bypasses_the_prefill_workers() -> None:
    async with disagg(bypass_uncached_tokens=BLOCK) as cluster:
        await cluster.add(prefill("p"), decode("d"), worker("a"))
        await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABCD"), BLOCK)))
        assert pair(await cluster.ask(prompt("ABCD"))) == (None, "a")


async def test_enforced_pair_holds_for_some_of_the_workers_too() -> None:
    async with disagg(wait_for_prefill=True, enforce=True, prefill_wait_s=0.0) as cluster:
        await cluster.add(decode("d1", alone=True), decode("d2", alone=True))
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="no_prefill_workers"):
            await cluster.ask(prompt("A"), candidates=frozenset({"d1"}))
        assert pair(await cluster.ask(prompt("A"), candidates=frozenset({"d1"}), role=Role.AGGREGATED)) == (None, "d1")


async def test_request_for_one_worker_alone_without_any_is_refused() -> None:
    async with disagg() as cluster:
        await cluster.add(prefill("p"), decode("d"))
        with raises_error(kind=ErrorKind.UNAVAILABLE, code="none_runs_alone"):
            await cluster.ask(prompt("A"), role=Role.AGGREGATED)
