"""Engines whose server has stopped, such as by SIGSTOP: its connections stay open, and nothing comes from it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.common.base.errors import ENGINE_UNHEALTHY, ErrorKind, SluiceError
from services.worker.contract.engine import GenerateContext, LLMEngine
from services.worker.contract.generation import Delta, GenerateRequest, StopParams
from services.worker.engines.http.engine import HttpEngine
from services.worker.engines.openai import engine as openai_engine
from services.worker.engines.openai.engine import OpenAiEngine
from services.worker.engines.shared.server_watch import ServerWatch
from services.worker.engines.vllm_grpc import VllmGrpcEngine
from services.worker.settings import WorkerSettings
from tests.support.data.tiny_models import build_tiny_model
from tests.support.fakes.fake_http_engines import served
from tests.support.fakes.fake_openai import KEY, FakeOpenAi
from tests.support.fakes.fake_vllm import FakeVllm, fake_vllm
from tests.support.oracles.errors import raises_error
from tests.support.waiting import until

SILENT_S = 1.0


@dataclass
class Rig:
    """An engine and its server.

    Attributes:
        runs: cleared: the server is stopped.
        gate: cleared: generations wait.
        running: the generations that have begun on the server.
    """

    engine: LLMEngine
    runs: asyncio.Event
    gate: asyncio.Event
    running: Callable[[], int]
    request: GenerateRequest

    async def answer(self) -> list[Delta]:
        return [delta async for delta in self.engine.generate(self.request, GenerateContext("r"))]


@asynccontextmanager
async def started(engine: LLMEngine) -> AsyncIterator[LLMEngine]:
    try:
        await engine.start("w")
        yield engine
    finally:
        await engine.cleanup()


@asynccontextmanager
async def openai(folder: Path) -> AsyncIterator[Rig]:
    (folder / "key").write_text(KEY)
    fake = FakeOpenAi()
    async with served(fake) as url:  # type: ignore[arg-type]
        args = f"url={url},silent_s={SILENT_S},api_key_file={folder / 'key'}"
        engine = OpenAiEngine.from_args(WorkerSettings.load(["--engine", "openai", "--engine-args", args]))
        request = GenerateRequest("r", "server-model", text="Hi")
        async with started(engine):
            yield Rig(engine, fake.runs, fake.runs, lambda: len(fake.bodies), request)


@asynccontextmanager
async def vllm_grpc(folder: Path) -> AsyncIterator[Rig]:
    fake = FakeVllm()
    async with fake_vllm(fake) as (address, _):
        args = f"address={address},silent_s={SILENT_S}"
        argv = ["--engine", "vllm-grpc", "--model", f"tiny={build_tiny_model(folder)}", "--engine-args", args]
        engine = VllmGrpcEngine.from_args(WorkerSettings.load(argv))
        request = GenerateRequest("r", "tiny", array("I", range(10, 20)), stop=StopParams(max_tokens=5))
        async with started(engine):
            before = len(fake.prompts)
            yield Rig(engine, fake.runs, fake.gate, lambda: len(fake.prompts) - before, request)


@pytest.mark.parametrize("rig_of", [openai, vllm_grpc])
async def test_generations_of_a_stopped_server_fail_and_new_ones_until_it_runs_again(
    rig_of: Callable[[Path], AbstractAsyncContextManager[Rig]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_engine, "POLL_INTERVAL_S", 0.2)
    async with rig_of(tmp_path) as rig:
        assert await rig.answer()
        rig.gate.clear()
        running = [asyncio.create_task(rig.answer()) for _ in range(3)]
        await until(lambda: rig.running() == 4)
        rig.runs.clear()
        stopped_at = time.monotonic()
        for task in running:
            with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
                await task
        assert time.monotonic() - stopped_at < SILENT_S + 2 * (0.5 + SILENT_S / 2) + 1
        with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
            await rig.answer()
        rig.gate.set()
        rig.runs.set()
        await until(lambda: answered(rig))


async def answered(rig: Rig) -> bool:
    try:
        return bool(await rig.answer())
    except SluiceError:
        return False


async def test_embeddings_of_a_stopped_server_fail(tmp_path: Path) -> None:
    fake = FakeVllm(is_generation=False)
    async with fake_vllm(fake) as (address, _):
        args = f"address={address},silent_s={SILENT_S}"
        argv = ["--engine", "vllm-grpc", "--model", f"tiny={build_tiny_model(tmp_path)}", "--engine-args", args]
        async with started(VllmGrpcEngine.from_args(WorkerSettings.load(argv))) as engine:
            inputs = [array("I", range(10, 20))]
            assert (await engine.embed(inputs, 0)).prompt_tokens == 10
            fake.runs.clear()
            with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
                await engine.embed(inputs, 0)


@pytest.mark.parametrize("engine", ["http", "openai", "vllm-grpc"])
@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "true"])
def test_silence_that_is_no_number_of_seconds_is_rejected(engine: str, seconds: str) -> None:
    where = "address=127.0.0.1:1" if engine == "vllm-grpc" else "url=http://127.0.0.1:1"
    settings = WorkerSettings.load(["--engine", engine, "--engine-args", f"{where},silent_s={seconds}"])
    make = {"http": HttpEngine.from_args, "openai": OpenAiEngine.from_args, "vllm-grpc": VllmGrpcEngine.from_args}
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="engine_args", match="silent_s"):
        make[engine](settings)


class Server:
    """What a watch probes: `answers` in turn, of which an Event is waited for and an error raised."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    async def probe(self) -> object:
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, SluiceError):
            raise answer
        return answer

    async def report(self) -> None: ...


@asynccontextmanager
async def watched(server: Server, silent_s: float = 0.4) -> AsyncIterator[ServerWatch]:
    watch = ServerWatch(silent_s, 0.01, 3)
    running = asyncio.create_task(watch.run(server.probe, server.report))
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.wait({running})


async def test_server_whose_start_took_long_is_not_taken_for_stopped_by_one_late_probe() -> None:
    server = Server(asyncio.Event())
    watch = ServerWatch(0.4, 0.01, 3)
    await asyncio.sleep(0.5)
    running = asyncio.create_task(watch.run(server.probe, server.report))
    await asyncio.sleep(0.35)
    watch.check()
    running.cancel()


async def test_server_that_answers_probes_with_errors_is_not_taken_for_stopped() -> None:
    late = SluiceError(ErrorKind.OVERLOADED, "busy")
    async with asyncio.timeout(5):
        watch = ServerWatch(0.2, 0.01, 3, fails=lambda error: False)
        server = Server(*[late] * 50)
        running = asyncio.create_task(watch.run(server.probe, server.report))
        while server.answers:
            watch.check()
            await asyncio.sleep(0.01)
        running.cancel()


async def test_server_that_says_its_engine_has_exited_ends_the_watch_at_once() -> None:
    watch = ServerWatch(60.0, 0.01, 3)
    server = Server(False, False)
    with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN):
        await watch.run(server.probe, server.report)
    assert server.answers == [False]


async def test_answer_to_a_request_ends_the_refusal_of_new_ones() -> None:
    async with watched(Server(*[asyncio.Event() for _ in range(100)])) as watch:
        with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
            await watch.wait(asyncio.Event().wait())
        with raises_error(kind=ErrorKind.ENGINE_SHUTDOWN, code=ENGINE_UNHEALTHY):
            watch.check()
        assert await watch.wait(asyncio.sleep(0, "token")) == "token"
        watch.check()


async def test_a_wait_that_times_out_by_itself_is_not_taken_for_a_stopped_server() -> None:
    async def late() -> Any:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await ServerWatch(1.0, 1.0, 3).wait(late())
