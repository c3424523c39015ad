"""The admission gate, and the local limits that replace unreachable shared ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import cast

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.common.base import budgets
from services.common.base.errors import ErrorKind, SluiceError, overloaded
from services.common.base.tasks import TaskOwner
from services.gateway.admission import fallback_limiter as steady_limits
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.fallback_limiter import LOCAL, FallbackLimiter
from services.gateway.admission.gate import Gate
from services.gateway.admission.keys import ANONYMOUS, ApiKey, KeyFile, create, write
from services.gateway.admission.limits import LimitDecision, LimitsUnavailable
from services.gateway.admission.local_limiter import LocalLimiter
from services.gateway.admission.permit import OPEN, Permit
from services.gateway.admission.redis_limiter import RedisLimiter
from services.gateway.core.context import current
from services.gateway.http.errors import error_response
from services.gateway.http.middleware.admission import AdmissionMiddleware
from tests.support.fakes.clock import Clock
from tests.support.oracles.errors import raises_error

KEY = ApiKey("0" * 12, "k", "", requests_per_minute=100, tokens_per_minute=1000, concurrency=2, models=("m",))


@dataclass
class Generated:
    prompt_tokens: int
    generated_tokens: int


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def make(line: FairQueue | None = None) -> tuple[Gate, LocalLimiter, TaskOwner]:
    limiter, tasks = LocalLimiter(Clock()), TaskOwner()
    return Gate(None, limiter, line or FairQueue(10, 10, 60), tasks), limiter, tasks


async def settled(tasks: TaskOwner) -> None:
    while tasks.alive:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def left(limiter: LocalLimiter) -> int:
    return (await limiter.charge(KEY, "", 0)).tokens.remaining


async def test_unused_tokens_are_refunded() -> None:
    gate, limiter, tasks = make()
    permit = await gate.enter(KEY, 1.0, inf, never)
    await permit.charge(400)
    assert await left(limiter) == 600
    permit.watch(Generated(100, 50))
    gate.leave(permit)
    await settled(tasks)
    assert await left(limiter) == 850
    assert limiter.live(KEY) == 0


async def test_tokens_above_the_charge_become_a_debt() -> None:
    gate, _, tasks = make()
    permit = await gate.enter(KEY, 1.0, inf, never)
    await permit.charge(100)
    permit.watch(Generated(100, 1900))
    permit.spent(1000)
    gate.leave(permit)
    await settled(tasks)
    with raises_error(http_status=429) as refused:
        await gate.enter(KEY, 1.0, inf, never)
    assert refused.value.retry_after_ms == pytest.approx(2001 * 60, abs=100)


async def test_more_tokens_than_are_left() -> None:
    gate, limiter, tasks = make()
    permit = await gate.enter(KEY, 1.0, inf, never)
    await permit.charge(900)
    with pytest.raises(SluiceError, match="1000 tokens per minute"):
        await permit.charge(200)
    with pytest.raises(SluiceError, match="shorten the prompt"):
        await permit.charge(1001)
    gate.leave(permit)
    await settled(tasks)
    assert await left(limiter) == 1000


async def test_concurrency_is_bounded_and_given_back() -> None:
    gate, limiter, tasks = make()
    inside = [await gate.enter(KEY, 1.0, inf, never) for _ in range(2)]
    with pytest.raises(SluiceError, match="2 concurrent requests"):
        await gate.enter(KEY, 1.0, inf, never)
    gate.leave(inside[0])
    await settled(tasks)
    gate.leave(await gate.enter(KEY, 1.0, inf, never))
    gate.leave(inside[1])
    await settled(tasks)
    assert limiter.live(KEY) == 0


async def test_overloaded_errors_have_status_503_and_exceeded_limits_of_keys_429() -> None:
    gate, _, _ = make(FairQueue(1, 0, 60))
    free, single = replace(KEY, concurrency=0), replace(KEY, concurrency=1)
    await gate.enter(single, 1.0, inf, never)
    refused = [overloaded("Too many requests.")]
    for attempt in (gate.enter(free, 1.0, inf, never), gate.enter(single, 1.0, inf, never)):
        with pytest.raises(SluiceError) as caught:
            await attempt
        refused.append(caught.value)
    assert [(error.code, error.http_status) for error in refused] == [
        ("overloaded", 503),
        ("overloaded", 503),
        ("rate_limit_exceeded", 429),
    ]
    assert {error.kind for error in refused} == {ErrorKind.OVERLOADED}
    assert [error_response(error).headers["retry-after"] for error in refused] == ["1", "1", "1"]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("authorization", "Bearer "), ("authorization", "bearer "), ("authorization", " BEARER  "), ("x-api-key", "")],
)
async def test_a_key_has_the_same_owner_however_it_is_sent(tmp_path: Path, name: str, scheme: str) -> None:
    text, record = create("one")
    write(tmp_path / "keys.json", [record])
    gate = Gate(KeyFile(tmp_path / "keys.json"), LocalLimiter(), FairQueue(1, 1, 1), TaskOwner())
    owners: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        owners.append(current().permit.owner)
        await Response()(scope, receive, send)

    transport = httpx.ASGITransport(AdmissionMiddleware(app, gate))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for method in ("GET", "POST"):
            await http.request(method, "/v1/responses", headers={name: scheme + text})
        assert (await http.get("/v1/responses", headers={name: "Basic " + text})).status_code == 401
    assert owners == [record.id] * 2


async def test_request_refused_by_the_queue_releases_its_limits() -> None:
    gate, limiter, tasks = make(FairQueue(1, 0, 60))
    permit = await gate.enter(KEY, 1.0, inf, never)
    with pytest.raises(SluiceError, match="queue is full"):
        await gate.enter(KEY, 1.0, inf, never)
    await settled(tasks)
    assert limiter.live(KEY) == 1
    gate.leave(permit)
    await settled(tasks)
    assert (limiter.live(KEY), gate.queue.running) == (0, 0)


async def test_a_client_that_goes_away_in_line_leaves_it() -> None:
    gate, limiter, tasks = make(FairQueue(1, 5, 60))
    permit = await gate.enter(KEY, 1.0, inf, never)
    left_now = asyncio.Event()

    async def gone() -> None:
        await left_now.wait()

    waiting = asyncio.create_task(gate.enter(KEY, 1.0, inf, gone))
    while not gate.queue.waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    left_now.set()
    with pytest.raises(SluiceError, match="disconnected"):
        await waiting
    gate.leave(permit)
    await settled(tasks)
    assert (gate.queue.running, gate.queue.waiting, limiter.live(KEY)) == (0, 0, 0)


async def test_the_task_in_line_can_be_cancelled_at_any_moment() -> None:
    for moments in range(12):
        gate, limiter, tasks = make(FairQueue(1, 5, 60))
        permit = await gate.enter(KEY, 1.0, inf, never)
        waiting = asyncio.create_task(gate.enter(KEY, 1.0, inf, never))
        for moment in range(12):
            if moment == 6:
                gate.leave(permit)
            if moment == moments:
                waiting.cancel()
            await asyncio.sleep(0)
        entered = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if not isinstance(entered, BaseException):
            gate.leave(entered)
        await settled(tasks)
        assert (gate.queue.running, gate.queue.waiting, limiter.live(KEY)) == (0, 0, 0), moments


def test_gate_without_a_key_file_requires_no_key(tmp_path: Path) -> None:
    gate, _, _ = (Gate(None, LocalLimiter(), FairQueue(1, 1, 1), TaskOwner()), None, None)
    assert gate.authenticate(None) is ANONYMOUS
    shown, record = create("one")
    write(tmp_path / "keys.json", [record])
    guarded = Gate(KeyFile(tmp_path / "keys.json"), LocalLimiter(), FairQueue(1, 1, 1), TaskOwner())
    assert guarded.authenticate(shown) == record
    for wrong in (None, "", "x", shown + "x"):
        with raises_error(http_status=401):
            guarded.authenticate(wrong)


async def test_models_a_key_may_not_use() -> None:
    gate, _, tasks = make()
    permit = await gate.enter(KEY, 1.0, inf, never)
    permit.check_model("m")
    with raises_error(http_status=403, param="model"):
        permit.check_model("other")
    gate.leave(permit)
    await settled(tasks)


async def test_without_limits_nothing_is_counted() -> None:
    gate, _, tasks = make()
    free = replace(KEY, requests_per_minute=0, tokens_per_minute=0, concurrency=0)
    permit = await gate.enter(free, 1.0, inf, never)
    await permit.charge(10**9)
    assert permit.decision is None
    gate.leave(permit)
    assert tasks.alive == 0
    assert current().permit is OPEN


LIMITED_KEY = replace(ApiKey("0" * 12, "k", ""), concurrency=1, tokens_per_minute=1000)


class Flaky(LocalLimiter):
    """Shared limits; while `lost` names a step, that step is taken and its answer is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = ""
        self.away = False
        self.settled: list[str] = []

    def _answer(self, step: str) -> None:
        if step == self.lost:
            raise LimitsUnavailable("timeout")

    def _reached(self) -> None:
        if self.away:
            raise LimitsUnavailable("away")

    async def enter(self, key: ApiKey, request_id: str) -> LimitDecision:
        self._reached()
        decision = await super().enter(key, request_id)
        self._answer("enter")
        return decision

    async def charge(self, key: ApiKey, request_id: str, tokens: int) -> LimitDecision:
        self._reached()
        decision = await super().charge(key, request_id, tokens)
        self._answer("charge")
        return decision

    async def settle(self, key: ApiKey, request_id: str, give_back: int) -> None:
        self._reached()
        self.settled.append(request_id)
        await super().settle(key, request_id, give_back)
        self._answer("settle")


