"""Routers whose Redis moves under load: no request fails, and every running request has exactly one reservation."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.support.clients.reservation_load import ReservationLoad, attach_workers
from tests.support.servers.moving_redis import TOPOLOGIES
from tests.support.servers.router_cluster import MODEL, routers
from tests.support.waiting import until

TAG = f"{{sluice:{MODEL}}}"
MAX_BACK_S = 10.0


@pytest.mark.parametrize(
    ("topology", "fault"),
    [
        ("cluster", "killed"),
        pytest.param("cluster", "resharded", marks=pytest.mark.slow),
        pytest.param("cluster", "frozen", marks=pytest.mark.slow),
        pytest.param("cluster", "renewed", marks=pytest.mark.slow),
        pytest.param("sentinel", "frozen", marks=pytest.mark.slow),
        pytest.param("single", "frozen", marks=pytest.mark.slow),
    ],
)
async def test_routers_whose_redis_moves_lose_no_request_and_no_reservation(
    topology: str, fault: str, tmp_path: Path
) -> None:
    async with (
        TOPOLOGIES[topology](tmp_path, TAG) as place,
        routers(2, redis_url=place.url, drain_s=5) as replicas,
    ):
        for replica in replicas:
            await replica.ready()
        workers = await attach_workers(replicas)
        load = ReservationLoad(replicas, TAG)
        running = asyncio.create_task(load.run())
        await until(lambda: load.whole_after(0) is not None, timeout_s=30)
        elected = await place.fault(fault)
        await until(lambda: load.whole_after(elected) is not None, timeout_s=60)
        back_at = load.whole_after(elected)
        await place.heal()
        healed = time.monotonic()
        await until(lambda: load.whole_after(healed) is not None, timeout_s=60)
        load.stop()
        await asyncio.wait_for(running, 60)
        found = await load.settled(lambda: place.master().port)
        for worker in workers:
            await worker.detach()
    assert load.failed == []
    assert found.none, found
    assert back_at is not None
    assert back_at - elected <= MAX_BACK_S
