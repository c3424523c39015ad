"""What fails, too, is gone when it is over: an error and the call that raised it do not hold each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from services.common.base.errors import SluiceError, unavailable
from services.common.rpc import multiplexed_call as call_stream
from services.common.rpc import replicas
from services.common.rpc.concurrency_limiter import ConcurrencyLimiter
from services.common.rpc.multiplexed_call import MultiplexedCall
from services.common.rpc.replicas import Replica, ReplicaSet
from services.gateway.admission.fair_queue import FairQueue
from services.gateway.admission.keys import ANONYMOUS, ApiKey
from services.gateway.backends.workers.embeddings import all_or_none
from services.gateway.http.inline_sender import InlineSender
from services.gateway.operations.waiting import result_unless_gone
from tests.support.oracles.circles import circles_of
from tests.unit.gateway.admission.test_gateway_admission_gate import make, never

TIMES = 20


async def forgiven(job: Callable[[], Any]) -> None:
    """The error is heard and let go."""
    with suppress(SluiceError, grpc.aio.AioRpcError):
        await job()


async def none_of(job: Callable[[], Any]) -> None:
    found = await circles_of(lambda: forgiven(job), TIMES)
    assert found.total() < TIMES, found


async def leave() -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("waiting", "timeout_s", "gone"),
    [
        pytest.param(0, 60, never, id="full queue"),
        pytest.param(10, 0.001, never, id="timeout"),
        pytest.param(10, 60, leave, id="client gone"),
    ],
)
async def test_request_refused_by_the_queue_leaves_no_cycle(waiting: int, timeout_s: float, gone: Any) -> None:
    gate, _, _ = make(FairQueue(1, waiting, timeout_s))
    await gate.enter(ANONYMOUS, 1.0, inf, never)
    await none_of(lambda: gate.enter(ANONYMOUS, 1.0, inf, gone))


async def test_dropped_from_the_line_for_one_of_higher_right() -> None:
    line = FairQueue(1, 1, 60)
    await line.enter(ApiKey("0" * 12, "k", ""), 1.0)

    async def dropped() -> None:
        low = asyncio.create_task(line.enter(ApiKey("1" * 12, "low", ""), 1.0))
        await asyncio.sleep(0)
        high = asyncio.create_task(line.enter(ApiKey("2" * 12, "high", "", priority=5), 1.0))
        await asyncio.sleep(0)
        await asyncio.wait([low])
        assert isinstance(low.exception(), SluiceError)
        high.cancel()
        await asyncio.gather(high, return_exceptions=True)

    await none_of(dropped)


async def test_late_behind_a_turnstile() -> None:
    gate = ConcurrencyLimiter("service", 1, 0.001)
    await gate.enter()
    await none_of(gate.enter)


class Message:
    def ByteSize(self) -> int:
        return 1


@pytest.mark.parametrize("timeout_s", [0.001, 60.0], ids=["late", "refused"])
async def test_failed_calls_on_a_shared_stream(timeout_s: float) -> None:
    stream: MultiplexedCall[Any, Any] = MultiplexedCall("peer", cast(Any, None), cast(Any, None), dict, dict)
    stream._session = cast(Any, SimpleNamespace(wake=lambda: None, close=lambda: None))
    stream._announced = Message()
    stream._welcome.set()

    async def call() -> None:
        asking = asyncio.ensure_future(stream(Message(), timeout=timeout_s))
        await asyncio.sleep(0)
        if timeout_s > 1:
            call_stream._fail(next(iter(stream._pending.values()))[0], grpc.StatusCode.NOT_FOUND)
        try:
            await asking
        finally:
            stream._calls.clear()
            stream._cancels.clear()
            del asking

    await none_of(call)


async def test_hedged_calls_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "HEDGE_GUESS_S", 0.0)
    monkeypatch.setattr(replicas, "HEDGE_FLOOR_S", 0.0)
    chosen: ReplicaSet[Any] = ReplicaSet("peer", [], lambda channel: None)
    for name in ("a", "b"):
        replica: Replica[Any] = Replica(name, cast(Any, None), None)
        replica.serving = True
        chosen._replicas[name] = replica

    async def once(*_: object) -> None:
        await asyncio.sleep(0.002)
        raise unavailable("No.")

    monkeypatch.setattr(chosen, "_once", once)
    await none_of(lambda: chosen.call(lambda stub: cast(Any, stub), None, 60.0, hedge="name"))


async def test_jobs_that_fail_before_their_client_leaves() -> None:
    async def job() -> None:
        await asyncio.sleep(0)
        raise unavailable("No.")

    await none_of(lambda: result_unless_gone(never, job()))


async def test_one_of_many_that_fails() -> None:
    async def job(fails: bool) -> None:
        await asyncio.sleep(0)
        if fails:
            raise unavailable("No.")
        await asyncio.sleep(60)

    def jobs(failing: int) -> Coroutine[Any, Any, list[None]]:
        return all_or_none(job(number == failing) for number in range(6))

    for failing in (0, 5):
        await none_of(partial(jobs, failing))


async def test_all_of_them_or_the_typed_error() -> None:
    async def job(number: int) -> int:
        await asyncio.sleep(0.001 * (5 - number))
        return number

    async def broken(error: Exception) -> int:
        raise error

    assert await all_or_none(job(number) for number in range(5)) == [0, 1, 2, 3, 4]
    assert await all_or_none(iter(())) == []
    with pytest.raises(SluiceError, match=r"No\."):
        await all_or_none([broken(KeyError("x")), broken(unavailable("No."))])
    with pytest.raises(KeyError):
        await all_or_none([broken(KeyError("x")), job(1)])


async def test_senders_that_are_closed_while_a_client_takes_nothing() -> None:
    async def send(message: object) -> None:
        await never()

    async def closed() -> None:
        sender = InlineSender(send, None, lambda: None, lambda: None)
        sender.send({"type": "http.response.body", "body": b"x"})
        assert sender.blocked
        await sender.close()

    await none_of(closed)
