"""Requests that a prefill and a decode worker share: answers are those of one worker, and nothing is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from services.common.base.errors import ErrorKind, SluiceError, no_answer
from services.gateway.backends.placement.disaggregation_policy import NO_PREFILL, PREFILL_BUSY
from services.gateway.backends.rpc import link
from services.gateway.backends.workers import connections as connections
from services.gateway.core.request import (
    GenerationRequest,
    PositionLogprobs,
    SamplingParams,
    StopParams,
    StructuredOutput,
)
from services.gateway.pipeline.config import PipelineConfig
from services.gateway.pipeline.pipeline import StreamedGeneration
from services.gateway.streams.disaggregation import HANDOFF_REFUSED, PREFILL_FAILED
from services.gateway.streams.migration_policy import MigrationPolicy
from services.gateway.streams.states import StreamState
from services.gateway.streams.stream import GenerationStream
from services.worker.contract import handoff
from services.worker.engines.mock import engine as mock_engine
from tests.support.servers.survival import Client, ObservedStream, Stage, asking, staged
from tests.support.waiting import until

CALLS = (
    "<think>Rivers and gates 🌦.</think>I will look that up."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "München"}}\n</tool_call>'
)
REQUESTS = {
    "plain": asking("plain", "Tell me of rivers."),
    "script": asking("script", f"<<<script: {CALLS}>>>"),
    "stop string": asking("stop", "<<<script: one two END three>>>", stop=StopParams(max_tokens=99, strings=("END",))),
    "length": asking("length", "Tell me of gates.", stop=StopParams(max_tokens=70, ignore_eos=True)),
    "one token": asking("one", "Tell me of one.", stop=StopParams(max_tokens=1)),
    "two tokens": asking("two", "Tell me of two.", stop=StopParams(max_tokens=2)),
    "minimum": asking("minimum", "Tell me of boats.", stop=StopParams(max_tokens=300, min_tokens=150)),
    "guided": asking("guided", "Spell it.", guided=StructuredOutput("choice", ("abc 1234 " * 6,))),
    "penalties": asking("penalties", "Tell of mills.", sampling=SamplingParams(seed=3, frequency_penalty=0.5)),
    "logprobs": asking("logprobs", "Tell me of sums.", logprobs=2, prompt_logprobs=1, token_texts=True),
}
LONG = asking("long", "Tell me of a long journey.", stop=StopParams(max_tokens=400, ignore_eos=True))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "BACKOFF_S", (0.005, 0.05))
    monkeypatch.setattr(connections, "SWEEP_S", 0.05)


class Detailed(Client):
    """Hears log-probabilities as well."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[PositionLogprobs] = []
        self.of_prompt: list[PositionLogprobs] = []
        self.pieces_of_tokens: list[bytes] = []

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        self.positions += positions

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        assert not self.of_prompt, "the prompt's are told once"
        self.of_prompt += positions

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        self.pieces_of_tokens += pieces


async def hear(stage: Stage, request: GenerationRequest) -> tuple[ObservedStream, Detailed]:
    client = Detailed()
    generation = await stage.pipeline.start(request, [cast(Any, client)])
    await asyncio.wait_for(client.over.wait(), 60)
    heard = client.heard
    heard.usage = (
        generation.prompt_tokens,
        generation.completion_tokens,
        generation.reasoning_tokens,
        generation.cached_tokens,
    )
    return heard, client


async def test_a_pair_answers_as_one_worker_does(folder: Path) -> None:
    async with staged(folder, workers=1) as one, staged(folder, roles=("prefill", "decode")) as two:
        for name, request in REQUESTS.items():
            told, alone = await hear(one, request)
            heard, shared = await hear(two, request)
            assert two.reservations.last == ("w0", "w1")
            assert heard == told, name
            assert shared.positions == alone.positions
            assert shared.of_prompt == alone.of_prompt
            assert shared.pieces_of_tokens == alone.pieces_of_tokens
            assert heard.finish is not None
            assert not heard.finish.degraded
        assert alone.positions
        assert alone.of_prompt
        await one.quiet()
        await two.quiet()


