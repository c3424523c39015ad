"""The official client's responses, unmodified, against real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import EasyInputMessageParam

from tests.support.data.loaded_tokenizers import small_tokenizer
from tests.support.servers.suite import Suite
from tests.support.waiting import wait_until

CITY = '{"city": "Zürich 🌧️", "days": [1, 2.50]}'
TOOLS: Any = [
    {
        "type": "function",
        "name": name,
        "description": "Asks.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
    for name in ("get_weather", "get_time")
]
MISTRAL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "get_time", "arguments": {{}}}}]'


def asking(script: str) -> str:
    """A prompt that the mock answers with the script."""
    return f"Do it. <<<script: {script}>>>"


@pytest.fixture(scope="module")
def client(suite: Suite) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="one", max_retries=0, timeout=60) as made:
        yield made


def test_a_response_at_once(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tekken",
        input=asking("Hello there."),
        instructions="Be brief.",
        metadata={"for": "a test"},
        temperature=0.5,
        max_output_tokens=40,
    )
    assert response.id.startswith("resp_")
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert response.output_text == "Hello there."
    assert (response.instructions, response.metadata) == ("Be brief.", {"for": "a test"})
    assert (response.temperature, response.max_output_tokens) == (0.5, 40)
    assert response.completed_at is not None
    usage: Any = response.usage
    assert usage.output_tokens == len(small_tokenizer().encode_text("Hello there.", add_special_tokens=False)) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= 0


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tekken", "input": "Tell me a lot.", "max_output_tokens": 6}
    whole: Any = client.responses.create(**arguments)
    events: Any = list(client.responses.create(**arguments, stream=True))
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[-1].status == "incomplete"
        assert response.usage.output_tokens == 6
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


def test_parallel_calls_streamed_and_gone_on_from(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tekken", input=asking(MISTRAL), tools=TOOLS)
    for _ in range(20):  # what comes while a busy gateway waits for its turn is one event
        with client.responses.stream(model="tekken", input=asking(MISTRAL), tools=TOOLS) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        if kinds.count("response.function_call_arguments.delta") > 2:
            break
    for response in (whole, final):
        calls: Any = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("get_weather", CITY), ("get_time", "{}")]
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.function_call_arguments.delta") > 2
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    answer = client.responses.create(
        model="tekken",
        previous_response_id=final.id,
        input=[*results, {"role": "user", "content": asking("It is sunny.")}],
        tools=TOOLS,
    )
    assert answer.output_text == "It is sunny."
    assert answer.previous_response_id == final.id
    listed = [item.type for item in client.responses.input_items.list(answer.id, order="asc")]
    assert listed == [
        "message",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
        "message",
    ]


def test_a_call_that_is_demanded(client: openai.OpenAI) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    choices: list[tuple[Any, set[str]]] = [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "name": "get_time"}, {"get_time"}),
        (allowed, {"get_time"}),
    ]
    for choice, names in choices:
        response: Any = client.responses.create(model="tekken", input="What now?", tools=TOOLS, tool_choice=choice)
        assert [item.type for item in response.output] == ["function_call"]
        assert response.output[0].name in names
        assert len(response.tools) == 2
    none = client.responses.create(model="tekken", input=asking(MISTRAL), tools=TOOLS, tool_choice="none")
    assert [item.type for item in none.output] == ["message"]


class City(pydantic.BaseModel):
    """A structured answer."""

    name: str
    inhabitants: int


def test_a_structured_answer_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tekken", input="Which city?", text_format=City)
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(model="tekken", input="Which city?", text_format=City) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)
    free = client.responses.create(model="tekken", input="Which?", text={"format": {"type": "json_object"}})
    assert free.output_text.startswith("{")


def test_log_probabilities(client: openai.OpenAI) -> None:
    arguments: Any = {
        "model": "tekken",
        "input": asking("Hello there."),
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole: Any = client.responses.create(**arguments)
    told = whole.output[0].content[0].logprobs
    assert "".join(one.token for one in told).startswith("Hello there.")
    assert {len(one.top_logprobs) for one in told} == {2}
    events: Any = list(client.responses.create(**arguments, stream=True))
    streamed = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert "".join(streamed).startswith("Hello there.")
    assert [one.token for one in events[-1].response.output[0].content[0].logprobs] == streamed


def test_what_was_answered_is_kept_read_listed_and_forgotten(client: openai.OpenAI, suite: Suite) -> None:
    first = client.responses.create(model="tekken", input=asking("My name is Ada."))
    second = client.responses.create(model="tekken", input=asking("Ada."), previous_response_id=first.id)
    third = client.responses.create(model="tekken", input="And now?", previous_response_id=second.id, store=False)
    usage: Any = [response.usage for response in (first, second, third)]
    assert usage[0].input_tokens < usage[1].input_tokens < usage[2].input_tokens
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    page = client.responses.input_items.list(second.id, limit=2)
    assert [item.type for item in page.data] == ["message", "message"]
    assert page.has_more
    assert len(list(page)) == 3, "the client asks for the next page itself"

    with openai.OpenAI(base_url=f"{suite.url}/v1", api_key="two", max_retries=0) as other:
        # Without API keys all clients are one tenant, whatever they send; with keys see tests/security.
        assert other.responses.retrieve(first.id).to_dict() == first.to_dict()
        with pytest.raises(openai.BadRequestError) as unknown:
            other.responses.create(model="tekken", input="x", previous_response_id="resp_unknown")
        assert (unknown.value.param, unknown.value.code) == ("previous_response_id", "previous_response_not_found")

    client.responses.delete(first.id)
    for gone in (first.id, third.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    assert client.responses.create(model="tekken", input="x", previous_response_id=second.id).output_text
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(second.id)


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tekken", input="How long am I?", instructions="Be brief.")
    answered: Any = client.responses.create(model="tekken", input="How long am I?", instructions="Be brief.")
    assert counted.input_tokens == answered.usage.input_tokens


def test_the_oldest_turns_are_left_out_when_they_do_not_fit(client: openai.OpenAI) -> None:
    turn = [{"role": "user", "content": "word " * 24_000}, {"role": "assistant", "content": "Yes."}]
    long: Any = [{"role": "developer", "content": "Be brief."}, *turn * 12, {"role": "user", "content": "And now?"}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tekken", input=long, max_output_tokens=10)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    response: Any = client.responses.create(model="tekken", input=long, max_output_tokens=10, truncation="auto")
    assert response.truncation == "auto"
    assert response.usage.input_tokens > 24_000


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="nope", input="x")
    assert missing.value.code == "model_not_found"
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("input", {"input": []}),
        ("input[0].content[0].image_url", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("tools[0].type", {"input": "x", "tools": [{"type": "local_shell"}]}),
        ("tools[1].parameters", {"input": "x", "tools": [TOOLS[0], {**TOOLS[1], "parameters": []}]}),
        ("background", {"input": "x", "background": True, "store": False}),
        ("reasoning.mode", {"input": "x", "reasoning": {"mode": "pro"}}),
        ("temperature", {"input": "x", "temperature": 3}),
        ("nonsense", {"input": "x", "extra_body": {"nonsense": 1}}),
        ("max_output_tokens", {"input": "x", "max_output_tokens": 100_000_000}),
    ]
    for param, arguments in wrong:
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(model="tekken", **arguments)
        assert bad.value.param == param, bad.value
        assert param.split(".")[-1] in bad.value.message


def test_a_client_that_leaves_ends_the_generation(suite: Suite) -> None:
    def live() -> str:
        lines = httpx.get(f"{suite.url}/metrics").text.splitlines()
        return next(line for line in lines if line.startswith("sluice_gateway_live_streams"))

    body = {"model": "tekken", "input": "Go on.", "stream": True, "max_output_tokens": 50_000, "ignore_eos": True}
    for path, more in (("responses", {}), ("messages", {"messages": [{"role": "user", "content": "Go on."}]})):
        sent = {**body, **more}
        if more:
            del sent["input"], sent["max_output_tokens"]
            sent["max_tokens"] = 50_000
        with httpx.stream("POST", f"{suite.url}/v1/{path}", json=sent, timeout=60) as answer:
            next(answer.iter_lines())
        wait_until(lambda: live().endswith(" 0.0"), 60)


async def test_the_async_client(suite: Suite) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{suite.url}/v1", api_key="one", max_retries=0, timeout=60) as client,
        client.responses.stream(model="tekken", input=asking("Hi you.")) as stream,
    ):
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == "Hi you."


def test_compacted_conversation_is_the_input_of_the_next_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tekken", input="Tell me about rivers.", max_output_tokens=20)
    made = client.responses.compact(model="tekken", previous_response_id=first.id)
    assert [item.type for item in made.output] == ["message", "compaction"]
    assert made.usage.output_tokens > 0
    kept: Any = [item.model_dump(exclude_none=True) for item in made.output]
    script: EasyInputMessageParam = {"role": "user", "content": "<<<script: Still here.>>>"}
    assert client.responses.create(model="tekken", input=[*kept, script]).output_text == "Still here."
