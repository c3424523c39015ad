"""Every engine through the whole suite, over HTTP: gateway, preprocess, router, two of its workers, postprocess."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.common.packages.model_files import ModelSpec
from services.preprocess.contract.tokenizer import ChatRequest
from services.preprocess.tokenizers.loading import load_tokenizer
from tests.engines import engine_suite as suite
from tests.engines.engine_list import ENGINES, FOR_EMBEDDINGS, engine_process
from tests.engines.served_suite import GREEDY, ServedModel, served
from tests.support.data.loaded_tokenizers import limits
from tests.support.data.tiny_models import ServableFolders, build_servable

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

DROPPED = 100
TEXT = "The quick brown fox jumps over"
QUESTION = [{"role": "user", "content": "What is the weather in Köln? 🌦️"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ServableFolders:
    return build_servable(tmp_path_factory.mktemp("servable"))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def running(request: pytest.FixtureRequest, folders: ServableFolders) -> AsyncIterator[ServedModel]:
    async with served(ENGINES[request.param](folders.model), {"a": (), "b": ()}) as started:
        yield started


@pytest.fixture(scope="module")
def decode(folders: ServableFolders) -> Any:
    tokenizer = Tokenizer.from_file(str(folders.model / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def asked(folders: ServableFolders) -> list[list[int]]:
    """Prompts; the last two are those of TEXT and QUESTION."""
    tokenizer = load_tokenizer(ModelSpec("tiny", str(folders.model)), limits())
    return [*suite.prompts(6), tokenizer.encode_text(TEXT), tokenizer.encode_chat(ChatRequest(QUESTION))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(running: ServedModel, asked: list[list[int]]) -> list[dict[str, Any]]:
    """What the engine's own library makes of them."""
    question = {"prompts": asked, "max_tokens": 24, "logprobs": 5}
    outputs: list[dict[str, Any]] = (await suite.offline(running.engine, question))["outputs"]
    return outputs


async def test_greedy_output_equals_that_of_the_engine(
    running: ServedModel, asked: list[list[int]], expected: list[dict[str, Any]], decode: Any
) -> None:
    prompts: list[str | list[int]] = [*asked[:6], TEXT]
    answers = await asyncio.gather(*(running.complete(prompt, 24) for prompt in prompts))
    for prompt, answer, theirs in zip(asked, answers, expected, strict=False):
        (choice,) = answer["choices"]
        assert choice["prompt_token_ids"] == prompt
        assert choice["token_ids"] == theirs["token_ids"]
        assert choice["text"] == decode(theirs["token_ids"])
        assert choice["finish_reason"] == "length"
    chat = {**GREEDY, "messages": QUESTION, "max_tokens": 24, "return_token_ids": True}
    said = await running.post("/v1/chat/completions", **chat)
    assert said["prompt_token_ids"] == asked[-1]
    assert said["choices"][0]["token_ids"] == expected[-1]["token_ids"]
    assert said["choices"][0]["message"]["content"] == decode(expected[-1]["token_ids"])


async def test_second_request_reports_cached_tokens_and_is_routed_to_them(running: ServedModel) -> None:
    size = (await running.workers["a"].info()).card.block_size
    for seed in (90, 91):
        prompt = suite.prompts(1, 4 * size + 5, 4 * size + 5, seed=seed)[0]
        assert _cached(await running.complete(prompt, 4)) == 0
        holder = await running.until_held(prompt, size)
        for number in range(5):
            longer = [*prompt, 20 + number, 30 + number]
            await running.idle()  # a reservation is freed 20 ms after its request, and counts until then
            assert _cached(await running.complete(longer, 4)) >= 4 * size - size
        assert await running.holders(prompt, size) == {holder}


def _cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_log_probabilities_equal_those_of_the_engine(
    running: ServedModel, asked: list[list[int]], expected: list[dict[str, Any]]
) -> None:
    theirs = expected[0]
    answer = await running.complete(asked[0], 24, logprobs=3)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == theirs["token_ids"]
    told = choice["logprobs"]["token_logprobs"]
    for token_id, logprob, known in zip(choice["token_ids"], told, theirs["logprobs"], strict=True):
        assert logprob == pytest.approx(known[str(token_id)], abs=1e-3)
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])


async def test_guided_json_follows_its_schema(running: ServedModel) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 1000, "response_format": form}
    document = json.loads((await running.post("/v1/chat/completions", **body))["choices"][0]["message"]["content"])
    assert document["city"] in ("Paris", "Rome")
    assert document["warm"] in (True, False)


async def test_disconnected_clients_free_the_engines_blocks(running: ServedModel) -> None:
    source = random.Random(7)

    async def leave(prompt: list[int]) -> None:
        body = {**GREEDY, "prompt": prompt, "max_tokens": 1000, "stream": True}
        async with running.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_lines())
            await asyncio.sleep(source.choice((0, 0.005, 0.05, 0.3)))

    limit = asyncio.Semaphore(16)

    async def one(prompt: list[int]) -> None:
        async with limit:
            await leave(prompt)

    await asyncio.gather(*(one(prompt) for prompt in suite.prompts(DROPPED, 1, 120, seed=5)))
    await running.idle()
    assert len((await running.complete([20, 21, 22], 4))["choices"][0]["token_ids"]) == 4


