"""Operating a worker: adapters on the card, sleep in order, limits, embeddings, starts that fail."""

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
from services.worker.contract.engine import Embedded, EngineConfig
from services.worker.engines.mock.loading import available_bytes, check_memory
from services.worker.generation.response_sink import StreamResponseSink
from services.worker.serving import control
from services.worker.serving.control import ASLEEP, Controls
from services.worker.serving.embedding import EmbedCall, embed
from services.worker.serving.worker import Worker
from tests.support.fakes.engines import CONFIG, ScriptedEngine, request
from tests.support.oracles.errors import raises_error
from tests.support.servers.mock_workers import generate, mock_worker


@asynccontextmanager
async def mock(folder: Path, **fields: Any) -> AsyncIterator[tuple[Worker, Controls]]:
    async with mock_worker(folder, **fields) as worker:
        yield worker, Controls(worker, lambda: True)


async def served(worker: Worker, name: str = "r", **fields: Any) -> list[int]:
    deltas = await generate(worker, request(name, **fields))
    return [token_id for delta in deltas for token_id in delta.token_ids]


async def test_adapter_loaded_again_does_not_use_blocks_of_the_earlier_one(folder: Path, tmp_path: Path) -> None:
    async with mock(folder, block_size=4) as (worker, controls):
        prompt = range(5, 45)

        async def cached(lora: str) -> int | None:
            *_, end = await generate(worker, request("r", prompt, lora=lora))
            return end.usage.cached_tokens if end.usage is not None else None

        for path in (str(tmp_path), str(tmp_path), ""):  # the same folder may hold other files
            await controls.run("load_lora", {"name": "polite", "path": path})
            assert await cached("polite") == 0
            assert await cached("polite") == 36
            await controls.run("unload_lora", {"name": "polite"})


async def test_adapter_that_is_loaded_is_not_loaded_again(folder: Path) -> None:
    async with mock(folder) as (worker, controls):
        await controls.run("load_lora", {"name": "polite"})
        with raises_error(kind=ErrorKind.FAILED_PRECONDITION, code="adapter_loaded"):
            await controls.run("load_lora", {"name": "polite"})
        assert worker.config.adapters == ("polite",)


@pytest.mark.parametrize(
    ("action", "arguments", "kind"),
    [
        ("load_lora", {}, ErrorKind.INVALID_ARGUMENT),
        ("load_lora", {"name": "tiny"}, ErrorKind.INVALID_ARGUMENT),
        ("unload_lora", {"name": "unknown"}, ErrorKind.NOT_FOUND),
        ("sleep", {"level": "7"}, ErrorKind.INVALID_ARGUMENT),
        ("inject_fault", {"fault": "flood"}, ErrorKind.INVALID_ARGUMENT),
    ],
)
async def test_an_action_that_is_refused_changes_nothing(
    folder: Path, action: str, arguments: dict[str, str], kind: ErrorKind
) -> None:
    async with mock(folder) as (worker, controls):
        with raises_error(kind=kind):
            await controls.run(action, arguments)
        assert worker.config.adapters == ()
        assert await served(worker)


async def test_sleep_waits_for_what_runs_and_refuses_until_wake(folder: Path) -> None:
    async with mock(folder) as (worker, controls):
        received: list[str] = []
        worker.gate.on_serving = received.append
        await served(worker, "warm", prompt=range(3, 40))
        assert worker.load()[0].cached_blocks > 0
        delivery = StreamResponseSink()
        worker.submit(request("running", max_tokens=300, ignore_eos=True), delivery)
        await controls.run("sleep", {"level": "2"})
        assert delivery.ended
        assert delivery.delivered == 300
        assert received == [ASLEEP]
        assert worker.load()[0].cached_blocks == 0
        with raises_error(code="asleep", retryable=True):
            await served(worker)
        with pytest.raises(SluiceError):
            await vectors_of(worker, "tiny", [array("I", [1])], 0, "")
        await controls.run("wake", {})
        assert received == [ASLEEP, ""]
        assert await served(worker)


async def test_a_worker_that_sleeps_is_not_woken_by_a_sleep_that_is_refused(folder: Path) -> None:
    async with mock(folder) as (worker, controls):
        await controls.run("sleep", {})
        with pytest.raises(SluiceError, match="level"):
            await controls.run("sleep", {"level": "7"})
        assert worker.phases.name == ASLEEP
        assert worker.gate.refusal is not None
        assert worker.gate.refusal.code == "asleep"
        await controls.run("wake", {})
        assert await served(worker)
        with pytest.raises(SluiceError, match="level"):
            await controls.run("sleep", {"level": "7"})
        assert worker.gate.refusal is None


