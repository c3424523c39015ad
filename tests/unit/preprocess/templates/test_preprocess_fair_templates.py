"""Templates of clients take turns by origin: one that sends slow ones delays mostly itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError
from services.common.child_rpc.lane import Call
from services.preprocess.templates.child import job
from services.preprocess.templates.fair_calls import FairCalls
from services.preprocess.templates.processes import TemplateProcesses

SLOW = "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}" * 50
VARIABLES = job({"messages": []}, None)
LIMIT_S = 0.5


@pytest.fixture
async def processes() -> AsyncIterator[TemplateProcesses]:
    made = TemplateProcesses(1, LIMIT_S, 100_000, 256, loop=asyncio.get_running_loop())
    await made.of_client("{{ 1 }}", VARIABLES)  # the first start takes longer
    yield made
    await made.aclose()


async def test_full_queue_drops_a_call_of_the_busiest_origin(
    processes: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = processes._clients[0]
    monkeypatch.setattr(lane, "_waiting_budget", Budget("template_processes", 8, ""))
    hogs = [asyncio.create_task(processes.of_client(SLOW, VARIABLES, "hog")) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert await processes.of_client("{{ 1 + 1 }}", VARIABLES, "other") == ("2", ())
    errors = [hog.exception() for hog in hogs if hog.done()]
    assert ErrorKind.OVERLOADED in {error.kind for error in errors if isinstance(error, SluiceError)}
    for hog in hogs:
        hog.cancel()
    await asyncio.gather(*hogs, return_exceptions=True)


@given(
    costs=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.001, 2.0, allow_nan=False)), min_size=1, max_size=60)
)
def test_origins_with_waiting_calls_use_the_same_time_up_to_one_call(costs: list[tuple[str, float]]) -> None:
    loop = asyncio.new_event_loop()
    calls, seconds = FairCalls(), {}
    try:
        for origin, cost in costs:
            waiting: Call[Any] = Call(b"", loop.create_future(), origin=origin)
            calls.append(waiting)
            seconds[waiting] = cost
        used: Counter[str] = Counter()
        longest = max(seconds.values())
        order: dict[str, list[float]] = {origin: [] for origin, _ in costs}
        while calls:
            backlogged = {waiting.origin for waiting in calls}
            served = calls.popleft()
            used[served.origin] += seconds[served]  # type: ignore[assignment]
            order[served.origin].append(seconds[served])
            calls.charge(served, seconds[served])
            for origin in backlogged & {waiting.origin for waiting in calls}:
                assert used[served.origin] - used[origin] <= longest + 1e-9
        assert order == {origin: [cost for name, cost in costs if name == origin] for origin in order}
    finally:
        loop.close()


def test_origin_that_returns_has_not_saved_up_time() -> None:
    loop = asyncio.new_event_loop()
    try:
        calls = FairCalls()
        for origin in ["a"] * 10:
            calls.append(Call(b"", loop.create_future(), origin=origin))
            calls.charge(calls.popleft(), 1.0)
        for origin in [*"aaa", *"bbb"]:
            calls.append(Call(b"", loop.create_future(), origin=origin))
        order = ""
        while calls:
            served = calls.popleft()
            calls.charge(served, 1.0)
            order += served.origin
        assert order in ("bababa", "baabab", "babaab", "baabba")
    finally:
        loop.close()
