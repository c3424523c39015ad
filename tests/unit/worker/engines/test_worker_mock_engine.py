"""The mock engine as a whole, held to the contract every engine is held to."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ErrorKind, SluiceError
from services.common.types.hashing import block_hashes
from services.worker.contract.cache_events import CacheCleared, KvEvent
from services.worker.contract.engine import GenerateContext
from services.worker.contract.generation import Delta, FinishReason, GenerateRequest
from services.worker.engines import BUILT_IN, engine_names, find_engine
from services.worker.engines.mock import MockEngine
from services.worker.engines.mock.timing import MAX_LAG_S, StepPacer
from services.worker.settings import WorkerSettings
from tests.support.data.tiny_models import CONTEXT_LENGTH
from tests.support.fakes.engines import RecordingSink, replay, request
from tests.support.oracles.errors import raises_error


@pytest.fixture
def make(folder: Path) -> Any:
    """Starts mock engines on the tiny model, fast unless told otherwise."""

    @asynccontextmanager
    async def started(**fields: Any) -> AsyncIterator[MockEngine]:
        engine = MockEngine.from_args(WorkerSettings(model=f"tiny={folder}", **{"speedup": 1e6, **fields}))
        await engine.start("w")
        try:
            yield engine
        finally:
            await engine.cleanup()

    return started


async def collect(engine: MockEngine, asked: GenerateRequest) -> list[Delta]:
    async with asyncio.timeout(20):
        return [delta async for delta in engine.generate(asked, GenerateContext(asked.request_id))]


async def test_card_has_the_values_of_model_and_settings(folder: Path) -> None:
    engine = MockEngine.from_args(WorkerSettings(model=f"tiny={folder}", adapters=["polite"], total_blocks=100))
    config = await engine.start("w")
    assert config.model == "tiny"
    assert config.processor == "hf"
    assert len(config.fingerprint) == 64
    assert config.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]
    assert config.context_length == 1600  # the whole cache is smaller than the model's context
    assert config.adapters == ("polite",)
    assert {"token_ids", "kv_events", "lora"} <= config.capabilities
    await engine.cleanup()


@pytest.mark.parametrize(("setting", "length"), [(0, CONTEXT_LENGTH), (512, 512)])
async def test_the_context_is_the_models_unless_set(folder: Path, setting: int, length: int) -> None:
    engine = MockEngine.from_args(WorkerSettings(model=f"tiny={folder}", context_length=setting))
    assert (await engine.start("w")).context_length == length
    await engine.cleanup()


async def test_drain_waits_for_running_requests(make: Any) -> None:
    async with make() as engine:
        sink = RecordingSink()
        engine.submit(request(max_tokens=50, ignore_eos=True), GenerateContext("r"), sink)
        async with asyncio.timeout(20):
            await engine.drain()
        assert sink.reason is FinishReason.LENGTH


async def test_events_and_a_cleared_cache_replay_to_the_truth(make: Any) -> None:
    received: list[KvEvent] = []
    prompt = array("I", range(3, 103))
    async with make() as engine:
        (source,) = engine.kv_event_sources()
        assert engine.kv_event_sources()[0] is source
        source.subscribe(received.extend)
        await collect(engine, request("a", prompt, max_tokens=1))
        present: set[int] = set()
        replay(received, present)
        assert present == set(block_hashes(prompt, 16))
        await engine.clear_cache()
        assert isinstance(received[-1], CacheCleared)
        assert engine.load()[0].cached_blocks == 0
        again = await collect(engine, request("b", prompt, max_tokens=1))
    assert again[0].cached_tokens == 0


async def test_clearing_while_a_step_runs_keeps_the_events_in_order(make: Any) -> None:
    received: list[KvEvent] = []
    async with make(engine_args="timing=fixed,fixed_step_ms=1000,fixed_prefill_us=0", speedup=1) as engine:
        engine.kv_event_sources()[0].subscribe(received.extend)
        sink = RecordingSink()
        engine.submit(request(prompt=range(3, 103), max_tokens=2, ignore_eos=True), GenerateContext("r"), sink)
        for _ in range(5):
            await asyncio.sleep(0)
        assert engine.load()[0].cached_blocks
        assert not received  # the step that computes the prompt is still running
        await engine.clear_cache()
        async with asyncio.timeout(10):
            await sink.done.wait()
        present: set[int] = set()
        replay(received, present)
        assert present == set()
        assert engine.load()[0].cached_blocks == 0


async def test_cleanup_twice_and_without_a_start(folder: Path) -> None:
    engine = MockEngine.from_args(WorkerSettings(model=f"tiny={folder}"))
    await engine.cleanup()
    await engine.cleanup()
    with pytest.raises(SluiceError):
        engine.submit(request(), GenerateContext("r"), RecordingSink())


async def test_cleanup_ends_what_still_runs(make: Any) -> None:
    async with make(speedup=1.0) as engine:
        sink = RecordingSink()
        engine.submit(request(ignore_eos=True), GenerateContext("r"), sink)
        await engine.cleanup()
        assert sink.reason is FinishReason.CANCELLED


async def test_missing_model_raises_an_error_that_names_it(tmp_path: Path) -> None:
    engine = MockEngine.from_args(WorkerSettings(model=f"tiny={tmp_path / 'nothing'}"))
    with raises_error(kind=ErrorKind.NOT_FOUND):
        await engine.start("w")


async def test_short_steps_do_not_let_the_clock_run_ahead() -> None:
    loop = asyncio.get_running_loop()
    pacer = StepPacer()
    started = pacer.now
    for _ in range(200):
        await pacer.spend(0.0002)
        assert pacer.now - loop.time() < 0.001
    assert loop.time() - started >= 0.2 * 0.2 - 0.001
    assert pacer.now >= started + 200 * 0.0002 - 1e-9


async def test_after_a_stall_the_clock_catches_up_only_so_far() -> None:
    loop = asyncio.get_running_loop()
    pacer = StepPacer()
    pacer.now = loop.time() - 5
    await pacer.spend(0.001)
    assert pacer.now >= loop.time() - MAX_LAG_S - 0.5


def test_engines_resolve_by_name_path_and_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mock" in engine_names()
    assert find_engine("mock") is MockEngine
    assert find_engine(BUILT_IN["mock"]) is MockEngine
    monkeypatch.setattr("services.common.packages.extensions.entry_points", lambda **_: ())
    assert find_engine("mock") is MockEngine
    for name in (
        "no-such-engine",
        "no.such.module:Engine",
        "services.worker.contract.engine:Nothing",
        "asyncio:Event",
    ):
        with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
            find_engine(name)
