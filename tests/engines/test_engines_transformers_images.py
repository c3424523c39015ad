"""Images in the transformers engine: answers equal to `generate`, inside the engine and through the whole suite."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from services.common.net.ports import free_port
from tests.engines import engine_suite as suite
from tests.engines.served_suite import ServedModel, served
from tests.support.data.tiny_vlm import build_llava, build_qwen2_vl

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module")]

KINDS = {"llava": build_llava, "qwen2-vl": build_qwen2_vl}
PLACEHOLDERS = {"llava": "<image>", "qwen2-vl": "<|image_pad|>"}
HERE = Path(__file__).parent
CHATS = 8
TOKENS = 12
LONG = 300
KIT_S = 600


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> suite.EngineUnderTest:
    return suite.EngineUnderTest(
        name="transformers",
        python=suite.interpreter("transformers"),
        model=KINDS[kind](tmp_path_factory.mktemp("vision") / kind),
        flags=("--block-size", "16"),
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        offline=("-P", str(HERE / "offline_transformers_images.py")),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(engine: suite.EngineUnderTest) -> AsyncIterator[ServedModel]:
    async with served(engine, {"a": ()}) as started:
        yield started


@pytest.mark.parametrize("case", ["conversations", "overflow", "sampling", "cancels", "refusals", "death"])
async def test_checks_inside_the_engine_environment_pass(engine: suite.EngineUnderTest, case: str) -> None:
    await suite.checks_inside(engine, "inside_transformers_images.py", case)


def picture(colour: str, size: tuple[int, int] = (100, 80)) -> str:
    """A PNG in base64."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def chats() -> list[dict[str, Any]]:
    """Chats of one to four pictures of several sizes, and one of text only."""
    source = random.Random(18)
    made: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "What is it?"}], "files": []}]
    for number in range(CHATS):
        size = source.randint(40, 200), source.randint(40, 200)
        files = [picture(source.choice(("red", "blue", "tan")), size) for _ in range(number % 4 + 1)]
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in files]
        parts.insert(source.randint(0, len(parts)), {"type": "text", "text": f"Describe {number}."})
        made.append({"messages": [{"role": "user", "content": parts}], "files": files})
    return made


def body(chat: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The chat as OpenAI's clients send it."""
    files = iter(chat["files"])
    messages = []
    for message in chat["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = [part if part["type"] == "text" else image_url(next(files)) for part in content]
        messages.append({**message, "content": content})
    options = {"model": "tiny", "temperature": 0, "max_tokens": TOKENS, "return_token_ids": True}
    return {**options, "messages": messages, **more}


def image_url(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def test_chats_through_the_suite_equal_generate(engine: suite.EngineUnderTest, running: ServedModel) -> None:
    asked = chats()
    expected = (await suite.offline(engine, {"chats": asked, "max_tokens": TOKENS}))["outputs"]
    answers = await asyncio.gather(*(running.post("/v1/chat/completions", **body(chat)) for chat in asked))
    for answer, theirs in zip(answers, expected, strict=True):
        assert answer["prompt_token_ids"] == theirs["prompt"]
        assert answer["choices"][0]["token_ids"] == theirs["token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(theirs["prompt"])
    assert len({tuple(theirs["token_ids"]) for theirs in expected}) > CHATS // 2


async def test_model_lists_images_and_declares_nothing_else_that_the_steps_lack(running: ServedModel) -> None:
    model = (await running.client.get("/v1/models/tiny")).json()
    assert model["modalities"] == ["text", "image"]
    claims = await running.workers["a"].claims()
    assert "image" in claims
    assert not claims & {"lora", "lora_loading", "embeddings", "priority", "prompt_logprobs", "kv_events"}
    assert (await running.workers["a"].info()).card.block_size == 0


async def test_placeholder_that_a_user_types_stays_text(kind: str, running: ServedModel) -> None:
    parts = [{"type": "text", "text": f"see {PLACEHOLDERS[kind]} and"}, {"type": "image"}]
    chat = {"messages": [{"role": "user", "content": parts}], "files": [picture("red")]}
    answer = await running.post("/v1/chat/completions", **body(chat, ignore_eos=True))
    assert len(answer["choices"][0]["token_ids"]) == TOKENS


async def test_prompt_of_ids_with_a_placeholder_and_no_image_is_refused(kind: str, running: ServedModel) -> None:
    good = await running.post("/v1/chat/completions", **body(chats()[1]))
    request = {"model": "tiny", "prompt": good["prompt_token_ids"], "max_tokens": 4}
    refused = await running.client.post("/v1/completions", json=request)
    assert refused.status_code == 400, refused.text
    assert "placeholder" in refused.json()["error"]["message"]


async def test_client_that_disconnects_leaves_nothing_behind(running: ServedModel) -> None:
    for chat in chats()[1:5]:
        request = body(chat, stream=True, max_tokens=500, ignore_eos=True)
        async with running.client.stream("POST", "/v1/chat/completions", json=request) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_lines())
    await running.idle()


async def streamed(running: ServedModel, request: dict[str, Any], begun: asyncio.Event, after: int) -> list[int]:
    """Token ids of a streamed chat; `begun` is set after some events."""
    events = 0
    tokens: list[int] = []
    async with running.client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
            events += 1
            if events == after:
                begun.set()
    return tokens


async def test_chats_whose_worker_is_killed_continue_on_another_with_the_same_tokens(
    engine: suite.EngineUnderTest,
) -> None:
    asked = chats()[2:4]
    expected = (await suite.offline(engine, {"chats": asked, "max_tokens": LONG}))["outputs"]
    async with served(engine, {"a": (), "b": ()}) as running:
        begun = [asyncio.Event() for _ in asked]
        streams = [
            asyncio.create_task(streamed(running, body(chat, max_tokens=LONG), event, 10))
            for chat, event in zip(asked, begun, strict=True)
        ]
        async with asyncio.timeout(suite.CALL_S):
            await asyncio.gather(*(event.wait() for event in begun))
        loads = {name: (await worker.info()).load.running_requests for name, worker in running.workers.items()}
        assert sum(loads.values()) == len(asked), "the streams must still run"
        running.workers[max(loads, key=lambda name: loads[name])].process.kill()
        assert await asyncio.gather(*streams) == [theirs["token_ids"] for theirs in expected]


async def test_conformance_kit_finds_no_violation(engine: suite.EngineUnderTest) -> None:
    watcher = f"127.0.0.1:{free_port()}"
    async with suite.running(engine, "--routers", watcher) as worker:
        passed, not_checked = await suite.conformance(worker, watcher, KIT_S)
        assert passed > 50
        assert not_checked == 1, "only the rule that needs the model's own placeholders"
