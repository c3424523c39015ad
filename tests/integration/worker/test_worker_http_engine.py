"""The http engine against servers with the endpoints and KV events of vLLM and SGLang."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from services.common.base.errors import ENGINE_UNHEALTHY, ErrorKind, SluiceError
from services.common.net.ports import free_port
from services.common.types.hashing import block_hashes
from services.worker.contract.cache_events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from services.worker.contract.engine import EngineConfig, GenerateContext
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, StopParams, StructuredOutput
from services.worker.engines.http import engine
from services.worker.engines.http.engine import HttpEngine
from services.worker.engines.inprocess import event_proof
from services.worker.engines.shared import server_watch
from services.worker.kv_events import zmq_feed
from services.worker.settings import WorkerSettings
from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import BLOCK, CONTEXT, FakeServer, FakeSglang, FakeVllm, served
from tests.support.oracles.errors import raises_error
from tests.support.waiting import until

PROMPT = list(range(10, 10 + 2 * BLOCK + 3))
Make = Callable[..., FakeServer]
MakeVllm = Callable[..., FakeVllm]
MAKERS: dict[str, Make] = {
    "vllm": FakeVllm,
    "vllm-generate": lambda root, **more: FakeVllm(root, scale_out=True, **more),
    "sglang": FakeSglang,
    "sglang-incremental": lambda root, **more: FakeSglang(root, incremental=True, **more),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    root = str(build_tiny_model(tmp_path))
    return lambda **more: MAKERS[request.param](root, **more)


@pytest.fixture
def make_vllm(tmp_path: Path) -> MakeVllm:
    root = str(build_tiny_model(tmp_path))
    return lambda **more: FakeVllm(root, **more)


def engine_at(url: str, *flags: str, **options: Any) -> HttpEngine:
    args = ",".join(f"{name}={value}" for name, value in {"url": url, **options}.items())
    return HttpEngine.from_args(WorkerSettings.load(["--engine", "http", "--engine-args", args, *flags]))


@asynccontextmanager
async def started(fake: FakeServer, *flags: str, **options: Any) -> AsyncIterator[tuple[HttpEngine, EngineConfig]]:
    async with served(fake) as url:
        one = engine_at(url, *flags, **options)
        try:
            yield one, await one.start("w")
        finally:
            await one.cleanup()


def asked(prompt: Sequence[int] = PROMPT, max_tokens: int = 5, **more: Any) -> GenerateRequest:
    return GenerateRequest("r", "tiny", array("I", prompt), stop=StopParams(max_tokens=max_tokens), **more)


async def answer(one: HttpEngine, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in one.generate(request, GenerateContext(request.request_id))]


class Index:
    """The blocks that a router would hold."""

    def __init__(self, one: HttpEngine) -> None:
        self.held: set[int] = set()
        one.kv_event_sources()[0].subscribe(self.take)

    def take(self, batch: Sequence[KvEvent]) -> None:
        for event in batch:
            if isinstance(event, CacheCleared):
                self.held.clear()
            elif isinstance(event, BlocksStored):
                self.held.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                self.held.difference_update(event.hashes)

    async def until_has(self, prompt: Sequence[int]) -> None:
        await until(lambda: self.held >= set(block_hashes(prompt, BLOCK)))

    async def until_lacks(self, prompt: Sequence[int]) -> None:
        await until(lambda: not self.held & set(block_hashes(prompt, BLOCK)))


async def test_card_of_a_server_has_its_own_model_and_sizes(make: Make) -> None:
    fake = make()
    async with started(fake) as (_, config):
        assert (config.model, config.block_size, config.total_blocks) == ("tiny", BLOCK, 64)
        assert config.context_length in (CONTEXT, CONTEXT - 5)
        assert config.engine in ("vllm-http", "sglang-http")
        assert config.engine_version in ("0.33.0", "0.5.23")
        assert {"token_ids", "logprobs", "guided_json", "kv_events", "cache_salt"} <= config.capabilities
        assert not {"embeddings", "prefill", "bad_words", "priority", "sleep"} & config.capabilities
        host, _, port = config.http_address.rpartition(":")
        assert (host, port.isdecimal()) == ("127.0.0.1", True)


def freezable(fake: FakeServer) -> asyncio.Event:
    """Makes a server whose probes hang while the event is clear; it is set."""
    runs = asyncio.Event()
    runs.set()

    @fake.app.middleware("http")
    async def wait(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.method == "GET":
            await runs.wait()
        return await call_next(request)

    return runs


async def test_generations_of_a_stopped_server_fail_and_new_ones_until_it_runs_again(make: Make) -> None:
    fake = make()
    runs = freezable(fake)
    async with started(fake, silent_s=1.0) as (one, _):
        fake.gate.clear()
        running = [asyncio.create_task(answer(one, asked())) for _ in range(3)]
        await until(lambda: fake.running == 3)
        runs.clear()
        stopped_at = time.monotonic()
        for task in running:
            with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
                await task
        assert time.monotonic() - stopped_at < 1.0 + 2 * (engine.POLL_INTERVAL_S + 0.5) + 1
        with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
            await answer(one, asked())
        runs.set()
        fake.gate.set()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await answer(one, asked())
                    break
                except SluiceError:
                    await asyncio.sleep(0.1)


async def test_server_that_generates_while_its_probes_hang_is_not_taken_for_stopped(
    make_vllm: MakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow_steps(request: Request, count: int) -> AsyncIterator[int]:
        for index in range(count):
            yield index
            await asyncio.sleep(0.2)

    fake = make_vllm()
    runs = freezable(fake)
    monkeypatch.setattr(fake, "steps", slow_steps)
    async with started(fake, silent_s=1.0) as (one, _):
        runs.clear()
        assert await answer(one, asked(max_tokens=15))
        runs.set()


async def test_server_that_answers_probes_during_a_long_prefill_is_not_taken_for_stopped(make_vllm: MakeVllm) -> None:
    fake = make_vllm()
    async with started(fake, silent_s=0.5) as (one, _):
        fake.gate.clear()
        running = asyncio.create_task(answer(one, asked()))
        await asyncio.sleep(3)
        assert not running.done()
        fake.gate.set()
        assert await running


async def test_generation_gives_tokens_then_one_end_with_the_engines_usage(make: Make) -> None:
    async with started(make()) as (one, _):
        for cached in (0, 2 * BLOCK):
            *deltas, end = await answer(one, asked())
            assert [token for delta in deltas for token in delta.token_ids] == [100, 101, 102, 103, 104]
            assert end.finish_reason is FinishReason.LENGTH
            assert end.usage is not None
            assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(PROMPT), 5)
            assert end.usage.cached_tokens == cached


async def test_generation_with_logprobs_has_one_entry_for_each_token(make: Make) -> None:
    async with started(make()) as (one, _):
        *deltas, _end = await answer(one, asked(logprobs=2))
        positions = [position for delta in deltas for position in delta.logprobs]
        assert [position.chosen.token_id for position in positions] == [100, 101, 102, 103, 104]
        assert [(top.token_id, top.rank) for top in positions[0].top] == [(7, 1), (100, 2)]


async def test_generation_that_is_closed_ends_on_the_server(make: Make) -> None:
    fake = make()
    async with started(fake) as (one, _):
        fake.gate.clear()
        deltas = one.generate(asked(), GenerateContext("r"))
        await anext(deltas)
        await deltas.aclose()
        await until(lambda: fake.running == 0 and fake.disconnected == 1)
        if isinstance(fake, FakeSglang):
            await until(lambda: fake.aborted == [fake.bodies[-1]["rid"]])


@pytest.mark.parametrize("is_guided", [True, False])
@pytest.mark.parametrize("is_healthy", [True, False])
async def test_failure_before_the_first_token_is_the_constraints_while_the_server_is_healthy(
    make: Make, is_guided: bool, is_healthy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_watch, "LIFE_CHECK_INTERVAL_S", 0)
    fake = make()
    async with started(fake) as (one, _):
        fake.failure = (500, "Internal server error")
        fake.healthy = is_healthy
        guided = StructuredOutput("json_schema", '{"type": "object"}') if is_guided else None
        is_refusal = is_guided and is_healthy
        with raises_error(
            kind=ErrorKind.INVALID_ARGUMENT if is_refusal else ErrorKind.INTERNAL,
            param="response_format" if is_refusal else "",
        ):
            await answer(one, asked(guided=guided))


@pytest.mark.parametrize("status", [401, 502])
async def test_failure_of_the_access_to_a_server_is_not_the_constraints(make: Make, status: int) -> None:
    fake = make()
    async with started(fake) as (one, _):
        fake.failure = (status, "Bad gateway")
        with raises_error(kind=ErrorKind.INTERNAL, param=""):
            await answer(one, asked(guided=StructuredOutput("json_schema", '{"type": "object"}')))


async def test_generation_that_the_server_rejects_for_its_constraint_names_it(make: Make) -> None:
    fake = make()
    async with started(fake) as (one, _):
        fake.failure = (400, "Grammar error: unexpected token")
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="response_format", match="unexpected token"):
            await answer(one, asked(guided=StructuredOutput("ebnf", 'root ::= "a" |')))


async def test_generation_whose_stream_breaks_can_be_retried_elsewhere(make: Make) -> None:
    fake = make()
    async with started(fake) as (one, _):
        fake.breaks = True
        with pytest.raises(SluiceError) as caught:
            await answer(one, asked())
        assert caught.value.retryable
        fake.breaks = False
        assert (await answer(one, asked()))[-1].finish_reason is FinishReason.LENGTH


async def test_trace_headers_reach_the_server(make_vllm: MakeVllm) -> None:
    fake = make_vllm()
    async with started(fake) as (one, _):
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        _ = [delta async for delta in one.generate(asked(), GenerateContext("r", trace))]
        assert fake.headers[-1]["traceparent"] == trace["traceparent"]


async def test_load_is_the_servers_own(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "POLL_INTERVAL_S", 0.05)
    fake = make()
    fake.waiting, fake.used_blocks = 3, 16
    async with started(fake) as (one, _):
        fake.gate.clear()
        deltas = one.generate(asked(), GenerateContext("r"))
        await anext(deltas)
        await until(lambda: one.load()[0].running_requests == 1 and one.load()[0].cached_blocks >= 2)
        load = one.load()[0]
        assert (load.waiting_requests, load.used_blocks) == (3, 16)
        await deltas.aclose()


async def test_server_with_an_api_key_that_is_not_given_fails_the_start(make_vllm: MakeVllm) -> None:
    with pytest.raises(SluiceError, match="did not accept the worker's API key"):
        async with started(make_vllm(api_key="s3cret")):
            pass


async def test_server_that_is_absent_fails_the_start() -> None:
    one = engine_at(f"http://127.0.0.1:{free_port()}", start_s=0.2)
    with pytest.raises(SluiceError, match="did not become healthy"):
        await one.start("w")
    await one.cleanup()
    await one.cleanup()


@pytest.mark.parametrize("how", ["gone", "unhealthy"])
async def test_server_that_ends_fails_the_worker(make: Make, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "POLL_INTERVAL_S", 0.05)
    fake, failed = make(), list[BaseException]()
    async with served(fake) as url:
        one = engine_at(url)
        await one.start("w")
        one.on_failure = lambda name, error: failed.append(error)
        if how == "unhealthy":
            fake.healthy = False
            await until(lambda: failed)
    await until(lambda: failed)
    assert isinstance(failed[0], SluiceError)
    assert failed[0].kind is ErrorKind.ENGINE_SHUTDOWN
    await one.cleanup()


async def test_clear_cache_on_sglang_removes_all_blocks(tmp_path: Path) -> None:
    fake = FakeSglang(str(build_tiny_model(tmp_path)))
    async with started(fake) as (one, _):
        index = Index(one)
        await answer(one, asked())
        await index.until_has(PROMPT)
        await one.clear_cache()
        assert (index.held, fake.flushed) == (set(), 1)
        fake.gate.clear()
        deltas = one.generate(asked(), GenerateContext("r"))
        await anext(deltas)
        with pytest.raises(SluiceError, match="while requests are running"):
            await one.clear_cache()
        await deltas.aclose()


async def test_events_follow_what_the_engine_stores_and_removes(make: Make) -> None:
    fake = make()
    async with started(fake) as (one, _):
        index = Index(one)
        await answer(one, asked())
        await index.until_has(PROMPT)
        await fake.evict(PROMPT)
        await index.until_lacks(PROMPT)


async def test_events_before_the_start_are_replayed(make: Make) -> None:
    fake = make()
    _, event = fake.compute(PROMPT)
    await fake.publish(event)
    async with started(fake) as (one, _):
        await Index(one).until_has(PROMPT)


@pytest.mark.parametrize("replays", [True, False])
async def test_events_after_a_cut_socket_leave_no_stale_block(
    make: Make, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks removed while the socket was closed must go, with a replay exactly those, without one all."""
    monkeypatch.setattr(zmq_feed, "IDLE_S", 0.2)
    fake = make(replays=replays)
    assert fake.publisher is not None
    removed, kept, after = list(range(200, 248)), list(range(300, 348)), list(range(400, 448))
    async with started(fake) as (one, _):
        index = Index(one)
        for prompt in (removed, kept):
            await answer(one, asked(prompt))
            await index.until_has(prompt)
        fake.publisher.cut()
        await fake.evict(removed)
        await fake.publisher.restore()
        if replays:
            await index.until_lacks(removed)  # without any further event
            assert index.held >= set(block_hashes(kept, BLOCK))
            return
        async with asyncio.timeout(30):
            while not index.held >= set(block_hashes(after, BLOCK)):  # events before the reconnection are lost
                fake.cached.clear()
                await answer(one, asked(after))
                await asyncio.sleep(0.05)
        assert not index.held & set(block_hashes(removed, BLOCK))
        assert one.kv_event_sources()[0].degraded == "kv_events_lost"  # type: ignore[attr-defined]


