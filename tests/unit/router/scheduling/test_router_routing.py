"""Routing without gRPC: a known scenario, policies, metrics."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from random import Random
from typing import get_args

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.base.packing import pack_u64
from services.common.observability.instruments import read
from services.common.types.hashing import block_hashes
from services.router.router import Router
from services.router.scheduling.decisions import Outcome
from services.router.scheduling.policies.built_in import all_policies
from services.router.scheduling.policies.offers import Demand, shortlist
from services.router.scheduling.policies.registry import PolicyRegistry
from services.router.settings import PolicyName
from services.router.state.kv_index.index import Overlap
from services.router.state.reservations.cost import Load, Offer
from services.router.state.reservations.ids import prefill_halves, prefill_id, request_of, reservation_id
from services.router.state.reservations.table import ReservationParams, ReservedRank
from services.router.state.store.memory import MemoryStore
from services.router.state.workers.worker import KV_EVENTS, Role, WorkerRank
from tests.support.oracles.errors import raises_error
from tests.support.repository import ROOT
from tests.support.servers.routing import BLOCK, COST, Cluster, prompt, tokens, worker


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as made:
        yield made


async def test_the_known_routing_scenario(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b"))
    for blocks, forced in (("AB", "a"), ("ACD", "a"), ("ACE", "b")):
        await cluster.run(blocks, forced)
    longest = await cluster.run("ACDF")
    assert (longest.worker.worker_id, longest.overlap) == ("a", Overlap(3))
    tie = await cluster.run("ACG")
    assert (tie.worker.worker_id, tie.overlap, tie.best_overlap_blocks) == ("b", Overlap(2), 2)
    (view,) = cluster.router.indexes("m")
    assert (view.index.blocks(WorkerRank("a", 0)), view.index.blocks(WorkerRank("b", 0))) == (5, 4)


class Leaving(MemoryStore):
    """The chosen worker is gone when the answer comes, so many times."""

    router: Router
    times = 3

    async def select(self, model: str, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        choice = await super().select(model, offers, terms)
        if self.times:
            self.times -= 1
            self.router.registry.down(model, choice.slot.worker_id, 1)
        return choice


async def test_nothing_stays_booked_on_workers_that_go_while_they_are_chosen() -> None:
    store = Leaving(random=Random(1))
    async with Cluster(store=store) as cluster:
        store.router = cluster.router
        await cluster.add(worker("a"), worker("b"))
        with pytest.raises(SluiceError, match="was removed"):
            await cluster.ask(prompt("ABC"), request_id="r")
    assert (await store.pulse("m")).loads == {}


async def test_worker_that_is_left_is_chosen_after_one_that_goes_while_it_is_chosen() -> None:
    store = Leaving(random=Random(1))
    store.times = 1
    async with Cluster(store=store) as cluster:
        store.router = cluster.router
        await cluster.add(worker("a"), worker("b"))
        await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABC"), BLOCK)))
        assert (await cluster.ask(prompt("ABC"), request_id="r")).worker.worker_id == "b"
        assert [slot.worker_id for slot in (await store.pulse("m")).loads] == ["b"]


async def test_adapters_salts_and_models_never_mix(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b", model="other"))
    hashes = block_hashes(tokens("ABC"), BLOCK, "lora", "salt")
    await cluster.cache("m", WorkerRank("a", 0), pack_u64(hashes))
    assert (await cluster.ask(prompt("ABC", "lora", "salt"))).overlap == Overlap(3)
    for other in (prompt("ABC"), prompt("ABC", "lora"), prompt("ABC", salt="salt"), prompt("ABC", "salt", "lora")):
        assert (await cluster.ask(other)).overlap == Overlap()
    assert (await cluster.ask(prompt("ABC", "lora", "salt"), model="other")).overlap == Overlap()


async def test_ranks_are_chosen_one_by_one(cluster: Cluster) -> None:
    await cluster.add(worker("a", ranks=4))
    await cluster.cache("m", WorkerRank("a", 2), pack_u64(block_hashes(tokens("ABC"), BLOCK)))
    assert (await cluster.ask(prompt("ABCD"))).rank == 2
    others = [prompt(f"XY{n}"[::-1]) for n in range(4)]
    assert {(await cluster.ask(each, request_id=f"r{n}")).rank for n, each in enumerate(others)} == {0, 1, 2, 3}


async def test_a_shared_prefix_stays_together_until_the_load_is_too_high(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b"))
    await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABCDEFGH"), BLOCK)))
    routes = [await cluster.ask(prompt(f"ABCDEFGH{n}"), request_id=f"r{n}") for n in range(9)]
    names = [route.worker.worker_id for route in routes]
    assert names[:3] == ["a", "a", "a"]
    assert "b" in names


async def test_only_workers_that_run_everything_are_chosen_alone_unnamed(cluster: Cluster) -> None:
    await cluster.add(worker("p", role=Role.PREFILL))
    with raises_error(code="no_workers"):
        await cluster.ask(prompt("A"))
    assert (await cluster.ask(prompt("A"), candidates=frozenset({"p"}))).worker.worker_id == "p"


async def test_a_model_without_blocks_is_routed_by_load(cluster: Cluster) -> None:
    await cluster.add(worker("a", size=0), worker("b", size=0))
    first = await cluster.ask(prompt("ABCD"), request_id="r1")
    second = await cluster.ask(prompt("ABCD"), request_id="r2")
    assert {first.worker.worker_id, second.worker.worker_id} == {"a", "b"}
    assert (first.degraded, first.tokens_to_compute) == ("", 32)


async def test_a_reservation_on_a_worker_that_left_and_went_is_made_anew(cluster: Cluster) -> None:
    await cluster.add(worker("a"))
    await cluster.ask(prompt("AB"), request_id="r")
    leaving = cluster.attachments["m", "a"]
    leaving.left = True
    await cluster.lose(leaving)
    await cluster.add(worker("b"))
    assert (await cluster.ask(prompt("AB"), request_id="r")).worker.worker_id == "b"


async def test_a_known_model_without_workers_is_unavailable_and_an_unknown_one_not_found(cluster: Cluster) -> None:
    await cluster.add(worker("a"))
    await cluster.lose(cluster.attachments["m", "a"])
    for model, kind, code in (
        ("m", ErrorKind.UNAVAILABLE, "no_workers"),
        ("x", ErrorKind.NOT_FOUND, "model_not_found"),
    ):
        with raises_error(kind=kind, code=code):
            await cluster.ask(prompt("A"), model=model)


async def test_policy_direct_needs_exactly_one(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b"))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        await cluster.ask(prompt("A"), policy="direct")
    assert (await cluster.ask(prompt("A"), policy="direct", candidates=frozenset({"b"}))).worker.worker_id == "b"


async def test_policy_direct_with_a_worker_of_two_ranks_is_refused(cluster: Cluster) -> None:
    await cluster.add(worker("a", ranks=2), worker("b"))
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="candidates"):
        await cluster.ask(prompt("A"), policy="direct", candidates=frozenset({"a"}))


@pytest.mark.parametrize("model", ["tekken", "org/model", "a:b", "ü %"])
def test_reservation_ids_name_model_and_request(model: str) -> None:
    assert request_of(reservation_id(model, "chat:1/2")) == (model, "chat:1/2")


def test_pair_id_marks_a_pair_of_the_same_request() -> None:
    alone, pair = reservation_id("a+", "r"), reservation_id("a+", "r", paired=True)
    assert alone != pair
    assert request_of(alone) == request_of(pair) == ("a+", "r")
    assert prefill_halves([alone, pair]) == {"a+": [prefill_id("r")]}


SLOTS = [WorkerRank(name, 0) for name in "abc"]


def test_turns_of_models_and_parts_are_not_mixed() -> None:
    shelf = PolicyRegistry(Random(1))
    asked = [("m", "whole"), ("other", "whole"), ("m", "prefill")] * 2
    turns = [shelf.get("round_robin", *one).offered(SLOTS)[0].worker_id for one in asked]
    assert turns == ["a", "a", "a", "b", "b", "b"]


def test_offers_contain_the_remaining_prefill_and_blocks() -> None:
    policies = all_policies(Random(1))
    facts = (SLOTS[1], Overlap(5, 2), 10, Demand(10, 4), COST)
    assert policies["kv"].make_offer(*facts) == Offer(SLOTS[1], 10 - 5 - 1.5, 5, 10, 3_500, 9_000)
    assert policies["least_loaded"].make_offer(*facts) == Offer(SLOTS[1], 10, 10, 0, 3_500, 9_000)
    assert len(policies["power_of_two"].offered(SLOTS)) == 2
    assert len(policies["power_of_two"].offered(SLOTS[:1])) == 1


def test_the_shortlist_keeps_the_cheapest() -> None:
    offers = [Offer(WorkerRank(f"w{n}", 0), float(n), 0, 0, 0, 0) for n in range(100)]
    loads = {WorkerRank("w0", 0): Load(prefill=1000)}
    kept = shortlist(offers, loads, 1.0, 10, Random(1))
    assert [offer.slot.worker_id for offer in kept] == [f"w{n}" for n in range(1, 11)]
    assert shortlist(offers[:5], loads, 1.0, 10, Random(1)) == offers[:5]


PAGE = ROOT / "docs/router.md"
ROW = re.compile(r"^\| `(\w+)`[^|]*\|[^|]*\|[^|]*\| (yes|no)\b", re.MULTILINE)


def test_policies_page_lists_every_policy_and_where_it_is_accepted() -> None:
    section = PAGE.read_text().partition("## Policies")[2].partition("\n## ")[0]
    listed = dict(ROW.findall(section))
    assert listed.keys() == all_policies(Random()).keys()
    assert {name for name, setting in listed.items() if setting == "yes"} == set(get_args(PolicyName))


async def test_decisions_and_their_outcomes_are_measured() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a", capabilities=(KV_EVENTS,)))
        await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABCD"), BLOCK)))
        route = await cluster.ask(prompt("ABCDE"), request_id="r1")
        await cluster.ask(prompt("ABCDE"), request_id="r1")
        await cluster.ask(prompt("ABX"), policy="random")
        assert read("sluice_router_queries") == {("kv", ""): 2, ("random", ""): 1}
        assert read("sluice_router_query_seconds") == {(): 3}
        assert read("sluice_router_stage_seconds") == {
            ("hash",): 3,
            ("prepare",): 3,
            ("match",): 3,
            ("choose",): 3,
        }
        assert read("sluice_router_reservations") == {(): 1}
        assert (read("sluice_router_prompt_blocks"), read("sluice_router_overlap_blocks")) == ({(): 13}, {(): 10})
        assert read("sluice_router_delivered_tokens") == {}
        await cluster.router.lifecycle.free([route.reservation_id], [Outcome(route.reservation_id, 24, 5)])
        await cluster.router.lifecycle.free([], [Outcome(route.reservation_id, 24, 5)])
        assert read("sluice_router_predicted_tokens") == {("m",): 4 * BLOCK}
        assert read("sluice_router_best_tokens") == {("m",): 4 * BLOCK}
        assert read("sluice_router_delivered_tokens") == {("m",): 24}, "told twice, counted once"


async def test_the_index_and_the_book_are_shown_by_model() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a"), worker("b", model="other"))
        await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABCD"), BLOCK)))
        await cluster.ask(prompt("XY"), request_id="r1")
        await cluster.router.loads("")
        assert read("sluice_router_index_blocks") == {("m",): 4, ("other",): 0}
        assert read("sluice_router_predictions") == {("m",): 1, ("other",): 0}
        assert read("sluice_router_reserved_requests") == {("m",): 1, ("other",): 0}
        assert all(0 <= age < 60 for age in read("sluice_router_index_age_seconds").values())
        assert read("sluice_router_attached_workers") == {(): 2}