async def test_the_first_token_comes_from_the_prefill_worker_before_the_decode_worker_has_begun(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mock_engine, "TRANSFER_GBPS", 1e-9)
    async with staged(folder, roles=("prefill", "decode"), speedup=1.0) as stage:
        client = Client()
        generation = await stage.pipeline.start(LONG, [cast(Any, client)])
        assert isinstance(generation, StreamedGeneration)
        await until(lambda: len(generation.streams[0].tokens) == 1)
        await until(lambda: generation.streams[0].state is StreamState.DECODING)
        await asyncio.sleep(0.05)  # the cache travels for hours
        assert len(generation.streams[0].tokens) == 1
        assert stage.hosts[0].worker.live_requests == 0
        generation.cancel()
        await stage.quiet()


async def test_several_requests_share_the_pair_and_free_it(folder: Path) -> None:
    requests = [asking(f"r{number}", f"Tell me of number {number}.") for number in range(40)]
    async with staged(folder, workers=1) as one:
        told = [heard.text for heard in await asyncio.gather(*(one.ask(request) for request in requests))]
    async with staged(folder, roles=("prefill", "decode")) as stage:
        heard = await asyncio.gather(*(stage.ask(request) for request in requests))
        assert [one.text for one in heard] == told
        assert stage.reservations.made == len(requests)
        await stage.quiet()


async def test_a_lost_prefill_worker_is_replaced_by_another(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "prefill", "decode")) as stage:
        told = await stage.ask(LONG)
        stage.knives[0].set(0)
        heard = await stage.ask(LONG)
        assert heard.comparable.text == told.text
        assert heard.usage[:2] == told.usage[:2]
        assert heard.finish is not None
        assert (heard.finish.migrations, heard.finish.degraded) == (1, ())
        assert stage.reservations.last == ("w1", "w2")
        await stage.quiet()


