"""What a fleet costs, from usage before, between and after: the part without requests is not the queries'."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from growth import DIMENSIONS, FULL, _costs, scales, verdict
from growth_place import Scale, Usage

from tests.support.repository import ROOT


def usage(at: float, redis: tuple[float, ...], routers: float, commands: int) -> Usage:
    return Usage(at, redis, routers, 0.0, commands, 10 * commands, 20 * commands)


def test_cost_of_a_query_leaves_out_what_the_fleet_costs_without_requests() -> None:
    running = cast(Any, SimpleNamespace(scale=Scale(routers=2), router_bytes=2**20, redis_bytes=2**21))
    marks = [usage(0, (1.0, 0.0), 5.0, 0), usage(10, (2.0, 0.5), 9.0, 100), usage(20, (4.0, 1.0), 15.0, 1_200)]
    row = _costs(running, marks, 1_000)
    # 0.1 and 0.4 of a core without requests; 1 and 2 seconds more than that with 1,000 queries.
    assert row["idle_cores"] == pytest.approx({"Redis": 0.1, "a router": 0.2})
    assert row["query_us"]["Redis"] == pytest.approx(1_000)
    assert row["query_us"]["routers"] == pytest.approx(2_000)
    assert row["query_commands"] == pytest.approx(1.0)
    assert row["query_bytes"] == pytest.approx({"to Redis": 10, "from Redis": 20})
    assert row["saturates_per_s"] == pytest.approx({"Redis": 900, "routers": 800})
    assert verdict(row).startswith("routers saturates first, at 800 queries a second, below")


def test_every_dimension_grows_alone_up_to_the_whole_fleet() -> None:
    for dimension, values in DIMENSIONS.items():
        grown = [scale for _, scale in scales([dimension])]
        assert [getattr(scale, dimension) for scale in grown] == list(values)
        rest = {tuple(getattr(scale, other) for other in DIMENSIONS if other != dimension) for scale in grown}
        assert len(rest) == 1
    assert [scale for _, scale in scales(["full"])] == [FULL]


def test_unknown_dimension_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "benchmarks/growth.py", "--dimension", "wrokers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Unknown dimension wrokers; choose from workers, routers" in done.stderr
