"""The canary: it notices an engine that hangs or fails, is not fooled by a busy one, and hears when it is back."""

from __future__ import annotations

import asyncio
import traceback
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.worker.contract.engine import Embedded, EngineConfig, GenerateContext, Sink
from services.worker.contract.generation import FinishReason, GenerateRequest, Role, Usage
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.serving.admission_gate import AdmissionGate
from services.worker.serving.canary import UNHEALTHY, Canary
from services.worker.serving.status import WorkerStatus
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import CONFIG, ScriptedEngine, request
from tests.support.oracles.errors import raises_error
from tests.support.servers.mock_workers import mock_worker
from tests.support.waiting import until

TRY_S = 0.2


@asynccontextmanager
async def watched(folder: Path, failures: int = 2, **fields: Any) -> AsyncIterator[tuple[Worker, Canary, list[str]]]:
    async with mock_worker(folder, **fields) as worker:
        states: list[str] = []
        worker.gate.on_serving = states.append
        yield worker, Canary(worker, TRY_S, TRY_S, failures), states


@pytest.mark.parametrize("role", ["aggregated", "prefill", "decode"])
async def test_a_sound_engine_passes_whatever_its_role(folder: Path, role: str) -> None:
    async with watched(folder, role=role) as (worker, canary, states):
        canary._timeout_s = 20.0
        assert await canary.try_once()
        assert not states
        assert worker.load()[0].used_blocks == 0
        assert worker.load()[0].cached_blocks == 0
        assert worker.live_requests == 0


async def test_a_hang_takes_it_out_fails_what_runs_and_ends(folder: Path) -> None:
    async with watched(folder, engine_args="fault=hang") as (worker, canary, states):
        delivery = StreamResponseSink()
        worker.submit(request(), delivery)
        assert not await canary.try_once()
        assert states == []  # once is no proof
        assert not await canary.try_once()
        assert states == [UNHEALTHY]
        assert worker.phases.name == UNHEALTHY
        async with asyncio.timeout(30):
            terminal = [delta async for delta in delivery.deltas()][-1]
        assert terminal.finish_reason is FinishReason.ERROR
        assert terminal.error is not None
        assert (terminal.error.kind, terminal.error.code) == (ErrorKind.ENGINE_SHUTDOWN, "engine_unhealthy")
        assert terminal.error.retryable
        with raises_error(code="engine_unhealthy"):
            worker.submit(request("next"), StreamResponseSink())
        assert not await canary.try_once()
        assert states == [UNHEALTHY]  # states once
        await worker.engine.control("inject_fault", {"fault": "none"})
        canary._timeout_s = 20.0
        assert await canary.try_once()
        assert states == [UNHEALTHY, ""]
        assert worker.phases.name == ""
        worker.submit(request("again"), StreamResponseSink())
        await worker.drain(10)


@pytest.mark.parametrize("fault", ["refuse", "error_after=1"])
async def test_failures_count_like_a_hang(folder: Path, fault: str) -> None:
    async with watched(folder, failures=1, engine_args=f"fault={fault}") as (_, canary, states):
        assert not await canary.try_once()
        assert states == [UNHEALTHY]


class Full(ScriptedEngine):
    """Has no place for one more; a test speaks for it to those it has."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks: dict[str, Sink] = {}

    def submit(self, request: GenerateRequest, context: GenerateContext, sink: Sink) -> None:
        self.sinks[request.request_id] = sink

    def abort(self, context: GenerateContext) -> None:
        if (sink := self.sinks.pop(context.request_id, None)) is not None:
            sink.finish(FinishReason.CANCELLED, Usage())


async def tried_while(act: Callable[[Worker, Sink], object]) -> tuple[bool, Worker]:
    """What the canary of a full engine finds while something happens to the request that the engine has."""
    engine = Full()
    worker = Worker(engine, "w", strict=True)
    await worker.start()
    worker.submit(request("long"), StreamResponseSink())
    sink = engine.sinks["long"]
    sink.begin(0)
    sink.push((5,))
    trying = asyncio.create_task(Canary(worker, 60.0, 60.0, 1).try_once())
    await until(lambda: len(engine.sinks) == 2)
    act(worker, sink)
    engine.sinks["sluice-canary-1"].finish(FinishReason.ERROR, Usage())  # as good as no answer in time
    return await trying, worker


async def test_an_engine_that_gives_others_tokens_is_busy_not_dead() -> None:
    passed, worker = await tried_while(lambda worker, sink: sink.push((6,)))
    assert passed
    assert worker.gate.refusal is None
    assert worker.live_requests == 1, "no request is ended by it"


@pytest.mark.parametrize(
    "act",
    [
        lambda worker, sink: worker.abort("long"),
        lambda worker, sink: sink.finish(FinishReason.ERROR, Usage()),
    ],
    ids=["given up", "failed"],
)
async def test_requests_that_only_end_are_no_sign_of_life(act: Callable[[Worker, Sink], object]) -> None:
    passed, worker = await tried_while(act)
    assert not passed
    assert worker.phases.name == UNHEALTHY


async def test_it_tries_only_after_a_quiet_while_and_goes_on_by_itself(folder: Path) -> None:
    async with watched(folder) as (worker, canary, states):
        running = asyncio.create_task(canary.run())
        await worker.engine.control("inject_fault", {"fault": "hang"})
        await until(lambda: states == [UNHEALTHY])
        await worker.engine.control("inject_fault", {"fault": "none"})
        await until(lambda: states == [UNHEALTHY, ""])
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_decode_worker_that_runs_no_prompts_has_none() -> None:
    class Decoding(ScriptedEngine):
        async def start(self, worker_id: str) -> Any:
            return replace(CONFIG, role=Role.DECODE)

    worker = Worker(Decoding(), "w")
    await worker.start()
    async with asyncio.timeout(30):
        await Canary(worker, 0.01, 0.01, 1).run()


async def test_an_engine_that_raises_is_unhealthy_not_the_end_of_the_canary() -> None:
    class Raising(ScriptedEngine):
        def submit(self, *_: Any) -> None:
            raise RuntimeError("secret")

    worker = Worker(Raising(), "w")
    await worker.start()
    assert not await Canary(worker, 1.0, 1.0, 1).try_once()
    assert worker.phases.name == UNHEALTHY


async def test_an_engine_that_only_embeds_is_asked_for_a_vector() -> None:
    class Embedder(ScriptedEngine):
        failing = False

        async def start(self, worker_id: str) -> EngineConfig:
            return replace(CONFIG, capabilities=frozenset({"token_ids", "embeddings"}))

        async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
            if self.failing:
                raise SluiceError(ErrorKind.INTERNAL, "no vector")
            return Embedded([b"\0" * 4], len(inputs))

    engine = Embedder(hold=True)
    worker = Worker(engine, "w")
    await worker.start()
    canary = Canary(worker, TRY_S, 20.0, 2)
    assert await canary.try_once()
    engine.failing = True
    assert not await canary.try_once()
    await worker.cleanup()


def test_repeated_refusals_use_no_memory() -> None:
    gate = AdmissionGate(WorkerStatus(), 0)
    refused = SluiceError(ErrorKind.UNAVAILABLE, "The worker sleeps.")
    gate.close(refused)
    for _ in range(50):
        with pytest.raises(SluiceError, match="sleeps"):
            gate.check()
    assert len(list(traceback.walk_tb(refused.__traceback__))) < 5