async def test_events_with_another_block_size_than_declared_fail_the_start(make: Make) -> None:
    with pytest.raises(SluiceError, match="the engine's blocks have 16 tokens") as caught:
        async with started(make(), "--block-size", "24"):
            pass
    assert caught.value.param == "block_size"


async def test_events_whose_block_size_is_not_the_reported_one_fail_the_start(make_vllm: MakeVllm) -> None:
    fake = make_vllm()

    def lying(prompt: Sequence[int]) -> tuple[int, dict[str, Any]]:
        stored = {"type": "BlockStored", "block_hashes": [1], "token_ids": list(prompt[:24]), "block_size": 24}
        return 0, stored

    fake.compute = lying  # type: ignore[method-assign]
    with pytest.raises(SluiceError, match="The engine's block size is 24") as caught:
        async with started(fake):
            pass
    assert caught.value.param == "block_size"


async def _runs_without_events(fake: FakeServer, caplog: pytest.LogCaptureFixture, reason: str, **options: Any) -> None:
    with caplog.at_level(logging.WARNING):
        async with started(fake, **options) as (one, config):
            assert "kv_events" not in config.capabilities
            assert one.kv_event_sources() == ()
            assert (await answer(one, asked()))[-1].finish_reason is FinishReason.LENGTH
    assert "runs without KV events" in caplog.text
    assert reason in caplog.text


