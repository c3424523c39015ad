"""An engine that breaks its contract: loud in tests, one failed request in production."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import (
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    TokenLogprob,
    Usage,
)
from services.worker.generation.response_sink import ContractViolation, ResponseSink, StreamResponseSink
from services.worker.serving.outbox import Outbox
from services.worker.serving.session import SessionResponseSink
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import ScriptedEngine, request

Act = Callable[[Sink], None]


class Pushing(ScriptedEngine):
    """Gives its sink to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks: dict[str, Sink] = {}

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        self.sinks[request.request_id] = sink

    def abort(self, context: GenerateContext) -> None:
        context.cancelled = True


def entry(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, -0.1, 1))


def begun(sink: Sink) -> None:
    sink.begin(0)
    sink.push((5,))


BREAKS: list[tuple[str, list[Act]]] = [
    ("begins before it pushes", [lambda sink: sink.push((5,))]),
    ("begins once", [begun, lambda sink: sink.begin(0)]),
    ("gives ids of the vocabulary", [begun, lambda sink: sink.push((1_000,))]),
    ("gives ids of the vocabulary", [begun, lambda sink: sink.push((5, 70_000, 6))]),
    ("gives ids of the vocabulary", [begun, lambda sink: sink.push((-1,))]),
    ("gives ids of the vocabulary", [begun, lambda sink: sink.push((5, -1))]),
    ("gives log-probabilities for", [begun, lambda sink: sink.push((5, 6), (entry(5),))]),
]
AFTER: list[tuple[str, Act]] = [
    ("is silent after the end", lambda sink: sink.push((5,))),
    ("is silent after the end", lambda sink: sink.push((5, 6), (entry(5), entry(6)))),
    ("is silent after the end", lambda sink: sink.begin(0)),
    ("ends a request once", lambda sink: sink.finish(FinishReason.STOP, Usage())),
]


def stream() -> ResponseSink:
    return StreamResponseSink()


def slot() -> ResponseSink:
    return SessionResponseSink(1, Outbox(lambda: None, lambda: None), lambda slot: None)


async def made(strict: bool, delivery: ResponseSink) -> tuple[Worker, Sink, list[str]]:
    engine = Pushing()
    worker = Worker(engine, "w", strict=strict)
    await worker.start()
    broken: list[str] = []
    count: Any = broken.append
    worker.metrics.record_broken_contract = count  # type: ignore[method-assign]
    worker.submit(request(), delivery)
    return worker, engine.sinks["r"], broken


@pytest.mark.parametrize("make", [stream, slot])
@pytest.mark.parametrize(("rule", "acts"), BREAKS, ids=lambda value: value[:30] if isinstance(value, str) else "acts")
async def test_a_break_is_raised_in_tests(rule: str, acts: list[Act], make: Callable[[], ResponseSink]) -> None:
    _, sink, broken = await made(True, make())
    for act in acts[:-1]:
        act(sink)
    with pytest.raises(ContractViolation, match=rule):
        acts[-1](sink)
    assert len(broken) == 1


@pytest.mark.parametrize("make", [stream, slot])
@pytest.mark.parametrize(("rule", "act"), AFTER, ids=lambda value: value[:30] if isinstance(value, str) else "acts")
async def test_nothing_may_follow_the_end(rule: str, act: Act, make: Callable[[], ResponseSink]) -> None:
    _, sink, broken = await made(True, make())
    begun(sink)
    sink.finish(FinishReason.STOP, Usage(4, 1))
    with pytest.raises(ContractViolation, match=rule):
        act(sink)
    assert len(broken) == 1


@pytest.mark.parametrize(("rule", "acts"), BREAKS, ids=lambda value: value[:30] if isinstance(value, str) else "acts")
async def test_in_production_the_request_fails_and_the_worker_goes_on(rule: str, acts: list[Act]) -> None:
    delivery = StreamResponseSink()
    worker, sink, broken = await made(False, delivery)
    for act in acts:
        act(sink)
    assert broken
    assert rule in broken[0]
    async with asyncio.timeout(30):
        deltas = [delta async for delta in delivery.deltas()]
    assert deltas[-1].error is not None
    assert deltas[-1].error.kind is ErrorKind.INTERNAL
    assert sum(delta.finish_reason is not None for delta in deltas) == 1
    assert all(token_id < 1_000 for delta in deltas for token_id in delta.token_ids)
    assert worker.live_requests == 0
    sink.push((5,))  # the engine does not know yet that it was overruled
    sink.finish(FinishReason.CANCELLED, Usage())
    assert len(broken) == 1
    worker.submit(request("next"), StreamResponseSink())


async def test_what_the_worker_ended_may_still_speak_without_blame() -> None:
    delivery = StreamResponseSink()
    worker, sink, broken = await made(True, delivery)
    begun(sink)
    worker.fail_all(SluiceError(ErrorKind.ENGINE_SHUTDOWN, "Gone."))
    sink.push((6,))
    sink.begin(0)
    sink.finish(FinishReason.CANCELLED, Usage())
    assert not broken
    assert delivery.delivered == 1


async def test_a_sound_stream_passes_with_and_without_logprobs() -> None:
    delivery = StreamResponseSink()
    worker, sink, broken = await made(True, delivery)
    sink.begin(2)
    sink.push((5,))
    sink.push((6, 7), (entry(6), entry(7)))
    sink.push(())
    sink.finish(FinishReason.LENGTH, Usage(4, 3, 2))
    assert not broken
    assert delivery.delivered == 3
    assert worker.live_requests == 0


async def test_an_error_without_a_reason_gets_one() -> None:
    delivery = StreamResponseSink()
    _, sink, _ = await made(True, delivery)
    sink.finish(FinishReason.ERROR, Usage())
    async with asyncio.timeout(30):
        terminal = [delta async for delta in delivery.deltas()][-1]
    assert terminal.error is not None
