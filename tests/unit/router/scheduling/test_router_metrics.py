"""What the router measures, read as a collector would."""

from __future__ import annotations

from services.common.hashing import block_hashes
from services.common.observability.instruments import read
from services.common.packing import pack_u64
from services.router.scheduling.decisions import Outcome
from services.router.workers.worker import KV_EVENTS, WorkerRank
from tests.support.servers.routing import BLOCK, Cluster, prompt, tokens, worker


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
        assert read("sluice_router_delivered_tokens") == {(): 0}
        await cluster.router.lifecycle.free([route.reservation_id], [Outcome(route.reservation_id, 24, 5)])
        await cluster.router.lifecycle.free([], [Outcome(route.reservation_id, 24, 5)])
        assert read("sluice_router_predicted_tokens") == {(): 4 * BLOCK}
        assert read("sluice_router_best_tokens") == {(): 4 * BLOCK}
        assert read("sluice_router_delivered_tokens") == {(): 24}, "told twice, counted once"


async def test_the_index_and_the_book_are_shown_by_model() -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a"), worker("b", model="other"))
        await cluster.cache("m", WorkerRank("a", 0), pack_u64(block_hashes(tokens("ABCD"), BLOCK)))
        await cluster.ask(prompt("XY"), request_id="r1")
        await cluster.router.loads("")
        assert read("sluice_router_index_blocks") == {("m",): 4, ("other",): 0}
        assert read("sluice_router_predictions") == {("m",): 1, ("other",): 0}
        assert read("sluice_router_booked_requests") == {("m",): 1, ("other",): 0}
        assert all(0 <= age < 60 for age in read("sluice_router_index_age_seconds").values())
        assert read("sluice_router_attached_workers") == {(): 2}
