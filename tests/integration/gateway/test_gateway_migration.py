"""Generations whose worker is cut at any token, and texts whose replica dies: answers are those of a calm run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common.base.errors import ErrorKind, SluiceError
from services.common.observability import telemetry
from services.gateway.backends.rpc import link
from services.gateway.backends.workers import connections as connections
from services.gateway.backends.workers.registry import WorkerEntry
from services.gateway.core.request import (
    FinishReason,
    GenerationRequest,
    Parsing,
    SamplingParams,
    StopParams,
    StructuredOutput,
)
from services.gateway.streams.migration import MigrationPolicy
from tests.support.servers.survival import Client, ObservedStream, Stage, asking, staged
from tests.support.waiting import until

TOOLS = Parsing(
    tool_parser="hermes",
    reasoning_parser="think",
    tools_json=b'[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object"}}},'
    b'{"type":"function","function":{"name":"add","parameters":{"type":"object"}}}]',
)
CALLS = (
    "<think>The user wants the weather in München 🌦 and a sum.</think>I will look that up."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "München", "unit": "°C"}}\n</tool_call>'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, 3]}}\n</tool_call>'
)
STORIES: dict[str, GenerationRequest] = {
    "tools": asking("tools", f"Please <<<script: {CALLS}>>>", parsing=TOOLS),
    "unicode": asking("unicode", "<<<script: 😀🎉 你好世界 — Grüße aus München, ça va, привет мир!>>>"),
    "stop string": asking(
        "stop", "<<<script: one two three four END five six>>>", stop=StopParams(max_tokens=200, strings=("END",))
    ),
    "plain": asking("plain", "Tell me of rivers."),
    "length": asking("length", "Tell me of gates.", stop=StopParams(max_tokens=70, ignore_eos=True)),
    "minimum": asking("minimum", "Tell me of boats.", stop=StopParams(max_tokens=300, min_tokens=150)),
    "guided": asking("guided", "Spell it.", guided=StructuredOutput("choice", ("abc 1234 " * 6,))),
    "penalties": asking(
        "penalties", "Tell me of mills.", sampling=SamplingParams(seed=3, frequency_penalty=0.5, presence_penalty=0.1)
    ),
    "logprobs": asking(
        "logprobs",
        "Tell me of locks.",
        stop=StopParams(max_tokens=60, ignore_eos=True),
        logprobs=2,
        prompt_logprobs=1,
        token_texts=True,
    ),
    "sampling": asking(
        "sampling",
        "Tell me of wells.",
        stop=StopParams(max_tokens=60, min_tokens=30, token_ids=(40, 41)),
        sampling=SamplingParams(
            seed=11, temperature=0.8, top_p=0.9, top_k=50, repetition_penalty=1.1, logit_bias={50: 4.0, 60: -9.0}
        ),
    ),
    "tools with logprobs": asking("both", f"Please <<<script: {CALLS}>>>", parsing=TOOLS, logprobs=0, token_texts=True),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BACKOFF_S", (0.005, 0.05))
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


async def undisturbed(stage: Stage, request: GenerationRequest) -> ObservedStream:
    """What a client hears; the second time, when the prompt is cached as it will be from now on."""
    await stage.ask(request)
    heard = await stage.ask(request)
    assert heard.error is None
    return heard


async def test_a_worker_cut_at_every_token_is_never_noticed(folder: Path) -> None:
    cases = 0
    async with staged(folder) as stage:
        for name, request in STORIES.items():
            told = await undisturbed(stage, request)
            stage.knives[0].set(0)
            await stage.ask(request)  # from now on the other worker has the prompt in its cache, too
            for after in range(told.usage[1] + 1):
                stage.knives[0].set(after)
                heard = await stage.ask(replace(request))  # another request: deaths are counted by request
                stage.knives[0].set(None)
                assert heard.comparable == told, f"{name}, cut after {after} tokens"
                cases += 1
            assert stage.knives[0].cuts
            if request.logprobs is not None:
                assert len(told.logprobs) == len(told.pieces) == told.usage[1]
        await stage.quiet()
    assert cases >= 500
    assert {call[1] for call in (await _tools(folder)).calls.values()} == {"get_weather", "add"}


async def _tools(folder: Path) -> ObservedStream:
    async with staged(folder, workers=1) as stage:
        return await stage.ask(STORIES["tools"])


async def test_several_workers_are_lost_in_a_row(folder: Path) -> None:
    async with staged(folder, workers=4) as stage:
        told = await undisturbed(stage, STORIES["tools"])
        for first in range(1, 30, 4):
            for knife, after in zip(stage.knives, (first, 7, 11), strict=False):
                knife.set(after)
            heard = await stage.ask(STORIES["tools"])
            assert heard.comparable == told
            assert heard.finish is not None
            assert heard.finish.migrations >= 2  # the first one may be back for the third move
        await stage.quiet()


async def test_a_drained_worker_hands_its_generations_over(folder: Path) -> None:
    async with staged(folder, speedup=2.0, drain_s=0.2) as stage:
        stop = StopParams(max_tokens=400, ignore_eos=True)
        requests = [asking(f"r{number}", f"Tell me of number {number}.", stop=stop) for number in range(12)]
        asked = [asyncio.create_task(stage.ask(request)) for request in requests]
        await until(lambda: stage.hosts[0].worker.live_requests == len(requests))
        await asyncio.sleep(0.1)
        await stage.hosts[0].worker.drain(0)
        heard = await asyncio.gather(*asked)
        assert all(one.finish is not None and one.finish.migrations == 1 for one in heard)
        stage.reservations.order = ["w1"]
        assert [one.comparable.text for one in heard] == [(await stage.ask(request)).text for request in requests]
        await stage.quiet()


async def test_the_only_worker_goes_on_itself_when_it_comes_back(folder: Path) -> None:
    async with staged(folder, workers=1) as stage:
        told = await undisturbed(stage, STORIES["plain"])
        stage.knives[0].set(9)
        heard = await stage.ask(STORIES["plain"])
        assert heard.comparable == told
        assert heard.finish is not None
        assert heard.finish.migrations == 1
        await stage.quiet()


@pytest.mark.parametrize(
    ("policy", "request_of"),
    [
        (MigrationPolicy(enabled=False), {}),
        (MigrationPolicy(max_tokens=10), {}),
        (MigrationPolicy(), {"guided": StructuredOutput("choice", ("abc " * 30,))}),
    ],
    ids=["off", "too long", "guided"],
)
async def test_generations_that_must_not_move_end_with_the_reason(
    folder: Path, policy: MigrationPolicy, request_of: dict[str, Any]
) -> None:
    async with staged(folder, policy=policy) as stage:
        workers = stage.pipeline.registry.workers
        workers.update({name: _without_resuming(entry) for name, entry in workers.items()})
        stage.knives[0].set(9)
        heard = await stage.ask(asking("stays", "Tell me of stones.", **request_of))
        assert heard.error is not None
        assert heard.error.kind is ErrorKind.DISCONNECTED
        assert stage.knives[0].cuts == 1
        await stage.quiet()


def _without_resuming(entry: WorkerEntry) -> WorkerEntry:
    return replace(entry, capabilities=entry.capabilities - {"resume", "resume_guided"})


async def test_the_number_of_moves_is_limited(folder: Path) -> None:
    async with staged(folder, workers=3, policy=MigrationPolicy(limit=1)) as stage:
        stage.knives[0].set(5)
        stage.knives[1].set(5)
        heard = await stage.ask(STORIES["plain"])
        assert heard.error is not None
        assert heard.error.http_status == 502
        await stage.quiet()


async def test_a_generation_does_not_go_back_to_a_worker_that_dies_too(folder: Path) -> None:
    async with staged(folder, workers=3, speedup=2.0) as stage:
        asked = asyncio.create_task(stage.ask(STORIES["plain"]))
        await until(lambda: stage.hosts[0].worker.live_requests == 1)
        stage.hosts[1].worker.refuse_new()
        await stage.hosts[0].worker.drain(0)
        heard = await asked
        assert heard.finish is not None
        assert heard.finish.migrations == 2
        stage.reservations.order = ["w2"]
        assert heard.text == (await stage.ask(STORIES["plain"])).text
        await stage.quiet()


async def test_nobody_left_is_a_typed_error_within_the_wait(folder: Path) -> None:
    async with staged(folder, workers=1, policy=MigrationPolicy(wait_s=0.3)) as stage:
        stage.knives[0].set(5)
        stage.pipeline.connections.worker("w0")._connect_timeout_s = 0.05
        stage.pipeline.registry.workers.clear()
        with pytest.raises(SluiceError):
            await stage.ask(STORIES["plain"])
        assert not stage.left()


async def test_a_client_that_leaves_during_a_move_leaves_nothing_behind(folder: Path) -> None:
    async with staged(folder, workers=2) as stage:
        for pause in (0, 0.001, 0.002, 0.004, 0.008, 0.016):
            stage.knives[0].set(6)
            client = Client()
            generation = await stage.pipeline.start(STORIES["plain"], [cast(Any, client)])
            await until(lambda: generation.migrations > 0)  # noqa: B023
            await asyncio.sleep(pause)
            generation.cancel()
            await stage.quiet()


async def test_a_killed_replica_under_two_hundred_streams(folder: Path) -> None:
    requests = [
        asking(f"r{number}", f"Tell me of number {number}." if number % 4 else f"<<<script: {CALLS}>>>",
               parsing=None if number % 4 else TOOLS)
        for number in range(200)
    ]  # fmt: skip
    async with staged(folder, workers=1, replicas=2) as stage:
        told = await asyncio.gather(*(stage.ask(request) for request in requests))
    async with staged(folder, workers=1, replicas=2, speedup=1.0) as stage:
        asked = [asyncio.create_task(stage.ask(request)) for request in requests]
        await until(lambda: stage.fewest_texts >= 80)
        await asyncio.sleep(0.2)
        assert sum(task.done() for task in asked) < 100, "too late to disturb anything"
        await stage.replicas[0].kill()
        heard = await asyncio.gather(*asked)
        replaced = [one for one in heard if one.finish is not None and one.finish.degraded]
        assert len(replaced) >= 50
        for one, other in zip(heard, told, strict=True):
            assert (one.text, one.reasoning, one.calls) == (other.text, other.reasoning, other.calls)
            assert one.comparable.finish == other.finish
        await stage.quiet()


async def test_a_replica_that_drains_hands_over_unmarked(folder: Path) -> None:
    requests = [asking(f"r{number}", f"Tell me of number {number}.") for number in range(40)]
    async with staged(folder, workers=1, replicas=2) as stage:
        told = [one.text for one in await asyncio.gather(*(stage.ask(request) for request in requests))]
    async with staged(folder, workers=1, replicas=2, speedup=1.0) as stage:
        asked = [asyncio.create_task(stage.ask(request)) for request in requests]
        await until(lambda: stage.fewest_texts >= 15)
        await asyncio.sleep(0.1)
        service = stage.replicas[0].service
        assert service is not None
        service.start_draining()
        heard = await asyncio.gather(*asked)
        assert [one.text for one in heard] == told
        assert not any(one.finish is None or one.finish.degraded for one in heard)
        await stage.quiet()


async def test_the_only_replica_dies_and_comes_back(folder: Path) -> None:
    async with staged(folder, workers=1, replicas=1, speedup=2.0) as stage:
        told = await stage.ask(STORIES["tools"])
        asked = asyncio.create_task(stage.ask(STORIES["tools"]))
        await asyncio.sleep(0.15)
        await stage.replicas[0].kill()
        await asyncio.sleep(0.1)
        await stage.replicas[0].start()
        heard = await asked
        assert (heard.text, heard.reasoning, heard.calls) == (told.text, told.reasoning, told.calls)
        await stage.quiet()


async def test_no_replica_for_long_is_a_typed_error(folder: Path) -> None:
    async with staged(folder, workers=1, replicas=1, post_wait_s=0.3, speedup=1.0) as stage:
        asked = asyncio.create_task(stage.ask(asking("long", "Go on.", stop=StopParams(3000, ignore_eos=True))))
        await asyncio.sleep(0.3)
        await stage.replicas[0].kill()
        heard = await asked
        assert heard.error is not None
        assert (heard.error.kind, heard.error.code) == (ErrorKind.UNAVAILABLE, "service_unavailable")
        stage.replicas[0].service = None
        await stage.quiet()


async def test_worker_and_replica_are_lost_together(folder: Path) -> None:
    async with staged(folder, workers=2, replicas=2) as stage:
        told = await undisturbed(stage, STORIES["tools"])
        for after in (1, 20, 40, 60):
            stage.knives[0].set(after)
            asked = asyncio.create_task(stage.ask(STORIES["tools"]))
            await until(lambda: stage.knives[0].after is None)
            victim = next((one for one in stage.replicas if one.service and any(map(len, one.service._sessions))), None)
            if victim is not None:
                await victim.kill()
            heard = await asked
            assert heard.comparable == told
            assert heard.comparable.finish is not None
            assert heard.comparable.finish.reason is FinishReason.TOOL_CALLS
            if victim is not None:
                await victim.start()
        await stage.quiet()


async def test_a_move_shows_in_the_trace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    async with staged(folder) as stage:
        stage.knives[0].set(9)
        await stage.ask(STORIES["plain"])
        await stage.quiet()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    whole, after = spans["gateway.generate"], spans["gateway.resume"]
    moved = next(event for event in whole.events if event.name == "migrated")
    assert dict(moved.attributes or {}) == {"from": "w0", "to": "w1", "generated_tokens": 9}
    assert whole.context is not None
    assert after.parent is not None
    assert after.parent.span_id == whole.context.span_id
    assert [link.context.span_id for link in after.links] == [whole.context.span_id]
    assert (after.attributes or {})["resumed_tokens"] == 9
