"""The vllm-grpc engine: an unmodified `vllm serve --grpc` as a child of the worker, against vLLM's own LLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.engines import engine_suite as suite
from tests.engines import vllm_cases
from tests.engines.test_engines_vllm import describe
from tests.support.data.tiny_models import ServableFolders, build_servable

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


@pytest.fixture
def engine(folders: ServableFolders) -> suite.EngineUnderTest:
    return replace(describe(folders.model), name="vllm-grpc")


async def test_the_whole_suite(engine: suite.EngineUnderTest, folders: ServableFolders) -> None:
    tokenizer = Tokenizer.from_file(str(folders.model / "tokenizer.json"))

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    async with suite.running(engine) as worker:
        await suite.greedy_equals_offline(engine, worker)
        await suite.logprobs_equal_offline(engine, worker)
        await suite.random_cancels_leak_nothing(engine, worker)


async def test_embeddings(folders: ServableFolders) -> None:
    engine = replace(describe(folders.embedder), name="vllm-grpc")
    async with suite.running(engine, "--", "--runner", "pooling") as worker:
        await suite.embeddings_equal_offline(engine, worker)


async def test_events_reach_the_router(engine: suite.EngineUnderTest, tmp_path: Path) -> None:
    await vllm_cases.events_reach_the_router_and_routing_follows(engine, tmp_path)


async def test_engine_that_dies_ends_its_requests_with_a_typed_error(engine: suite.EngineUnderTest) -> None:
    await suite.killed_helper_is_noticed(engine, lambda child: "EngineCore" in " ".join(child.cmdline()))