async def test_bad_input_is_rejected_and_serving_continues(running: ServedModel) -> None:
    card = (await running.workers["a"].info()).card
    for status, more in (
        (400, {"prompt": [card.vocab_size + 3]}),
        (400, {"prompt": [20] * card.context_length}),
        (404 if "lora" in card.capabilities else 400, {"prompt": [20, 21], "lora_path": "unknown"}),
    ):
        answer = await running.client.post("/v1/completions", json={**GREEDY, "max_tokens": 4, **more})
        error = answer.json()["error"]
        assert answer.status_code == status, error
        assert error["type"]
        assert "Traceback" not in error["message"]
    assert len((await running.complete([20, 21], 3))["choices"][0]["token_ids"]) == 3


async def test_killed_engine_leaves_discovery_and_its_requests_end_with_a_typed_error(running: ServedModel) -> None:
    """The last test of a suite, which has no workers afterwards."""
    await running.idle()
    assert await running.known() == {"a", "b"}
    going = [asyncio.create_task(_streamed(running, prompt)) for prompt in suite.prompts(8, seed=51)]
    for worker in running.workers.values():
        await _until_busy(worker)
    engines = [engine_process(worker) for worker in running.workers.values()]
    async with suite.Stalls() as stalls:
        for process in engines:  # all at once, or a slow machine would answer on the other one meanwhile
            process.kill()
        killed = time.monotonic()
        while await running.known():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        took = time.monotonic() - killed
        print(f"{running.engine.name}: both workers were gone after {took:.2f} s")
        assert took < stalls.allow(suite.NOTICED_S)
    failed = [(status, error) for status, error in await asyncio.gather(*going) if error]
    assert failed, "every stream ended before its engine did"
    for status, error in failed:
        assert status in (200, 502, 503)  # 502: no token had arrived, and its two workers died with it
        assert error["type"] == ("server_error" if status == 502 else "service_unavailable_error")
    for worker in running.workers.values():
        async with asyncio.timeout(suite.CALL_S):
            assert await worker.process.wait() != 0


async def _until_busy(worker: suite.RunningWorker) -> None:
    async with asyncio.timeout(suite.CALL_S):
        while not (await worker.info()).load.running_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _streamed(running: ServedModel, prompt: list[int]) -> tuple[int, dict[str, Any]]:
    """How a long stream ends: its status and the error in it; empty only when every token came that was asked for."""
    body = {**GREEDY, "prompt": prompt, "max_tokens": 1900, "stream": True, "stream_options": {"include_usage": True}}
    async with running.client.stream("POST", "/v1/completions", json=body) as answer:
        said = [line async for line in answer.aiter_lines() if line]
        found = json.loads(said[-1 if answer.status_code != 200 else -2].removeprefix("data: "))
        assert "error" in found or found["usage"]["completion_tokens"] == 1900, f"it ended with {said[-3:]}"
        return answer.status_code, found.get("error", {})


@pytest.mark.parametrize("name", ENGINES)
async def test_embeddings_equal_those_of_the_engine(name: str, folders: ServableFolders) -> None:
    engine = ENGINES[name](folders.embedder)
    asked = suite.prompts(4, seed=31)
    reference = await suite.offline(engine, {"prompts": asked, "max_tokens": 1, "embed": True})
    async with served(engine, {"a": FOR_EMBEDDINGS.get(name, ())}) as started:
        made = await started.post("/v1/embeddings", model="tiny", input=asked)
        for entry, theirs in zip(made["data"], reference["embeddings"], strict=True):
            assert entry["embedding"] == pytest.approx(theirs, abs=1e-3)
        assert made["usage"]["prompt_tokens"] == sum(map(len, asked))


@pytest.mark.parametrize("name", ["vllm", "vllm-grpc"])
async def test_prefill_and_decode_pair_equals_an_aggregated_worker(
    name: str, folders: ServableFolders, tmp_path: Path
) -> None:
    """With vLLM's file connector, the only one that works on a CPU; the gateway is told to accept nothing less."""
    engine = ENGINES[name](folders.model)
    # vllm serve --grpc warms up with prompts of its own, and its engine dies of them while this connector is on.
    engine = replace(engine, env={**engine.env, "SMG_VLLM_SERVICER_WARMUP": "off"})
    asked = suite.prompts(3, 100, 100, seed=61)
    reference = await suite.offline(engine, {"prompts": asked, "max_tokens": 12})
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    pair = {
        role: ("--role", role, "--", "--kv-transfer-config", json.dumps(connector)) for role in ("prefill", "decode")
    }
    async with served(engine, pair, "--disaggregation", "require") as started:
        for prompt, theirs in zip(asked, reference["outputs"], strict=True):
            answer = await started.complete(prompt, 12)
            assert answer["choices"][0]["token_ids"] == theirs["token_ids"]
            assert answer["usage"]["completion_tokens"] == 12
        await started.idle()
