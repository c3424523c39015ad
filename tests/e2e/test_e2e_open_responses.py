"""The compliance cases of Open Responses 2026-04-24 against a running suite, under their ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.clients.response_socket import response_socket
from tests.support.oracles.open_responses import COMPACTED, EVENT, RESPONSE, event_problems, problems
from tests.support.servers.suite import Suite

MODEL = "tekken"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "A city and its state"}},
        "required": ["location"],
    },
}
CALL = '[TOOL_CALLS]get_weather[ARGS]{"location": "San Francisco, CA"}'
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
)


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **more}


@pytest.fixture(scope="module")
def http(suite: Suite) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{suite.url}/v1", timeout=60) as made:
        yield made


def events_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed response."""
    with http.stream("POST", "/responses", json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        return [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("case", "items"),
    [
        ("basic-response", [message("user", "Say hello in exactly 3 words.")]),
        (
            "assistant-phase",
            [
                message("assistant", "I should answer with the saved number.", phase="commentary"),
                message("assistant", "The number is four.", phase="final_answer"),
                message("user", "Repeat only the number."),
            ],
        ),
        ("system-prompt", [message("system", "You are a pirate."), message("user", "Say hello.")]),
        (
            "multi-turn",
            [
                message("user", "My name is Alice."),
                message("assistant", "Hello Alice! How can I help you today?"),
                message("user", "What is my name?"),
            ],
        ),
    ],
)
def test_open_responses_case_with_messages_completes(http: httpx.Client, case: str, items: list[Any]) -> None:
    body = http.post("/responses", json={"model": MODEL, "input": items, "max_output_tokens": 4096}).json()
    assert problems(body, RESPONSE) == [], case
    assert body["status"] == "completed"
    assert body["output"]


def test_open_responses_case_response_output_phase_schema_accepts_phases(http: httpx.Client) -> None:
    body = http.post("/responses", json={"model": MODEL, "input": "Hi.", "max_output_tokens": 4}).json()
    phased = [{**body["output"][0], "phase": phase} for phase in ("commentary", "final_answer")]
    assert problems({**body, "output": phased}, RESPONSE) == []
    assert problems({**body, "output": [{**phased[0], "phase": "other"}]}, RESPONSE) != []


def test_open_responses_case_streaming_response_has_events_of_the_schema(http: httpx.Client) -> None:
    events = events_of(http, input=[message("user", "Count from 1 to 5.")])
    assert event_problems(events) == []
    assert events[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_open_responses_case_tool_calling_returns_a_call(http: httpx.Client, stream: bool) -> None:
    body = {
        "input": [message("user", f"What's the weather like in San Francisco? <<<script: {CALL}>>>")],
        "tools": [WEATHER],
    }
    if stream:
        events = events_of(http, **body)
        assert event_problems(events) == []
        response = events[-1]["response"]
    else:
        response = http.post("/responses", json={"model": MODEL, **body}).json()
    assert problems(response, RESPONSE) == []
    assert "function_call" in [item["type"] for item in response["output"]]


def test_open_responses_case_image_input_without_an_engine_for_images_names_the_part(http: httpx.Client) -> None:
    parts = [
        {"type": "input_text", "text": "What do you see in this image?"},
        {"type": "input_image", "image_url": PIXEL},
    ]
    response = http.post("/responses", json={"model": MODEL, "input": [message("user", parts)]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[0].content[1]"
    assert response.json()["error"]["code"] == "media_not_supported"


def test_open_responses_case_compact_response_returns_a_compaction(http: httpx.Client) -> None:
    items = [
        message("user", "We agreed to launch on Tuesday and notify support first."),
        message("assistant", "Understood. The launch is Tuesday, with support notified beforehand."),
    ]
    request = {"model": MODEL, "prompt_cache_key": "a-compaction", "input": items}
    body = http.post("/responses/compact", json=request).json()
    assert problems(body, COMPACTED) == []
    assert body["output"][-1]["type"] == "compaction"


def test_open_responses_case_compact_missing_model_is_refused(http: httpx.Client) -> None:
    response = http.post("/responses/compact", json={"input": [message("user", "Compact this conversation.")]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"


def completed(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of a turn whose events follow the schema."""
    assert event_problems(events) == []
    response: dict[str, Any] = events[-1]["response"]
    assert response["status"] == "completed"
    assert response["output"]
    return response


def test_open_responses_case_websocket_response_has_events_of_the_schema(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        completed(socket.turn(input=[message("user", "Count from 1 to 3.")]))


def test_open_responses_case_websocket_sequential_responses_complete(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        for word in ("first", "second"):
            completed(socket.turn(store=False, input=f"Reply with exactly: {word}"))


def test_open_responses_case_websocket_continuation_has_the_first_turn(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        first = completed(socket.turn(store=False, input="Remember the code word: cobalt. Reply with OK."))
        second = completed(socket.turn(store=False, previous_response_id=first["id"], input="What is the code word?"))
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
    assert second["previous_response_id"] == first["id"]


def test_open_responses_case_websocket_reconnect_store_false_recovery_starts_again(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        first = completed(socket.turn(store=False, input="Remember the code word: copper. Reply with OK."))
    with response_socket(suite.url) as socket:
        [error] = socket.turn(store=False, previous_response_id=first["id"], input="Try to continue.")
        assert error["error"]["code"] == "previous_response_not_found"
        completed(socket.turn(store=False, input=[message("user", "Start a new response.")]))


def test_open_responses_case_websocket_previous_response_not_found_is_an_error_event(suite: Suite) -> None:
    with response_socket(suite.url) as socket:
        events = socket.turn(store=False, previous_response_id="resp_openresponses_missing_1", input="This fails.")
    assert [(event["type"], event["status"]) for event in events] == [("error", 400)]
    assert problems(events[0], EVENT) == []
    assert events[0]["error"]["code"] == "previous_response_not_found"


def test_open_responses_case_websocket_failed_continuation_evicts_cache(suite: Suite) -> None:
    output = {"type": "function_call_output", "call_id": "call_openresponses_missing", "output": "Nothing."}
    with response_socket(suite.url) as socket:
        first = completed(socket.turn(store=False, input="Remember the code word: ember. Reply with OK."))
        [failed] = socket.turn(store=False, previous_response_id=first["id"], input=[output])
        assert failed["error"]["code"] == "call_not_found"
        [retried] = socket.turn(store=False, previous_response_id=first["id"], input="Try to continue.")
    assert retried["error"]["code"] == "previous_response_not_found"


def test_open_responses_case_websocket_compact_new_chain_continues_a_compaction(
    suite: Suite, http: httpx.Client
) -> None:
    items = [message("user", "Remember the compaction code word: slate."), message("assistant", "OK.")]
    compacted = http.post("/responses/compact", json={"model": MODEL, "input": items}).json()
    with response_socket(suite.url) as socket:
        completed(socket.turn(store=False, input=[*compacted["output"], message("user", "What is the code word?")]))


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "temperature": 0.3, "top_p": 0.9},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
        {"text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}, "max_tool_calls": 3},
        {"tools": [WEATHER, {"type": "web_search"}], "tool_choice": "none"},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}},
        {"instructions": "Be brief.", "safety_identifier": "x", "prompt_cache_key": "y", "truncation": "auto"},
    ],
)
def test_response_to_a_request_with_fields_follows_the_schema(http: httpx.Client, fields: dict[str, Any]) -> None:
    request = {"input": "Do it.", "max_output_tokens": 8, **fields}
    response = http.post("/responses", json={"model": MODEL, **request})
    assert response.status_code == 200, response.text
    assert problems(response.json(), RESPONSE) == []
    assert event_problems(events_of(http, **request)) == []
    echoed = {name: response.json()[name] for name in fields if name.endswith("_penalty")}
    assert echoed == {name: value for name, value in fields.items() if name.endswith("_penalty")}


def test_output_of_an_unknown_call_is_refused(http: httpx.Client) -> None:
    output = {"type": "function_call_output", "call_id": "call_unknown", "output": "sunny"}
    response = http.post("/responses", json={"model": MODEL, "input": [message("user", "Hi."), output]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input[1].call_id"
    assert response.json()["error"]["code"] == "call_not_found"
