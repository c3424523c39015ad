"""The vllm-grpc engine against a server that speaks vLLM's messages."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.hashing import block_hashes
from services.worker.contract.cache_events import BlocksStored, CacheCleared, KvEvent
from services.worker.contract.engine import EngineConfig, GenerateContext
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest, StopParams, StructuredOutput
from services.worker.engines.inprocess import event_proof
from services.worker.engines.shared import server_watch
from services.worker.engines.vllm_grpc import VllmGrpcEngine
from services.worker.settings import WorkerSettings
from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_vllm import BLOCK, FakeVllm, fake_vllm
from tests.support.oracles.errors import raises_error
from tests.support.waiting import until

PROMPT = list(range(10, 20))


@asynccontextmanager
async def started(servicer: FakeVllm, folder: Path) -> AsyncIterator[tuple[VllmGrpcEngine, EngineConfig, Any]]:
    async with fake_vllm(servicer) as (address, server):
        argv = ["--engine", "vllm-grpc", "--model", f"tiny={build_tiny_model(folder)}"]
        engine = VllmGrpcEngine.from_args(WorkerSettings.load([*argv, "--engine-args", f"address={address}"]))
        try:
            yield engine, await engine.start("w"), server
        finally:
            await engine.cleanup()


def asked(request_id: str = "r", prompt: Sequence[int] = PROMPT, max_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(request_id, "tiny", array("I", prompt), stop=StopParams(max_tokens=max_tokens))


async def answer(engine: VllmGrpcEngine, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.generate(request, GenerateContext(request.request_id))]


class Index:
    def __init__(self, engine: VllmGrpcEngine) -> None:
        self.held: set[int] = set()
        engine.kv_event_sources()[0].subscribe(self.hear)

    def hear(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, CacheCleared):
                self.held.clear()
            elif isinstance(event, BlocksStored):
                self.held.update(event.hashes)

    async def until_has(self, prompt: Sequence[int]) -> None:
        await until(lambda: self.held >= set(block_hashes(prompt, BLOCK)))


async def test_the_card_is_what_the_server_says(tmp_path: Path) -> None:
    async with started(FakeVllm(), tmp_path) as (_, config, _server):
        assert (config.context_length, config.vocab_size, config.block_size, config.total_blocks) == (256, 500, 4, 64)
        assert (config.engine, config.engine_version, config.max_sequences) == ("vllm-grpc", "0.32.0", 8)
        assert {"token_ids", "logprobs", "guided_json", "kv_events"} <= config.capabilities
        assert not {"lora", "cache_salt", "bad_words", "embeddings", "prefill"} & config.capabilities


async def test_tokens_and_one_end(tmp_path: Path) -> None:
    async with started(FakeVllm(), tmp_path) as (engine, _, _server):
        *deltas, end = await answer(engine, asked())
        assert [token for delta in deltas for token in delta.token_ids] == [1000, 1001, 1002, 1003, 1004]
        assert deltas[0].cached_tokens == 0
        assert end.finish_reason is FinishReason.LENGTH
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (10, 5, 0)
        *_, end = await answer(engine, asked())
        assert end.usage is not None
        assert end.usage.cached_tokens == 2 * BLOCK


@pytest.mark.parametrize("resumes", [True, False])
async def test_a_broken_stream_of_events_goes_on(tmp_path: Path, resumes: bool) -> None:
    servicer = FakeVllm(resumes=resumes)
    async with started(servicer, tmp_path) as (engine, _, _server):
        index = Index(engine)
        await answer(engine, asked())
        await index.until_has(PROMPT)
        servicer.break_streams.set()
        await until(lambda: len(servicer.starts) > 1)
        missed = list(range(30, 38))
        servicer.publish(missed)
        servicer.break_streams.clear()
        after = list(range(50, 58))
        if resumes:
            await index.until_has(missed)
            assert index.held >= set(block_hashes(PROMPT, BLOCK))
        else:
            await until(lambda: servicer.starts[-1] == 0 and len(servicer.starts) > 2)

            async def publish_until_heard() -> None:
                while not index.held >= set(block_hashes(after, BLOCK)):
                    servicer.publish(after)
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(publish_until_heard(), 30)
            assert not index.held & set(block_hashes(PROMPT, BLOCK)), "whether the engine still holds them is unknown"


async def test_a_cleared_cache_is_told(tmp_path: Path) -> None:
    servicer = FakeVllm()
    async with started(servicer, tmp_path) as (engine, _, _server):
        index = Index(engine)
        await answer(engine, asked())
        await index.until_has(PROMPT)
        await engine.clear_cache()
        assert (index.held, servicer.flushed) == (set(), 1)


@pytest.mark.parametrize("how", ["gone", "unhealthy"])
async def test_the_death_of_the_server_fails_the_worker(tmp_path: Path, how: str) -> None:
    servicer = FakeVllm()
    async with started(servicer, tmp_path) as (engine, _, server):
        servicer.gate.clear()
        failed: list[BaseException] = []
        engine.on_failure = lambda name, error: failed.append(error)
        deltas = engine.generate(asked(), GenerateContext("r"))
        await anext(deltas)
        if how == "gone":
            await server.stop(0)
            with pytest.raises(SluiceError) as caught:
                await anext(deltas)
            assert (caught.value.kind, caught.value.retryable) == (ErrorKind.ENGINE_SHUTDOWN, True)
        servicer.healthy = False
        await until(lambda: failed)
        assert isinstance(failed[0], SluiceError)
        assert failed[0].retryable
        await deltas.aclose()


async def test_a_request_that_fails_because_the_engine_is_dead_can_be_retried(tmp_path: Path) -> None:
    servicer = FakeVllm()
    async with started(servicer, tmp_path) as (engine, _, _server):
        servicer.gate.clear()
        deltas = engine.generate(asked(), GenerateContext("r"))
        await anext(deltas)
        servicer.healthy = False
        servicer.gate.set()
        with pytest.raises(SluiceError) as caught:
            await anext(deltas)
        assert (caught.value.kind, caught.value.retryable) == (ErrorKind.ENGINE_SHUTDOWN, True)


@pytest.mark.parametrize("guided", [StructuredOutput("json_schema", '{"type": "object"}'), None])
async def test_failure_before_the_first_token_is_the_constraints_where_there_is_one(
    tmp_path: Path, guided: StructuredOutput | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_watch, "LIFE_CHECK_INTERVAL_S", 0)
    servicer = FakeVllm()
    servicer.refuses = True
    async with started(servicer, tmp_path) as (engine, _, _server):
        request = replace(asked(), guided=guided)
        if guided is None:
            (end,) = await answer(engine, request)
            assert end.error is not None
            assert end.error.kind is ErrorKind.INTERNAL
            return
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="response_format"):
            await answer(engine, request)


async def test_nobody_answers_at_the_address(tmp_path: Path) -> None:
    argv = ["--engine", "vllm-grpc", "--model", f"tiny={build_tiny_model(tmp_path)}"]
    settings = WorkerSettings.load([*argv, "--engine-args", "address=127.0.0.1:1,start_s=0.2"])
    engine = VllmGrpcEngine.from_args(settings)
    with pytest.raises(SluiceError, match="did not become ready"):
        await engine.start("w")
    await engine.cleanup()
    await engine.cleanup()


def at(address: str, *flags: str) -> VllmGrpcEngine:
    argv = ["--engine", "vllm-grpc", "--engine-args", f"address={address}", *flags]
    return VllmGrpcEngine.from_args(WorkerSettings.load(argv))


async def test_running_server_with_a_larger_declared_block_size_reports_combined_blocks(tmp_path: Path) -> None:
    folder = f"tiny={build_tiny_model(tmp_path)}"
    async with fake_vllm(FakeVllm()) as (address, _):
        engine = at(address, "--model", folder, "--block-size", "8")
        try:
            config = await engine.start("w")
            assert (config.block_size, config.total_blocks) == (8, 32)
            assert "kv_events" in config.capabilities
            index = Index(engine)
            await answer(engine, asked())
            await until(lambda: index.held >= set(block_hashes(PROMPT, 8)))
        finally:
            await engine.cleanup()


async def test_running_server_with_an_incompatible_block_size_is_rejected(tmp_path: Path) -> None:
    folder = f"tiny={build_tiny_model(tmp_path)}"
    async with fake_vllm(FakeVllm()) as (address, _):
        engine = at(address, "--model", folder, "--block-size", "6")
        with pytest.raises(SluiceError, match="--block-size is 6, but the engine's blocks have 4 tokens"):
            await engine.start("w")
        await engine.cleanup()


async def test_running_server_whose_events_cannot_be_proven_runs_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_proof, "PROOF_WAITS_S", (0.2, 0.3))
    servicer = FakeVllm()
    servicer.tells = False
    async with started(servicer, tmp_path) as (engine, config, _server):
        assert "kv_events" not in config.capabilities
        assert not engine.kv_event_sources()
        assert (await answer(engine, asked()))[-1].finish_reason is FinishReason.LENGTH
    assert "No KV events arrived from 127.0.0.1:" in caplog.text
