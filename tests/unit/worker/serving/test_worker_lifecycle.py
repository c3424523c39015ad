"""The worker around an engine: refusals, exactly one end, drain, failure, broken contracts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import GenerateContext, Sink
from services.worker.contract.generation import (
    Delta,
    Disaggregation,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    Role,
    SamplingParams,
    StructuredOutput,
    TokenLogprob,
    Usage,
)
from services.worker.generation.response_sink import ContractViolation, ResponseSink, StreamResponseSink
from services.worker.serving.outbox import Outbox
from services.worker.serving.session import SessionResponseSink
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import RecordingSink, ScriptedEngine, request
from tests.support.oracles.errors import raises_error
from tests.support.servers.mock_workers import generate, read

STOP = Delta((7,), FinishReason.STOP, Usage(4, 1, 0), stop_token_id=7)


async def started(engine: ScriptedEngine, on_failure: Callable[[str, BaseException], None] | None = None) -> Worker:
    worker = Worker(engine, "w", on_failure)
    await worker.start()
    return worker


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        (request(prompt=()), ErrorKind.INVALID_ARGUMENT, "prompt"),
        (request(prompt=(1000,)), ErrorKind.INVALID_ARGUMENT, "prompt"),
        (request(prompt=range(64)), ErrorKind.INVALID_ARGUMENT, "prompt"),
        (request(request_id=""), ErrorKind.INVALID_ARGUMENT, "request_id"),
        (request(model="other"), ErrorKind.NOT_FOUND, "model"),
        (request(lora="rude"), ErrorKind.NOT_FOUND, "lora"),
        (request(max_tokens=0), ErrorKind.INVALID_ARGUMENT, "max_tokens"),
        (request(max_tokens=3, min_tokens=4), ErrorKind.INVALID_ARGUMENT, "min_tokens"),
        (request(sampling=SamplingParams(temperature=-1.0)), ErrorKind.INVALID_ARGUMENT, "temperature"),
        (request(sampling=SamplingParams(temperature=float("nan"))), ErrorKind.INVALID_ARGUMENT, "temperature"),
        (request(sampling=SamplingParams(top_p=0.0)), ErrorKind.INVALID_ARGUMENT, "top_p"),
        (request(sampling=SamplingParams(top_p=1.1)), ErrorKind.INVALID_ARGUMENT, "top_p"),
        (request(sampling=SamplingParams(repetition_penalty=0.0)), ErrorKind.INVALID_ARGUMENT, "repetition_penalty"),
        (request(sampling=SamplingParams(top_k=-2)), ErrorKind.INVALID_ARGUMENT, "top_k"),
        (request(sampling=SamplingParams(logit_bias={1: 101.0})), ErrorKind.INVALID_ARGUMENT, "logit_bias"),
        (request(sampling=SamplingParams(logit_bias={1000: 1.0})), ErrorKind.INVALID_ARGUMENT, "logit_bias"),
        (request(data_parallel_rank=1), ErrorKind.INVALID_ARGUMENT, "data_parallel_rank"),
        (request(resumed_tokens=4), ErrorKind.INVALID_ARGUMENT, "resumed_tokens"),
        (request(logprobs=0), ErrorKind.FAILED_PRECONDITION, "logprobs"),
        (request(guided=StructuredOutput("regex", "a+")), ErrorKind.FAILED_PRECONDITION, "response_format"),
        (request(text="hello"), ErrorKind.FAILED_PRECONDITION, "prompt"),
        (request(messages_json=b"[]"), ErrorKind.FAILED_PRECONDITION, "prompt"),
        (request(disaggregation=Disaggregation(Role.PREFILL)), ErrorKind.FAILED_PRECONDITION, "disaggregation"),
    ],
)
async def test_what_cannot_run_is_refused_before_the_engine_sees_it(
    asked: GenerateRequest, kind: ErrorKind, param: str
) -> None:
    engine = ScriptedEngine()
    worker = await started(engine)
    with raises_error(kind=kind, param=param) as refusal:
        worker.submit(asked, StreamResponseSink())
    assert refusal.value.message.endswith(".")
    assert worker.live_requests == 0
    assert engine.closed == []


async def test_repeated_abort_ends_in_order() -> None:
    class Tidy(ScriptedEngine):
        """Frees what a request holds in a backend, which takes a while."""

        def __init__(self) -> None:
            super().__init__(hold=True)
            self.freeing, self.freed = asyncio.Event(), asyncio.Event()
            self.tidied = False

        async def generate(self, request: GenerateRequest, context: GenerateContext) -> AsyncGenerator[Delta, None]:
            try:
                async for delta in super().generate(request, context):
                    yield delta
            finally:
                self.freeing.set()
                await self.freed.wait()
                self.tidied = True

    engine = Tidy()
    worker = await started(engine)
    delivery = StreamResponseSink()
    worker.submit(request(), delivery)
    await asyncio.sleep(0)
    worker.cancel(delivery)
    async with asyncio.timeout(30):
        await engine.freeing.wait()
        worker.cancel(delivery)  # as when a caller cancels and then goes away
        await asyncio.sleep(0)
        engine.freed.set()
        deltas = await read(delivery)
    assert engine.tidied
    assert [delta.finish_reason for delta in deltas] == [FinishReason.CANCELLED]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ([Delta((5,))], ErrorKind.STREAM_INCOMPLETE),
        ([Delta((5,)), SluiceError(ErrorKind.RESPONSE_TIMEOUT, "Too slow.")], ErrorKind.RESPONSE_TIMEOUT),
        ([Delta((5,)), RuntimeError("secret detail")], ErrorKind.INTERNAL),
    ],
)
async def test_an_engine_that_fails_ends_the_request_with_a_typed_error(
    script: list[Delta | Exception], kind: ErrorKind
) -> None:
    worker = await started(ScriptedEngine(script))
    terminal = (await generate(worker, request()))[-1]
    assert terminal.finish_reason is FinishReason.ERROR
    assert terminal.error is not None
    assert terminal.error.kind is kind
    assert "secret" not in terminal.error.message
    assert terminal.usage == Usage(4, 1, 0)


async def test_nothing_comes_after_the_end(caplog: pytest.LogCaptureFixture) -> None:
    delivery = StreamResponseSink()
    delivery.finish(FinishReason.STOP, Usage())
    delivery.begin(3)
    delivery.push((1, 2))
    delivery.finish(FinishReason.LENGTH, Usage())
    deltas = await read(delivery)
    assert [delta.finish_reason for delta in deltas] == [FinishReason.STOP]
    assert "twice" in caplog.text


async def test_an_engine_that_refuses_leaves_nothing_behind() -> None:
    class Broken(ScriptedEngine):
        def submit(self, request: GenerateRequest, context: GenerateContext, sink: Any) -> None:
            raise RuntimeError("secret detail")

    worker = await started(Broken())
    with raises_error(kind=ErrorKind.INTERNAL) as refusal:
        worker.submit(request(), StreamResponseSink())
    assert "secret" not in refusal.value.message
    assert worker.live_requests == 0


async def test_before_the_start_and_after_the_drain_requests_are_refused() -> None:
    worker = Worker(ScriptedEngine([STOP]), "w")
    with raises_error(kind=ErrorKind.UNAVAILABLE):
        worker.submit(request(), StreamResponseSink())
    await worker.start()
    await worker.drain(1)
    with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, retryable=True):
        worker.submit(request(), StreamResponseSink())


async def test_drain_waits_for_what_runs() -> None:
    engine = ScriptedEngine([STOP])
    engine.script, engine.hold = [Delta((5,))], True
    worker = await started(engine)
    delivery = StreamResponseSink()
    worker.submit(request(), delivery)
    draining = asyncio.create_task(worker.drain(30))
    await asyncio.sleep(0)
    assert not draining.done()
    worker.abort("r")
    async with asyncio.timeout(30):
        await draining
    assert worker.live_requests == 0


async def test_what_outlasts_the_drain_ends_as_engine_shutdown_and_counts_its_tokens() -> None:
    engine = ScriptedEngine([Delta((5, 6), cached_tokens=2)], hold=True)
    worker = await started(engine)
    delivery = StreamResponseSink()
    worker.submit(request(), delivery)
    await asyncio.sleep(0)
    await worker.drain(0.01)
    deltas = await read(delivery)
    assert deltas[-1].error is not None
    assert deltas[-1].error.kind is ErrorKind.ENGINE_SHUTDOWN
    assert deltas[-1].usage == Usage(4, 2, 2)
    assert worker.live_requests == 0


async def test_a_dead_engine_task_fails_the_worker_and_all_its_requests() -> None:
    failures: list[str] = []
    engine = ScriptedEngine(hold=True)
    worker = await started(engine, lambda name, error: failures.append(name))
    delivery = StreamResponseSink()
    worker.submit(request(), delivery)

    async def die() -> None:
        raise RuntimeError("gone")

    engine.tasks.spawn(die(), "loop")
    deltas = await read(delivery)
    assert deltas[-1].error is not None
    assert deltas[-1].error.kind is ErrorKind.ENGINE_SHUTDOWN
    assert failures == ["loop"]
    with pytest.raises(SluiceError):
        worker.submit(request("next"), StreamResponseSink())


async def test_the_default_submit_is_begin_pushes_finish() -> None:
    engine = ScriptedEngine([Delta((5,), cached_tokens=1), Delta((6,)), Delta(finish_reason=FinishReason.LENGTH)])
    sink = RecordingSink()
    engine.submit(request(), GenerateContext("r"), sink)
    async with asyncio.timeout(30):
        await sink.done.wait()
        await engine.drain()
    assert sink.calls == ["begin", "push", "push", "finish"]
    assert sink.usage == Usage(4, 2, 1)
    await engine.cleanup()
    await engine.cleanup()


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
