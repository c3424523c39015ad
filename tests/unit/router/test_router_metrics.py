"""What the router measures, read as a collector would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from services.common import telemetry
from services.common.hashing import block_hashes
from services.common.packing import pack_u64
from services.router.decisions import Outcome
from services.router.workers import KV_EVENTS, Slot
from tests.support.routing import BLOCK, Cluster, prompt, tokens, worker

Read = Callable[[str], dict[tuple[Any, ...], Any]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(telemetry, "meter", lambda service: provider.get_meter(service))

    def values(name: str) -> dict[tuple[Any, ...], Any]:
        """Value of a counter or gauge, count of a histogram, by the values of its attributes."""
        data = reader.get_metrics_data()
        assert data is not None
        found = {}
        for resource in data.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points if metric.name == name else ():
                        key = tuple(value for _, value in sorted((point.attributes or {}).items()))
                        found[key] = getattr(point, "value", getattr(point, "count", None))
        return found

    return values


async def test_decisions_and_their_outcomes_are_measured(read: Read) -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a", capabilities=(KV_EVENTS,)))
        await cluster.cache("m", Slot("a", 0), pack_u64(block_hashes(tokens("ABCD"), BLOCK)))
        route = await cluster.ask(prompt("ABCDE"), request_id="r1")
        await cluster.ask(prompt("ABCDE"), request_id="r1")
        await cluster.ask(prompt("ABX"), policy="random")
        assert read("sluice_router_queries") == {("", "kv"): 2, ("", "random"): 1}
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
        await cluster.router.followups.free([route.reservation_id], [Outcome(route.reservation_id, 24, 5)])
        await cluster.router.followups.free([], [Outcome(route.reservation_id, 24, 5)])
        assert read("sluice_router_predicted_tokens") == {(): 4 * BLOCK}
        assert read("sluice_router_best_tokens") == {(): 4 * BLOCK}
        assert read("sluice_router_delivered_tokens") == {(): 24}, "told twice, counted once"


async def test_the_index_and_the_book_are_shown_by_model(read: Read) -> None:
    async with Cluster() as cluster:
        await cluster.add(worker("a"), worker("b", model="other"))
        await cluster.cache("m", Slot("a", 0), pack_u64(block_hashes(tokens("ABCD"), BLOCK)))
        await cluster.ask(prompt("XY"), request_id="r1")
        await cluster.router.loads("")
        assert read("sluice_router_index_blocks") == {("m",): 4, ("other",): 0}
        assert read("sluice_router_predictions") == {("m",): 1, ("other",): 0}
        assert read("sluice_router_booked_requests") == {("m",): 1, ("other",): 0}
        assert all(0 <= age < 60 for age in read("sluice_router_index_age_seconds").values())
        assert read("sluice_router_attached_workers") == {(): 2}
