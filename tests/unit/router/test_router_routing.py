"""The router without gRPC: the routing scenario known from elsewhere, policies, and what must never mix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.common.hashing import block_hashes
from services.common.packing import pack_u32, pack_u64
from services.router.attachment import Attachment
from services.router.cost import CostModel, Load, Offer
from services.router.events import BlockOp, EventBatch, Kind, Tier
from services.router.index import Overlap
from services.router.policies import Candidate, Demand, all_policies, shortlist
from services.router.queries import Prompt, Query, Route
from services.router.reservations import request_of, reservation_id
from services.router.router import Router, RouterConfig
from services.router.store.memory import MemoryStore
from services.router.workers import Role, Slot, Worker

BLOCK = 8
COST = CostModel()


def tokens(blocks: str) -> list[int]:
    """A letter is a block of its own tokens."""
    return [ord(letter) * 100 + at for letter in blocks for at in range(BLOCK)]


def prompt(blocks: str, lora: str = "", salt: str = "") -> Prompt:
    return Prompt(token_ids=pack_u32(tokens(blocks)), lora=lora, cache_salt=salt)


def worker(worker_id: str, model: str = "m", ranks: int = 1, role: Role = Role.AGGREGATED, size: int = BLOCK) -> Worker:
    return Worker(worker_id, f"{worker_id}:1", 1, model, role, size, "sluice-xxh3-v1", 1000, ranks, b"")


class Cluster:
    """A router and its workers; `run` routes a prompt and caches it where it went."""

    def __init__(self) -> None:
        self.router = Router(MemoryStore(random=Random(3)), RouterConfig(), Random(3))
        self.attachments: dict[tuple[str, str], Attachment] = {}
        self.sequences: dict[tuple[str, str, int], int] = {}
        self.requests = 0

    async def add(self, *workers: Worker) -> None:
        for each in workers:
            attachment, _ = await self.router.workforce.attach(each)
            self.attachments[each.model, each.worker_id] = attachment

    async def lose(self, attachment: Attachment) -> None:
        watch = self.router.registry.watch()
        known = len(await watch.next())
        self.router.workforce.detach(attachment)
        assert known
        await asyncio.wait_for(watch.next(), 10)

    async def cache(self, model: str, slot: Slot, hashes: bytes) -> None:
        key = (model, slot.worker_id, slot.rank)
        self.sequences[key] = sequence = self.sequences.get(key, 0) + 1
        batch = EventBatch(slot.rank, sequence, (BlockOp(Kind.STORED, Tier.DEVICE, hashes),))
        replies = await self.attachments[model, slot.worker_id].handle([batch])
        assert replies.acks == {slot.rank: sequence}

    async def run(self, blocks: str, only: str | None = None) -> Route:
        self.requests += 1
        candidates = frozenset({only}) if only else None
        query = Query("m", prompt(blocks), COST, f"r{self.requests}", candidates=candidates)
        route = await self.router.query(query)
        await self.cache("m", Slot(route.worker.worker_id, route.rank), pack_u64(block_hashes(tokens(blocks), BLOCK)))
        await self.router.free([route.reservation_id])
        return route

    async def ask(self, ref: Prompt, **more: Any) -> Route:
        return await self.router.query(replace(Query("m", ref, COST), **more))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    made.router.start()
    await asyncio.wait_for(made.router.ready.wait(), 10)
    yield made
    made.router.stop()
    await made.router.close()


async def test_the_known_routing_scenario(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b"))
    for blocks, forced in (("AB", "a"), ("ACD", "a"), ("ACE", "b")):
        await cluster.run(blocks, forced)
    longest = await cluster.run("ACDF")
    assert (longest.worker.worker_id, longest.overlap) == ("a", Overlap(3))
    tie = await cluster.run("ACG")
    assert (tie.worker.worker_id, tie.overlap, tie.best_overlap_blocks) == ("b", Overlap(2), 2)
    (view,) = cluster.router.indexes("m")
    assert (view.index.blocks(Slot("a", 0)), view.index.blocks(Slot("b", 0))) == (5, 4)


async def test_adapters_salts_and_models_never_mix(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("a", model="other"))
    hashes = block_hashes(tokens("ABC"), BLOCK, "lora", "salt")
    await cluster.cache("m", Slot("a", 0), pack_u64(hashes))
    assert (await cluster.ask(prompt("ABC", "lora", "salt"))).overlap == Overlap(3)
    for other in (prompt("ABC"), prompt("ABC", "lora"), prompt("ABC", salt="salt"), prompt("ABC", "salt", "lora")):
        assert (await cluster.ask(other)).overlap == Overlap()
    assert (await cluster.ask(prompt("ABC", "lora", "salt"), model="other")).overlap == Overlap()


async def test_ranks_are_chosen_one_by_one(cluster: Cluster) -> None:
    await cluster.add(worker("a", ranks=4))
    await cluster.cache("m", Slot("a", 2), pack_u64(block_hashes(tokens("ABC"), BLOCK)))
    assert (await cluster.ask(prompt("ABCD"))).rank == 2
    assert {(await cluster.ask(prompt("XYZ"), request_id=f"r{n}")).rank for n in range(4)} == {0, 1, 2, 3}


async def test_a_shared_prefix_stays_together_until_the_load_is_too_high(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b"))
    await cluster.cache("m", Slot("a", 0), pack_u64(block_hashes(tokens("ABCDEFGH"), BLOCK)))
    routes = [await cluster.ask(prompt(f"ABCDEFGH{n}"), request_id=f"r{n}") for n in range(9)]
    names = [route.worker.worker_id for route in routes]
    assert names[:3] == ["a", "a", "a"]
    assert "b" in names


async def test_only_workers_that_run_everything_are_chosen_alone_unnamed(cluster: Cluster) -> None:
    await cluster.add(worker("p", role=Role.PREFILL))
    with pytest.raises(SluiceError) as refused:
        await cluster.ask(prompt("A"))
    assert refused.value.code == "no_workers"
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
        with pytest.raises(SluiceError) as refused:
            await cluster.ask(prompt("A"), model=model)
        assert (refused.value.kind, refused.value.code) == (kind, code)


async def test_policy_direct_needs_exactly_one(cluster: Cluster) -> None:
    await cluster.add(worker("a"), worker("b"))
    with pytest.raises(SluiceError) as refused:
        await cluster.ask(prompt("A"), policy="direct")
    assert refused.value.kind is ErrorKind.INVALID_ARGUMENT
    assert (await cluster.ask(prompt("A"), policy="direct", candidates=frozenset({"b"}))).worker.worker_id == "b"


@pytest.mark.parametrize("model", ["tekken", "org/model", "a:b", "ü %"])
def test_reservation_ids_name_model_and_request(model: str) -> None:
    assert request_of(reservation_id(model, "chat:1/2")) == (model, "chat:1/2")


CANDIDATES = [Candidate(Slot(name, 0), Overlap(overlap, 2), 10) for name, overlap in (("a", 0), ("b", 5), ("c", 3))]


def test_offers_say_what_is_left_to_compute_and_to_book() -> None:
    policies = all_policies(Random(1))
    kv = policies["kv"](CANDIDATES, Demand(10, 4), COST)
    assert kv[1] == Offer(Slot("b", 0), 10 - 5 - 1.5, 5, 10, 3_500, 9_000)
    blind = policies["least_loaded"](CANDIDATES, Demand(10, 4), COST)
    assert blind[1] == Offer(Slot("b", 0), 10, 10, 0, 3_500, 9_000)
    assert len(policies["power_of_two"](CANDIDATES, Demand(10), COST)) == 2
    assert len(policies["power_of_two"](CANDIDATES[:1], Demand(10), COST)) == 1


def test_the_shortlist_keeps_the_cheapest() -> None:
    offers = [Offer(Slot(f"w{n}", 0), float(n), 0, 0, 0, 0) for n in range(100)]
    loads = {Slot("w0", 0): Load(prefill=1000)}
    kept = shortlist(offers, loads, 1.0, 10, Random(1))
    assert [offer.slot.worker_id for offer in kept] == [f"w{n}" for n in range(1, 11)]
    assert shortlist(offers[:5], loads, 1.0, 10, Random(1)) == offers[:5]
