"""Servers that offer only an OpenAI API, behind `sluice up --engines`: every API of the gateway works on top."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.shared_params import FunctionDefinition, ResponseFormatJSONSchema

from tests.support.fakes.fake_http_engines import served
from tests.support.fakes.fake_openai import KEY, MODEL, WEATHER, FakeOpenAi
from tests.support.servers.engine_file_suite import WAIT_S, EngineFileSuite, up_with_engines

TOOL: FunctionDefinition = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[EngineFileSuite, FakeOpenAi, FakeOpenAi]]:
    (folder / "key").write_text(KEY)
    first, second = FakeOpenAi("one"), FakeOpenAi("one")
    common = {"api": "openai", "api_key_file": str(folder / "key"), "model": f"chat={MODEL}"}
    # Of a FakeServer, `served` uses no more than a FakeOpenAi has.
    async with served(first) as first_url, served(second) as second_url:  # type: ignore[arg-type]
        engines = {"first": {"url": first_url, **common}, "second": {"url": second_url, **common}}
        async with up_with_engines(folder, engines, 16) as suite:
            await suite.until_workers(2)
            yield suite, first, second


async def test_openai_engines_serve_every_api_of_the_gateway(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, first, second):
        base = f"http://127.0.0.1:{suite.port}"
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", timeout=WAIT_S, max_retries=0)
        await _chats(client, first, second)
        await _completes(client)
        response = await client.responses.create(model="chat", input="Hi")
        assert response.output_text == "Hello from one"
        assert response.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (11, 3)
        claude = anthropic.AsyncAnthropic(base_url=base, api_key="any", timeout=WAIT_S, max_retries=0)
        first.reasoning = second.reasoning = ""
        message = await claude.messages.create(
            model="chat", max_tokens=20, messages=[{"role": "user", "content": "Hi"}]
        )
        (block,) = [one for one in message.content if one.type == "text"]
        assert block.text == "Hello from one"
        assert message.usage.output_tokens == 3
        bodies = first.bodies + second.bodies
        assert {body["model"] for body in bodies} == {MODEL}
        assert all(body["stream"] and body["stream_options"] == {"include_usage": True} for body in bodies)
        await claude.close()
        await client.close()


async def _chats(client: openai.AsyncOpenAI, *servers: FakeOpenAi) -> None:
    answer = await client.chat.completions.create(**CHAT, temperature=0.5, seed=3, max_tokens=20, stop=["\n\n"])
    assert answer.choices[0].message.content == "Hello from one"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (11, 3)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    (body,) = [body for server in servers for body in server.bodies if body.get("seed") == 3]
    assert (body["temperature"], body["max_tokens"], body["stop"]) == (0.5, 20, ["\n\n"])

    stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello from one"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 11

    for server in servers:
        server.reasoning = "thinking"
    called = await client.chat.completions.create(
        **CHAT, tools=[{"type": "function", "function": TOOL}], tool_choice="required", parallel_tool_calls=False
    )
    message = called.choices[0].message
    assert called.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    assert [(one.id, one.function.name, one.function.arguments) for one in message.tool_calls] == [
        ("call_1", "weather", WEATHER)
    ]
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "thinking"
    (body,) = [body for server in servers for body in server.bodies if body.get("tools")]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert "response_format" not in body

    schema: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted: ResponseFormatJSONSchema = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    await client.chat.completions.create(**CHAT, response_format=wanted)
    (body,) = [body for server in servers for body in server.bodies if body.get("response_format")]
    assert body["response_format"]["json_schema"]["schema"] == schema


async def _completes(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="chat", prompt="Once", max_tokens=5)
    assert answer.choices[0].text == "Hello from one"
    for fields in ({"prompt": [1, 2, 3]}, {"prompt": "Once", "logprobs": 2}):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="chat", max_tokens=5, **fields)
        assert refused.value.param in ("prompt", "logprobs")


async def test_openai_engine_that_fails_gives_typed_errors_without_its_secrets(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, *servers):

        async def status_of(status: int) -> httpx.Response:
            for server in servers:
                server.status = status
            return await suite.client.post("/v1/chat/completions", json=CHAT)

        rejected = await status_of(400)
        assert rejected.status_code == 400
        assert "temperature must be below 2" in rejected.text
        overloaded = await status_of(429)
        assert overloaded.status_code in (429, 503)
        assert (await status_of(500)).status_code in (500, 502, 503)
        assert (await status_of(200)).status_code == 200

        for server in servers:
            server.cut_after = 2
        cut = await suite.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert '"error"' in cut.text
        assert "[DONE]" not in cut.text or cut.text.index('"error"') < cut.text.index("[DONE]")
        for server in servers:
            server.cut_after = None
        (tmp_path / "key").write_text("wrong")
        refused = await suite.client.post("/v1/chat/completions", json=CHAT)
        for _ in range(100):  # the key is read again when it changes
            if refused.status_code != 200:
                break
            await asyncio.sleep(0.2)
            refused = await suite.client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code >= 500
        assert KEY not in refused.text
        assert "127.0.0.1" not in refused.text


async def test_openai_engine_request_is_cancelled_when_the_client_leaves(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, *servers):
        for server in servers:
            server.words, server.pause_s = ["word "] * 1_000, 0.02
        async with suite.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            async for line in response.aiter_lines():
                if "word" in line:
                    break
        await suite.until(lambda: any(server.closed for server in servers))


async def test_openai_engine_that_exits_and_returns_is_removed_and_added(tmp_path: Path) -> None:
    async with running(tmp_path) as (suite, first, _):
        first.healthy = False
        await suite.until_workers(1)
        assert (await suite.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        first.healthy = True
        await suite.until_workers(2)