def made() -> tuple[FallbackLimiter, Flaky]:
    shared = Flaky()
    return FallbackLimiter(cast(RedisLimiter, shared)), shared


async def ask(steady: FallbackLimiter, name: str) -> bool:
    """One request after the other; whether it was let in."""
    if (await steady.enter(LIMITED_KEY, name)).refused_by is not None:
        return False
    await steady.charge(LIMITED_KEY, name, 10)
    await steady.settle(LIMITED_KEY, name, 5)
    return True


@pytest.mark.parametrize("lost", ["enter", "charge", "settle"])
async def test_one_answer_that_is_lost_costs_the_next_request_nothing(lost: str) -> None:
    steady, shared = made()
    shared.lost = lost
    assert await ask(steady, "a")
    assert steady.degraded == LOCAL
    shared.lost = ""
    assert [await ask(steady, name) for name in "bcd"] == [True] * 3
    assert steady.degraded == ""
    assert shared.live(LIMITED_KEY) == 0


async def test_a_request_that_ends_while_the_limits_are_away_gives_its_place_up_later() -> None:
    steady, shared = made()
    await steady.enter(LIMITED_KEY, "a")
    shared.away = True
    await steady.charge(LIMITED_KEY, "a", 10)
    await steady.settle(LIMITED_KEY, "a", 5)
    assert await ask(steady, "b"), "counted here"
    shared.away = False
    assert await ask(steady, "c")
    assert shared.live(LIMITED_KEY) == 0


