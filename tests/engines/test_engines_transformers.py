"""The transformers engine against transformers itself, as real worker processes of its own environment."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.common.base.errors import ErrorKind, SluiceError
from sluice.v1 import worker_pb2
from tests.engines import engine_suite as suite
from tests.support.data.tiny_models import ServableFolders, build_servable

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

FLAGS = ("--block-size", "16", "--total-blocks", "512", "--max-batched-tokens", "512", "--max-sequences", "64")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


@pytest.fixture(scope="module")
def engine(folders: ServableFolders) -> suite.EngineUnderTest:
    script = Path(__file__).with_name("offline_transformers.py")
    return suite.EngineUnderTest(
        name="transformers",
        python=suite.interpreter("transformers"),
        model=folders.embedder,
        flags=(*FLAGS, "--adapters", f"one={folders.adapter},two={folders.second_adapter}"),
        env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"},
        offline=("-P", str(script)),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(engine: suite.EngineUnderTest) -> AsyncIterator[suite.RunningWorker]:
    async with suite.running(engine) as started:
        yield started


async def test_greedy_equals_generate(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.greedy_equals_offline(engine, worker)


async def test_logprobs(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.logprobs_equal_offline(engine, worker)


async def test_embeddings(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.embeddings_equal_offline(engine, worker)


async def test_prompt_logprobs(worker: suite.RunningWorker) -> None:
    await suite.prompt_logprobs_cover_the_prompt(worker)


async def test_adapters(engine: suite.EngineUnderTest, worker: suite.RunningWorker, folders: ServableFolders) -> None:
    await suite.adapters_equal_offline(engine, worker, {"one": folders.adapter, "two": folders.second_adapter})


async def test_adapters_can_be_loaded_and_unloaded_while_serving(
    worker: suite.RunningWorker, folders: ServableFolders
) -> None:
    load, unload = worker_pb2.ControlRequest.ACTION_LOAD_LORA, worker_pb2.ControlRequest.ACTION_UNLOAD_LORA

    async def control(action: worker_pb2.ControlRequest.Action.ValueType, **arguments: str) -> None:
        await worker.stub.Control(worker_pb2.ControlRequest(action=action, arguments=arguments), timeout=60)

    prompt = suite.prompts(1, 40, 40, seed=81)[0]
    await control(load, name="late", path=str(folders.adapter))
    one = await suite.generate(worker, suite.request("late-1", prompt, 12, lora="late"))
    await control(unload, name="late")
    with pytest.raises(SluiceError) as caught:
        await suite.generate(worker, suite.request("late-2", prompt, 12, lora="late"))
    assert caught.value.kind is ErrorKind.NOT_FOUND
    await control(load, name="late", path=str(folders.second_adapter))
    two = await suite.generate(worker, suite.request("late-3", prompt, 12, lora="late"))
    assert two.cached_tokens == 0
    assert two.token_ids != one.token_ids
    with pytest.raises(grpc.aio.AioRpcError, match="contains no valid adapter"):
        await control(load, name="broken", path=str(folders.model))


async def test_guided_json(worker: suite.RunningWorker, folders: ServableFolders) -> None:
    tokenizer = Tokenizer.from_file(str(folders.embedder / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    await suite.bad_grammars_are_refused_and_serving_goes_on(worker)


async def test_cancellation_of_500_requests_frees_their_blocks(
    engine: suite.EngineUnderTest, worker: suite.RunningWorker
) -> None:
    await suite.random_cancels_leak_nothing(engine, worker)


async def test_sigterm_under_load(engine: suite.EngineUnderTest) -> None:
    await suite.sigterm_lets_running_requests_finish(engine)


async def test_routing_follows_the_cache(engine: suite.EngineUnderTest, tmp_path: Path) -> None:
    await suite.events_reach_a_router_and_routing_follows(engine, tmp_path)


@pytest.mark.parametrize("case", ["surface", "events", "sampling", "overflow", "death", "rows", "steps"])
async def test_checks_inside_the_engine_environment_pass(engine: suite.EngineUnderTest, case: str) -> None:
    await suite.checks_inside(engine, "inside_transformers.py", case)


async def test_model_that_cannot_be_served_fails_with_one_message(
    engine: suite.EngineUnderTest, folders: ServableFolders, tmp_path: Path
) -> None:
    assert "no option 'devise'" in await suite.refused_start(engine, "--engine-args", "devise=cpu")
    assert "is not available" in await suite.refused_start(engine, "--engine-args", "device=abacus")
    strange = tmp_path / "strange"
    shutil.copytree(folders.model, strange)
    config = json.loads((strange / "config.json").read_text("utf-8"))
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "abacus", "architectures": ["Abacus"]}))
    assert "abacus" in await suite.refused_start(engine, model=strange)
    (strange / "config.json").write_text(json.dumps(config))
    (strange / "model.safetensors").write_bytes(b"not weights")
    assert "cannot load the model" in await suite.refused_start(engine, model=strange)