async def test_without_another_prefill_worker_the_decode_worker_does_it_alone(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode")) as stage:
        told = await stage.ask(LONG)
        stage.knives[0].set(0)
        heard = await stage.ask(LONG)
        assert heard.comparable.text == told.comparable.text
        assert heard.finish is not None
        assert heard.finish.degraded == (PREFILL_FAILED,)
        assert heard.finish.migrations == 0
        await stage.quiet()


async def test_a_refused_handoff_is_made_good_by_the_decode_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(folder, roles=("prefill", "decode")) as stage:
        told = {name: (await hear(stage, request))[0] for name, request in REQUESTS.items()}
        monkeypatch.setattr(handoff, "TTL_S", -1.0)
        for name, request in REQUESTS.items():
            heard, _ = await hear(stage, request)
            assert (heard.text, heard.calls) == (told[name].text, told[name].calls)
            assert heard.usage[:3] == told[name].usage[:3]
            assert heard.finish is not None
            assert heard.finish.degraded == (() if name == "one token" else (HANDOFF_REFUSED,)), name
        await stage.quiet()


async def test_with_require_a_refused_handoff_is_an_error_of_ours(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PipelineConfig(disaggregation="require", migration=False)
    async with staged(folder, roles=("prefill", "decode"), config=config) as stage:
        monkeypatch.setattr(handoff, "TTL_S", -1.0)
        heard = await stage.ask(LONG)
        assert heard.error is not None
        assert (heard.error.kind, heard.error.code) == (ErrorKind.UNAVAILABLE, HANDOFF_REFUSED)
        await stage.quiet()


async def test_a_decode_worker_cut_at_any_token_is_never_noticed(folder: Path) -> None:
    request = replace(REQUESTS["script"], stop=StopParams(max_tokens=60))
    async with staged(folder, roles=("prefill", "decode", "decode")) as stage:
        await stage.ask(request)
        told = await stage.ask(request)
        for after in range(told.usage[1]):
            stage.knives[1].set(after)
            heard = await stage.ask(request)
            stage.knives[1].set(None)
            assert (heard.text, heard.calls) == (told.text, told.calls)
            assert heard.usage[:3] == told.usage[:3]
        assert stage.knives[1].cuts
        await stage.quiet()


async def test_without_migration_a_lost_decode_worker_is_an_error(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode"), policy=MigrationPolicy(enabled=False)) as stage:
        stage.knives[1].set(5)
        heard = await stage.ask(LONG)
        assert heard.error is not None
        assert heard.error.kind is ErrorKind.DISCONNECTED
        await stage.quiet()


async def test_a_decode_worker_that_is_gone_when_its_turn_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(folder, roles=("prefill", "decode", "decode")) as stage:
        told = await stage.ask(LONG)
        worker = stage.pipeline.connections.worker("w1")
        recovery = stage.pipeline.stages.recovery
        hand_over = recovery.on_handoff

        def too_late(stream: GenerationStream, handed: bytes) -> None:
            worker._connected.clear()
            worker.break_off()
            hand_over(stream, handed)

        monkeypatch.setattr(recovery, "on_handoff", too_late)
        heard = await stage.ask(LONG)
        assert heard.comparable.text == told.text
        assert heard.finish is not None
        assert heard.finish.migrations >= 1
        await stage.quiet()


async def test_a_client_that_leaves_at_any_moment_leaves_nothing_behind(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode"), speedup=20.0) as stage:
        for number in range(20):
            client = Client()
            generation = await stage.pipeline.start(LONG, [cast(Any, client)])
            await asyncio.sleep(0.002 * number)
            generation.cancel()
            await stage.quiet()


async def test_short_prompts_are_not_worth_the_way(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode"), config=PipelineConfig(disagg_min_tokens=40)) as stage:
        heard = await stage.ask(asking("short", "Hi."))
        assert stage.reservations.last == ("", "w1")
        assert heard.finish is not None
        assert not heard.finish.degraded
        await stage.ask(asking("longer", "A long tale of rivers and of gates and of mills. " * 10))
        assert stage.reservations.last == ("w0", "w1")


@pytest.mark.parametrize(("word", "mark"), [("pair_busy", (PREFILL_BUSY,)), ("few_uncached_tokens", ())])
async def test_what_the_router_passes_over_is_said(folder: Path, word: str, mark: tuple[str, ...]) -> None:
    async with staged(folder, roles=("prefill", "decode")) as stage:
        stage.reservations.skipped = word
        heard = await stage.ask(asking("skipped", "Hi."))
        assert heard.finish is not None
        assert heard.finish.degraded == mark


async def test_decode_workers_alone_say_that_they_are(folder: Path) -> None:
    async with staged(folder, roles=("decode",)) as stage:
        heard = await stage.ask(asking("alone", "Hi."))
        assert heard.finish is not None
        assert heard.finish.degraded == (NO_PREFILL,)


async def test_off_never_shares_and_require_never_runs_alone(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode"), config=PipelineConfig(disaggregation="off")) as stage:
        heard = await stage.ask(asking("off", "Hi."))
        assert stage.reservations.last == ("", "w1")
        assert heard.finish is not None
        assert not heard.finish.degraded
    for roles in (("decode",), ("aggregated",), ("prefill",)):
        config = PipelineConfig(disaggregation="require")
        async with staged(folder, roles=roles, config=config) as stage:
            with pytest.raises(SluiceError) as refused:
                await stage.ask(asking("require", "Hi."))
            assert refused.value.code == "no_prefill_workers"
            assert "--disaggregation" in refused.value.message
            await stage.quiet()


async def test_without_a_router_the_pair_is_made_here(folder: Path) -> None:
    async with staged(folder, roles=("prefill", "decode")) as stage:

        async def away(*arguments: Any, **more: Any) -> Any:
            raise no_answer("away")

        stage.reservations.route = away  # type: ignore[method-assign]
        workers = stage.pipeline.registry.workers
        workers["w1"] = replace(workers["w1"], capabilities=workers["w1"].capabilities - {"local_prefill"})
        heard = await stage.ask(asking("away", "Hi."))
        assert heard.finish is not None
        assert heard.finish.degraded == ("router_unavailable",)
        await stage.quiet()


@pytest.mark.parametrize("version", ["1", "2"])
async def test_without_a_router_pair_is_made_of_one_version_only(folder: Path, version: str) -> None:
    async with staged(folder, roles=("prefill", "decode", "decode")) as stage:

        async def away(*arguments: Any, **more: Any) -> Any:
            raise no_answer("away")

        stage.reservations.route = away  # type: ignore[method-assign]
        workers = stage.pipeline.registry.workers
        for name, runs in (("w0", version), ("w1", "1"), ("w2", "2")):
            alone = workers[name].capabilities - {"local_prefill"}
            workers[name] = replace(workers[name], engine="vllm", engine_version=runs, capabilities=alone)
        for number in range(6):
            _, route = await stage.pipeline.query(asking(f"away-{number}", "Hi."))
            assert (route.prefill_worker_id, route.worker_id) == ("w0", f"w{version}")
        await stage.quiet()