async def test_places_that_are_gone_by_time_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steady, shared = made()
    monkeypatch.setattr(steady_limits, "LEASE_S", 0.0)
    shared.lost = "charge"
    await steady.enter(LIMITED_KEY, "a")
    await steady.charge(LIMITED_KEY, "a", 10)
    shared.lost = ""
    await steady.enter(LIMITED_KEY, "b")
    assert shared.settled == []


def keyed(tmp_path: Path, *tenants: str, running: int = 8, max_per_tenant: int = 0) -> tuple[Gate, list[ApiKey]]:
    """Returns a gate, whose queue has no room, and a key of each tenant."""
    keys = [create(f"key {number}", tenant=tenant)[1] for number, tenant in enumerate(tenants)]
    write(tmp_path / "keys.json", keys)
    queue = FairQueue(running, 0, 60)
    file = KeyFile(tmp_path / "keys.json")
    return Gate(file, LocalLimiter(), queue, TaskOwner(), max_per_tenant=max_per_tenant), keys


async def fill(gate: Gate, key: ApiKey) -> tuple[list[Permit], SluiceError]:
    """Returns the permits that a key gets until one is refused, and the refusal."""
    permits = []
    while True:
        try:
            permits.append(await gate.enter(key, 1.0, inf, never))
        except SluiceError as error:
            return permits, error


@pytest.mark.parametrize(
    ("tenants", "max_per_tenant", "running"),
    [
        (["a"], 0, 8),
        (["a", "a"], 0, 8),
        (["a", "b"], 0, 6),
        (["a", "b", "c"], 2, 2),
        (["a"], 2, 2),
        (["a", "b"], 99, 8),
    ],
)
async def test_running_requests_of_a_tenant_are_bounded_where_there_are_several(
    tmp_path: Path, tenants: str, max_per_tenant: int, running: int
) -> None:
    gate, keys = keyed(tmp_path, *tenants, max_per_tenant=max_per_tenant)
    permits, error = await fill(gate, keys[0])
    assert len(permits) == running
    is_full = running == 8
    assert (error.http_status, error.code) == ((503, "overloaded") if is_full else (429, "rate_limit_exceeded"))
    assert is_full or error.message == (
        f"The running requests of this tenant exceed the limit of {running} (the server's --max-requests-per-tenant)."
    )
    gate.leave(permits.pop())
    permits.append(await gate.enter(keys[0], 1.0, inf, never))
    for permit in permits:
        gate.leave(permit)
    assert gate.queue.running == 0


async def test_tenant_with_all_the_requests_it_may_run_leaves_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    monkeypatch.setattr(budgets, "on_refused", refused.append)
    gate, (first, sibling, other) = keyed(tmp_path, "a", "a", "b", max_per_tenant=5)
    permits, _ = await fill(gate, first)
    with raises_error(http_status=429, code="rate_limit_exceeded"):
        await gate.enter(sibling, 1.0, inf, never)
    with raises_error(http_status=429, code="rate_limit_exceeded"):
        await gate.enter_in_background(sibling)
    assert refused == ["running_requests"] * 3
    assert gate.queue.running == len(permits) == 5
    gate.leave(await gate.enter(other, 1.0, inf, never))


async def test_queued_request_whose_tenant_filled_up_meanwhile_leaves_the_gateway(tmp_path: Path) -> None:
    gate, (first, other) = keyed(tmp_path, "a", "b", running=4)
    gate.queue._max_waiting = 4
    permits = [await gate.enter(first, 1.0, inf, never) for _ in range(2)]
    others = [await gate.enter(other, 1.0, inf, never) for _ in range(2)]
    waiting = [asyncio.create_task(gate.enter(first, 1.0, inf, never)) for _ in range(2)]
    while gate.queue.waiting < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for permit in others:
        gate.leave(permit)
    results = await asyncio.gather(*waiting, return_exceptions=True)
    permits += [result for result in results if isinstance(result, Permit)]
    assert [error.http_status for error in results if isinstance(error, SluiceError)] == [429]
    assert gate.queue.running == len(permits) == 3
    for permit in permits:
        gate.leave(permit)
    assert gate.queue.running == 0