async def test_sleep_gives_up_on_requests_that_do_not_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "QUIET_S", 0.01)
    async with mock(folder, engine_args="fault=hang") as (worker, controls):
        worker.submit(request(), StreamResponseSink())
        with raises_error(kind=ErrorKind.FAILED_PRECONDITION):
            await controls.run("sleep", {})
        assert worker.phases.name == ""


async def test_request_above_the_limit_is_overloaded(folder: Path) -> None:
    async with mock(folder, max_live=2, engine_args="fault=hang") as (worker, _):
        worker.submit(request("a"), StreamResponseSink())
        worker.submit(request("b"), StreamResponseSink())
        with raises_error(kind=ErrorKind.OVERLOADED):
            worker.submit(request("c"), StreamResponseSink())
        worker.abort("a")
        worker.submit(request("c"), StreamResponseSink())


async def vectors_of(
    worker: Worker, model: str, inputs: Sequence[array[int]], dimensions: int = 0, lora: str = ""
) -> Embedded:
    return await embed(worker, EmbedCall(model, inputs, [0] * len(inputs), dimensions, lora))


async def test_a_drain_waits_for_embeddings_and_the_limit_counts_them() -> None:
    class Slow(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            return replace(CONFIG, capabilities=frozenset({"embeddings"}))

        async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
            await self.release.wait()
            return Embedded([bytes(4)], 1)

    engine = Slow()
    worker = Worker(engine, "w", max_live=1)
    await worker.start()
    inputs = [array("I", [1])]
    first = asyncio.create_task(vectors_of(worker, "tiny", inputs, 0, ""))
    await asyncio.sleep(0)
    with raises_error(kind=ErrorKind.OVERLOADED):
        await vectors_of(worker, "tiny", inputs, 0, "")
    draining = asyncio.create_task(worker.drain(20))
    await asyncio.sleep(0.01)
    assert not draining.done()
    engine.release.set()
    assert (await first).prompt_tokens == 1
    async with asyncio.timeout(30):
        await draining


@pytest.mark.parametrize("vectors", [[], [b""], [b"abc"], [bytes(4), bytes(4)]])
async def test_an_engine_that_embeds_wrongly_is_found_out(vectors: Sequence[bytes]) -> None:
    class Wrong(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            return replace(CONFIG, capabilities=frozenset({"embeddings"}))

        async def embed(self, inputs: Sequence[array[int]], dimensions: int, lora: str = "") -> Embedded:
            return Embedded(vectors, 1)

    worker = Worker(Wrong(), "w")
    await worker.start()
    with raises_error(kind=ErrorKind.INTERNAL):
        await vectors_of(worker, "tiny", [array("I", [1])], 0, "")


async def test_engine_that_returns_another_number_of_classes_is_refused() -> None:
    class Wrong(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            return replace(CONFIG, capabilities=frozenset({"classification"}), labels=("good", "bad"))

        async def classify(
            self, inputs: Sequence[array[int]], second_text_at: Sequence[int], lora: str = ""
        ) -> Embedded:
            return Embedded([bytes(4)], 1)

    worker = Worker(Wrong(), "w")
    await worker.start()
    with raises_error(kind=ErrorKind.INTERNAL):
        await vectors_of(worker, "tiny", [array("I", [1])])


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (MemoryError(), "not enough memory"),
        (ValueError("no config.json in folder\nTraceback: secret"), "ValueError: no config.json in folder."),
        (SluiceError(ErrorKind.NOT_FOUND, "Model folder x does not exist."), "Model folder x does not exist."),
    ],
)
async def test_an_engine_that_cannot_start_is_one_sentence(cause: Exception, message: str) -> None:
    class Unable(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            raise cause

    worker = Worker(Unable(), "w")
    with pytest.raises(SluiceError) as error:
        await worker.start()
    assert message in error.value.message
    assert "secret" not in error.value.message
    assert "\n" not in error.value.message


def test_blocks_that_do_not_fit_into_memory_are_refused() -> None:
    free = available_bytes()
    assert free is None or free > 0
    check_memory(16_384)
    if free is not None:
        with pytest.raises(SluiceError, match="Not enough memory"):
            check_memory(10**12)


async def test_startup_phases_are_reported() -> None:
    seen: list[tuple[str, float | None]] = []

    class Loading(ScriptedEngine):
        async def start(self, worker_id: str) -> EngineConfig:
            self.on_phase("loading weights", 0.5)
            seen.append((worker.phases.name, worker.phases.share))
            self.on_phase("warming up", None)
            seen.append((worker.phases.name, worker.phases.share))
            return CONFIG

    worker = Worker(Loading(), "w")
    assert worker.phases.name == "starting"
    await worker.start()
    assert seen == [("loading weights", 0.5), ("warming up", None)]
    assert (worker.phases.name, worker.phases.share) == ("", None)