async def test_events_of_other_tokens_are_not_used(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_proof, "PROOF_WAITS_S", (0.2, 0.3))
    fake = make()
    honest = fake.compute

    def scrambled(prompt: Sequence[int]) -> tuple[int, dict[str, Any] | None]:
        cached, event = honest(prompt)
        return cached, event and {**event, "token_ids": [token + 1 for token in event["token_ids"]]}

    fake.compute = scrambled  # type: ignore[method-assign]
    await _runs_without_events(fake, caplog, "do not contain the tokens of a prompt")


async def test_events_that_never_arrive_are_not_used(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_proof, "PROOF_WAITS_S", (0.2, 0.3))
    fake = make()
    fake.tells = False
    await _runs_without_events(fake, caplog, "No KV events arrived from tcp://127.0.0.1:")


async def test_events_that_the_server_does_not_publish_are_reported(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    await _runs_without_events(make(events=False), caplog, "start it with --kv-events-config")


async def test_events_at_a_configured_endpoint_are_followed(make: Make) -> None:
    fake, other = make(), make()
    assert fake.publisher is not None
    assert other.publisher is not None
    options = {
        "kv_events": f"tcp://127.0.0.1:{fake.publisher.port}",
        "kv_replay": f"tcp://127.0.0.1:{fake.publisher.replay_port}",
    }
    async with started(fake, **options) as (one, _):
        await answer(one, asked())
        await Index(one).until_has(PROMPT)
    other.publisher.cut()


@pytest.mark.parametrize("usage_s", [0.0, 0.3])
@pytest.mark.parametrize("scale_out", [False, True])
async def test_vllm_last_tokens_come_with_the_usage(make_vllm: MakeVllm, scale_out: bool, usage_s: float) -> None:
    fake = make_vllm(scale_out=scale_out)
    async with started(fake) as (one, _):
        await answer(one, asked())
        fake.usage_s = usage_s
        request = asked()
        seen: list[tuple[int, bool]] = []
        loop = asyncio.get_running_loop()
        async for delta in one.generate(request, GenerateContext(request.request_id)):
            seen.append((len(delta.token_ids), delta.finish_reason is not None))
            now = loop.time()
            if delta.token_ids and sum(count for count, _ in seen) == 5:
                last_tokens_at = now
        assert delta.usage is not None
        assert delta.usage.cached_tokens == 2 * BLOCK
        assert now - last_tokens_at < 0.1
        assert seen[0][0] < 5 or usage_s == 0, "earlier tokens do not wait"


async def test_vllm_usage_that_never_comes_is_waited_for_briefly(
    make_vllm: MakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "TRAILING_S", 0.1)
    fake = make_vllm()
    async with started(fake) as (one, _):
        fake.usage_s = float("inf")
        async with asyncio.timeout(5):
            deltas = await answer(one, asked())
        assert sum(len(delta.token_ids) for delta in deltas) == 5
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert deltas[-1].usage is not None
        assert deltas[-1].usage.cached_tokens is None
