"""The transformers engine against transformers itself, as real worker processes of its own environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.engines import engine_suite as suite
from tests.support.tiny_models import ServableFolders, build_servable

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
        flags=FLAGS,
        env={"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"},
        offline=("-P", str(script)),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(engine: suite.EngineUnderTest) -> AsyncIterator[suite.RunningWorker]:
    async with suite.running(engine) as started:
        yield started


async def test_greedy_equals_generate(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.greedy_equals_offline(engine, worker)


async def test_stop_ids(worker: suite.RunningWorker) -> None:
    await suite.stop_ids_end_a_request(worker)


async def test_the_prefix_cache(worker: suite.RunningWorker) -> None:
    await suite.second_request_reports_cached_tokens(worker)


async def test_logprobs(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.logprobs_equal_offline(engine, worker)


async def test_embeddings(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.embeddings_equal_offline(engine, worker)


async def test_guided_json(worker: suite.RunningWorker, folders: ServableFolders) -> None:
    tokenizer = Tokenizer.from_file(str(folders.embedder / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    await suite.guided_json_follows_its_schema(worker, decode)


async def test_aborts(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.abort_frees_blocks(engine, worker)
    await suite.callers_that_vanish_leak_nothing(engine, worker)


async def test_bad_input(worker: suite.RunningWorker) -> None:
    await suite.bad_input_is_refused_and_serving_goes_on(worker)


async def test_500_cancels(engine: suite.EngineUnderTest, worker: suite.RunningWorker) -> None:
    await suite.random_cancels_leak_nothing(engine, worker)


async def test_sigterm_under_load(engine: suite.EngineUnderTest) -> None:
    await suite.sigterm_lets_running_requests_finish(engine)
