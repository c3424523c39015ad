"""The official Anthropic client, unmodified, against real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types import ToolChoiceParam

from tests.support.data.loaded_tokenizers import small_tokenizer
from tests.support.servers.suite import Suite

CITY = '{"city": "Zürich 🌧️", "days": [1, 2.50]}'
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": name, "description": "Asks.", "input_schema": SCHEMA} for name in ("get_weather", "get_time")]
MISTRAL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "get_time", "arguments": {{}}}}]'


def asking(script: str) -> Any:
    """A conversation that the mock answers with the script."""
    return [{"role": "user", "content": f"Do it. <<<script: {script}>>>"}]


@pytest.fixture(scope="module")
def client(suite: Suite) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=suite.url, api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_a_message_at_once(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="tekken",
        max_tokens=60,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=asking("Hello there."),
        metadata={"user_id": "someone"},
    )
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tekken")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello there."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) > 10
    assert usage.output_tokens == len(small_tokenizer().encode_text("Hello there.", add_special_tokens=False)) + 1
    assert message._request_id is not None
    assert message._request_id.startswith("req_")


def test_a_stream_says_what_a_whole_message_says(client: anthropic.Anthropic) -> None:
    arguments: Any = {"model": "tekken", "max_tokens": 50, "messages": asking("One two three, four five six: seven.")}
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [text] == [block.text for block in whole.content if block.type == "text"]
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_max_tokens_and_stop_sequences(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="tekken", max_tokens=5, messages=[{"role": "user", "content": "Tell me a lot."}])
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)
    stopped = client.messages.create(
        model="tekken", max_tokens=50, messages=asking("one two three four"), stop_sequences=["zzz", " three"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert [block.text for block in stopped.content if block.type == "text"] == ["one two"]


def test_more_max_tokens_than_fit_are_clipped(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="tekken", max_tokens=10_000_000, messages=asking("Short."), timeout=60, stream=False
    )
    assert message.stop_reason == "end_turn"


def test_the_model_goes_on_from_a_prefilled_answer(client: anthropic.Anthropic) -> None:
    messages: Any = [*asking("never mind"), {"role": "assistant", "content": "The answer is ("}]
    message = client.messages.create(model="tekken", max_tokens=10, messages=messages)
    assert message.content


def check_calls(content: Any) -> None:
    calls = [block for block in content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [
        ("get_weather", {"city": "Zürich 🌧️", "days": [1, 2.5]}),
        ("get_time", {}),
    ]
    assert len({call.id for call in calls}) == 2


def test_parallel_calls_and_their_results(client: anthropic.Anthropic) -> None:
    arguments: Any = {"model": "tekken", "max_tokens": 400, "messages": asking(MISTRAL), "tools": TOOLS}
    whole = client.messages.create(**arguments)
    assert whole.stop_reason == "tool_use"
    check_calls(whole.content)
    for _ in range(20):  # what comes while a busy gateway waits for its turn is one event
        with client.messages.stream(**arguments) as stream:
            inputs = [event.partial_json for event in stream if event.type == "input_json"]
            final = stream.get_final_message()
        if len([piece for piece in inputs if piece]) > 2:
            break
    assert final.stop_reason == "tool_use"
    check_calls(final.content)
    assert len([piece for piece in inputs if piece]) > 2, "inputs are told as they come"

    results: Any = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
        for block in final.content
        if block.type == "tool_use"
    ]
    results[1]["is_error"] = True
    answer = client.messages.create(
        model="tekken",
        max_tokens=40,
        tools=TOOLS,
        messages=[
            *asking(MISTRAL),
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": [*results, {"type": "text", "text": "Go on. <<<script: Thanks.>>>"}]},
        ],
    )
    assert [block.to_dict()["text"] for block in answer.content] == ["Thanks."]


def test_a_call_that_is_demanded(client: anthropic.Anthropic) -> None:
    choices: list[tuple[ToolChoiceParam, set[str]]] = [
        ({"type": "any"}, {"get_weather", "get_time"}),
        ({"type": "tool", "name": "get_time", "disable_parallel_tool_use": True}, {"get_time"}),
    ]
    for choice, names in choices:
        question: Any = [{"role": "user", "content": "What is it like?"}]
        message = client.messages.create(
            model="tekken", max_tokens=400, messages=question, tools=TOOLS, tool_choice=choice
        )
        calls = [block for block in message.content if block.type == "tool_use"]
        assert len(calls) == 1
        assert calls[0].name in names
        assert message.stop_reason == "tool_use"
    none = client.messages.create(
        model="tekken", max_tokens=100, messages=asking(MISTRAL), tools=TOOLS, tool_choice={"type": "none"}
    )
    assert {block.type for block in none.content} == {"text"}


class City(pydantic.BaseModel):
    """A structured answer."""

    name: str
    inhabitants: int


def test_a_structured_answer_is_parsed(client: anthropic.Anthropic) -> None:
    arguments: Any = {
        "model": "tekken",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": "Which city?"}],
        "output_format": City,
    }
    parsed = client.messages.parse(**arguments)
    assert isinstance(parsed.parsed_output, City)
    with client.messages.stream(**arguments) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)


def test_models_in_both_forms(client: anthropic.Anthropic, suite: Suite) -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == ["tekken"]
    assert client.models.retrieve("tekken").created_at.year > 2000
    assert httpx.get(f"{suite.url}/v1/models").json()["object"] == "list"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(anthropic.BadRequestError, match="after_id"):
        client.models.list(after_id="nope")


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nope", max_tokens=5, messages=asking("x"))
    assert missing.value.type == "not_found_error"
    assert "tekken" in str(missing.value)
    assert missing.value.request_id is not None
    body: Any = missing.value.body
    assert body["request_id"] == missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match=r"messages: at least one message is required") as bad:
        client.messages.create(model="tekken", max_tokens=5, messages=[])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model="tekken", max_tokens=5, messages=[{"role": "user", "content": "word " * 200_000}])
    with pytest.raises(anthropic.BadRequestError, match="is not a supported version"):
        client.messages.create(
            model="tekken", max_tokens=5, messages=asking("x"), extra_headers={"anthropic-version": "2020-01-01"}
        )
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages.0.content.0.*takes image input"):
        client.messages.create(model="tekken", max_tokens=5, messages=[{"role": "user", "content": [image]}])


def test_errors_of_http_have_anthropics_form(suite: Suite) -> None:
    for answer, status, kind in (
        (httpx.get(f"{suite.url}/v1/messages"), 405, "invalid_request_error"),
        (httpx.post(f"{suite.url}/v1/messages/nothing"), 404, "not_found_error"),
        (httpx.post(f"{suite.url}/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (httpx.post(f"{suite.url}/v1/messages", content=b" " * (11 << 20)), 413, "request_too_large"),
        (httpx.post(f"{suite.url}/v1/messages", headers={"x-request-timeout-ms": "x"}), 400, "invalid_request_error"),
    ):
        assert answer.status_code == status
        said = answer.json()
        assert (said["type"], said["error"]["type"]) == ("error", kind)
        assert said["request_id"] == answer.headers["request-id"]


async def test_the_async_client(suite: Suite) -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=suite.url, api_key="unused", max_retries=0, timeout=60) as client,
        client.messages.stream(model="tekken", max_tokens=30, messages=asking("Hi you.")) as stream,
    ):
        assert "".join([piece async for piece in stream.text_stream]) == "Hi you."
