"""Images in every kind of request: streams, tools, turns, sockets, the background, batches, pairs, LangChain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from tests.support.clients.chat_answers import streamed
from tests.support.clients.image_parts import (
    data_url,
    described,
    described_file,
    image_url,
    input_image,
    picture,
    user_message,
)
from tests.support.clients.response_socket import response_socket
from tests.support.data.images import image_file
from tests.support.oracles.open_responses import RESPONSE, event_problems, problems
from tests.support.servers.suite import Suite
from tests.support.waiting import until

MODEL = "tekken"
MEDIA = {"SLUICE_WORKER_ENGINE_ARGS": "media=image"}
LARGE = {"SLUICE_GATEWAY_MAX_BODY_MB": "88"}
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
CALL = '[TOOL_CALLS]look[ARGS]{"at": "it"}'
TOOL = {"type": "object", "properties": {"at": {"type": "string"}}}
FINAL = ("completed", "failed", "cancelled", "incomplete", "expired")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Suite("--speedup", "20", env=MEDIA | LARGE) as running:
        yield running.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def chat_body(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 60, "messages": [user_message(*parts)], **more}


async def test_tool_call_after_an_image_is_the_same_streamed_and_whole(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": TOOL}}]
    body = chat_body(image_url(RED), {"type": "text", "text": f"Look. <<<script: {CALL}>>>"}, tools=tools)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await streamed(client, body, lambda: None)
        whole = (await client.post("/v1/chat/completions", json=body)).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert answer.calls == {0: ["look", call["function"]["arguments"]]}
    assert json.loads(call["function"]["arguments"]) == {"at": "it"}
    assert answer.finish_reason == whole["choices"][0]["finish_reason"] == "tool_calls"


def test_turns_of_stored_responses_keep_the_images_of_earlier_turns(client: openai.OpenAI) -> None:
    previous: str | None = None
    for seen, parts in (
        ((RED,), [input_image(RED)]),
        ((RED,), [{"type": "input_text", "text": "And?"}]),
        ((RED, BLUE), [input_image(BLUE)]),
    ):
        items: Any = [user_message(*parts)]
        response = client.responses.create(
            model=MODEL, input=items, previous_response_id=previous, max_output_tokens=60
        )
        assert response.output_text.startswith(described(*seen))
        previous = response.id


def test_turns_that_are_truncated_lose_their_images_and_the_others_keep_them(client: openai.OpenAI) -> None:
    long = {"type": "input_text", "text": "Rivers and mills. " * 12_000}
    turns: Any = [
        user_message(input_image(RED), long),
        {"role": "assistant", "content": "Yes."},
        user_message(input_image(GREEN), long),
        {"role": "assistant", "content": "Yes."},
        user_message(input_image(BLUE), {"type": "input_text", "text": "And?"}),
    ]
    for items, seen in ((turns[2:], (GREEN, BLUE)), (turns, (GREEN, BLUE)), (turns[:3] + turns, (GREEN, BLUE))):
        response = client.responses.create(model=MODEL, input=items, truncation="auto", max_output_tokens=60)
        assert response.output_text.startswith(described(*seen))


def test_turns_over_websocket_keep_the_images_of_earlier_turns(url: str) -> None:
    with response_socket(url) as socket:
        first = socket.turn(input=[user_message(input_image(GREEN))], store=False, max_output_tokens=60)
        previous = first[-1]["response"]["id"]
        parts = [{"type": "input_text", "text": "And this?"}, input_image(BLUE)]
        second = socket.turn(
            input=[user_message(*parts)], previous_response_id=previous, store=False, max_output_tokens=60
        )
    assert event_problems(first) == []
    for events, colors in ((first, (GREEN,)), (second, (GREEN, BLUE))):
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text.startswith(described(*colors))


def test_error_of_an_image_over_websocket_names_the_part_and_the_connection_goes_on(url: str) -> None:
    with response_socket(url) as socket:
        parts = [input_image(GREEN), {"type": "input_image", "image_url": data_url(picture(RED)[:60])}]
        error = socket.turn(input=[user_message(*parts)])[-1]
        assert (error["type"], error["error"]["code"]) == ("error", "invalid_media")
        assert error["error"]["param"] == "input[0].content[1]"
        assert socket.turn(input="Hi.", max_output_tokens=4)[-1]["type"] == "response.incomplete"


async def test_background_response_with_images_describes_them(client: openai.OpenAI) -> None:
    items: Any = [user_message(input_image(RED), input_image(GREEN))]
    queued = client.responses.create(model=MODEL, input=items, background=True, max_output_tokens=60)
    await until(lambda: client.responses.retrieve(queued.id).status in FINAL)
    assert client.responses.retrieve(queued.id).output_text.startswith(described(RED, GREEN))


async def test_batch_of_chats_with_images_describes_each(client: openai.OpenAI) -> None:
    colors = [(20 * number, 0, 90) for number in range(6)]
    path = "/v1/chat/completions"
    requests = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": chat_body(image_url(color))}
        for number, color in enumerate(colors)
    ]
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    requests.append({"custom_id": "bad", "method": "POST", "url": path, "body": chat_body(bad)})
    text = "\n".join(map(json.dumps, requests))
    file = client.files.create(file=("requests.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    await until(lambda: client.batches.retrieve(batch.id).status in FINAL)
    done = client.batches.retrieve(batch.id)
    assert done.output_file_id
    assert done.error_file_id
    lines = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert texts.keys() == {str(number) for number in range(len(colors))}
    for number, color in enumerate(colors):
        assert texts[str(number)].startswith(described(color))
    (failed,) = [json.loads(line) for line in client.files.content(done.error_file_id).text.splitlines()]
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "messages[0].content[0]"


async def test_pairs_of_workers_answer_chats_with_images_as_one_worker(url: str) -> None:
    with Suite("--prefill-workers", "1", "--workers", "1", "--speedup", "20", env=MEDIA) as pairs:
        words = {"type": "text", "text": "Compare them in many words. " * 10}
        bodies = [chat_body(image_url(RED), image_url((0, number, 9)), words, seed=number) for number in range(6)]
        async with httpx.AsyncClient(timeout=60) as client:

            async def choices(base: str, body: dict[str, Any]) -> Any:
                response = await client.post(f"{base}/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                assert "x-sluice-degraded" not in response.headers
                return response.json()["choices"]

            shared = await asyncio.gather(*(choices(pairs.url, body) for body in bodies))
            alone = await asyncio.gather(*(choices(url, body) for body in bodies))
            query = {**bodies[0], "nvext": {"annotations": ["query_instance_id:"]}}
            ids = (await client.post(f"{pairs.url}/v1/chat/completions", json=query)).json()["nvext"]["worker_id"]
    assert ids["prefill_worker_id"].startswith("prefill-")
    assert shared == alone
    for number, (choice,) in enumerate(shared):
        assert choice["message"]["content"].startswith(described(RED, (0, number, 9)))


def test_files_that_together_exceed_a_message_are_refused_by_part_and_those_below_are_answered(url: str) -> None:
    colors = (RED, GREEN, BLUE, (9, 9, 9))
    files = [picture(color) + bytes(15 << 20) for color in colors]
    urls = list(map(data_url, files))
    parts = [{"type": "image_url", "image_url": {"url": file_url}} for file_url in urls]
    inputs = [{"type": "input_image", "image_url": file_url} for file_url in urls]
    whole = httpx.post(f"{url}/v1/chat/completions", json=chat_body(*parts[:3]), timeout=120)
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"][0]["message"]["content"].startswith(described_file(files[0]))
    for path, body, part in (
        ("chat/completions", chat_body(*parts), "messages[0].content[3]"),
        (
            "responses",
            {"model": MODEL, "input": [user_message(*inputs)]},
            "input[0].content[3]",
        ),
    ):
        error = httpx.post(f"{url}/v1/{path}", json=body, timeout=120)
        assert (error.status_code, error.json()["error"]["code"]) == (413, "media_too_large"), error.text
        assert error.json()["error"]["param"] == part
    sources = [{"type": "base64", "media_type": "image/png", "data": file_url.partition(",")[2]} for file_url in urls]
    blocks = [{"type": "image", "source": source} for source in sources]
    refused = httpx.post(f"{url}/v1/messages", json=chat_body(*blocks), timeout=120)
    assert refused.status_code == 413
    assert "messages.0.content.3" in refused.json()["error"]["message"]


@tool
def look(at: str) -> str:
    """Looks at something."""
    return f"seen {at}"


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_openai_sends_images(url: str, use_responses_api: bool) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=SecretStr("unused"),
        model=MODEL,
        max_retries=0,
        timeout=60,
        use_responses_api=use_responses_api,
        max_completion_tokens=60,
    )
    standard = {"type": "image", "base64": data_url(picture(RED)).partition(",")[2], "mime_type": "image/png"}
    question = HumanMessage([standard, {"type": "text", "text": "Compare."}, image_url(BLUE)])
    answer = model.invoke([question])
    assert str(answer.text).startswith(described(RED, BLUE))
    assert "".join(str(chunk.text) for chunk in model.stream([question])) == str(answer.text)
    asked = HumanMessage([standard, {"type": "text", "text": f"Look. <<<script: {CALL}>>>"}])
    called: Any = model.bind_tools([look]).invoke([asked])
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("look", {"at": "it"})]
    result = ToolMessage("seen", tool_call_id=called.tool_calls[0]["id"])
    following = model.invoke([HumanMessage([standard]), called, result, HumanMessage([image_url(GREEN)])])
    assert str(following.text).startswith(described(RED, GREEN))


@pytest.mark.parametrize("stream", [False, True])
def test_open_responses_case_image_input_completes(url: str, stream: bool) -> None:
    heart = image_file(64, 60, color=(220, 20, 60))
    parts = [
        {"type": "input_text", "text": "What do you see in this image? Answer in one sentence."},
        {"type": "input_image", "image_url": data_url(heart)},
    ]
    body = {"model": MODEL, "input": [{"type": "message", **user_message(*parts)}], "stream": stream}
    response = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if stream:
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line[6:]) for line in lines]
        assert event_problems(events) == []
        found = events[-1]["response"]
    else:
        found = response.json()
    assert problems(found, RESPONSE) == []
    assert found["status"] == "completed"
    assert found["output"][-1]["content"][0]["text"].startswith(described_file(heart))
