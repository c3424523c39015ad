"""The class of each request field over HTTP: what is reported, what is refused, and what is only accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from scripts.pages.fields import SCHEMAS, rows
from services.gateway.apis.openai.unsupported_fields import FieldClass, class_of, neutral_values
from tests.support.servers.suite import Suite

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GENERATE, SCORE, RERANK = "/inference/v1/generate", "/v1/score", "/v1/rerank"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    EMBEDDINGS: {"input": "hi"},
    GENERATE: {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    SCORE: {"text_1": "hi", "text_2": "ho"},
    RERANK: {"query": "hi", "documents": ["ho"]},
    RESPONSES: {"input": "hi", "max_output_tokens": 2, "store": False},
    MESSAGES: {"messages": USER, "max_tokens": 2},
}
AROUND: dict[str, dict[str, Any]] = {"structured_outputs": {"choice": ["a"]}, "sampling_params": {"max_tokens": 2}}
"""What objects need besides the field in question."""
VALUES: dict[tuple[str, str], Any] = {
    (MESSAGES, "cache_control"): {"type": "ephemeral", "ttl": "1h", "scope": "global"},
    (MESSAGES, "context_management"): {"edits": [{"type": "clear_tool_uses_20250919"}]},
    (RESPONSES, "context_management"): [{"type": "compaction", "compact_threshold": 1000}],
    (RESPONSES, "service_tier"): "flex",
    (MESSAGES, "service_tier"): "auto",
}
"""Values of fields in one API."""
VALUES_ANYWHERE: dict[str, Any] = {
    "client_metadata": {"session_id": "a"},
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "a",
    "sampling_params.detokenize": False,
    "sampling_params.spaces_between_special_tokens": False,
    "service_tier": "priority",
    "spaces_between_special_tokens": False,
    "store": True,
    "stream_options.include_obfuscation": False,
    "text.verbosity": "low",
    "user": "a",
    "verbosity": "low",
}


def fields_of(kind: FieldClass) -> list[Any]:
    return [
        pytest.param(path, name, id=f"{path}-{name}")
        for path, schema in SCHEMAS.items()
        if path in BODIES  # /v1/classify needs a model that classifies: test_e2e_classify
        for name, field in rows(schema)
        if class_of(field) is kind
    ]


def body_with(path: str, name: str, value: Any) -> dict[str, Any]:
    *outer, last = name.split(".")
    inner = {last: value}
    for each in reversed(outer):
        inner = {each: {**AROUND.get(each, {}), **inner}}
    return {"model": "tekken", **BODIES[path], **({"stream": True} if "stream_options" in outer else {}), **inner}


def value_of(path: str, name: str) -> Any:
    return VALUES.get((path, name), VALUES_ANYWHERE.get(name, {"any": "value"}))


def degraded_in(answer: dict[str, Any]) -> list[str]:
    """Returns the fallbacks in the body of an answer of any API."""
    reported: list[str] = (answer["choices"][0] if "choices" in answer else answer).get("degraded", [])
    return reported


@pytest.fixture(scope="module")
def http(suite: Suite) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=suite.url, timeout=60) as made:
        yield made


@pytest.mark.parametrize(("path", "name"), fields_of(FieldClass.NO_EFFECT))
def test_field_without_effect_is_accepted_and_reported(http: httpx.Client, path: str, name: str) -> None:
    body = body_with(path, name, value_of(path, name))
    plain, answer = http.post(path, json={"model": "tekken", **BODIES[path]}), http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sluice-degraded"] == f"no_effect:{name}"
    assert degraded_in(answer.json()) == [f"no_effect:{name}"]
    assert "x-sluice-degraded" not in plain.headers
    streamed = http.post(path, json={**body, "stream": True})
    assert streamed.headers["x-sluice-degraded"] == f"no_effect:{name}"
    assert f'"no_effect:{name}"' in streamed.text


@pytest.mark.parametrize(("path", "name"), fields_of(FieldClass.REFUSED))
def test_refused_field_is_named_with_a_reason_and_accepted_at_its_neutral_values(
    http: httpx.Client, path: str, name: str
) -> None:
    answer = http.post(path, json=body_with(path, name, {"any": "value"}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert name in error["message"]
    assert "is not supported" in error["message"]
    assert path == MESSAGES or error["param"] == name
    field = next(field for found, field in rows(SCHEMAS[path]) if found == name)
    for value in neutral_values(field)[1] or ():
        neutral = http.post(path, json=body_with(path, name, value))
        assert neutral.status_code == 200, (value, neutral.text)
        assert "x-sluice-degraded" not in neutral.headers


@pytest.mark.parametrize(("path", "name"), fields_of(FieldClass.PLATFORM))
def test_field_of_a_platform_is_accepted_without_report(http: httpx.Client, path: str, name: str) -> None:
    for value in (value_of(path, name), None):
        answer = http.post(path, json=body_with(path, name, value))
        assert answer.status_code == 200, answer.text
        assert "x-sluice-degraded" not in answer.headers


HINTS = [
    *((CHAT, "reasoning_effort", effort) for effort in ("none", "minimal", "low", "high", "max")),
    *((RESPONSES, "reasoning.effort", effort) for effort in ("none", "high")),
    *((MESSAGES, "output_config.effort", effort) for effort in ("low", "max")),
    (CHAT, "enable_thinking", True),
    (CHAT, "enable_thinking", False),
    (CHAT, "chat_template_kwargs.enable_thinking", True),
    (MESSAGES, "thinking.type", "adaptive"),
]


@pytest.mark.parametrize(("path", "name", "value"), HINTS)
def test_hint_that_the_model_cannot_follow_is_reported_by_the_clients_name(
    http: httpx.Client, path: str, name: str, value: Any
) -> None:
    plain = http.post(path, json={"model": "tekken", **BODIES[path]}).json()
    answer = http.post(path, json=body_with(path, name, value))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sluice-degraded"] == f"no_effect:{name}"
    assert degraded_in(answer.json()) == [f"no_effect:{name}"]
    counts = ("prompt_tokens", "input_tokens")
    assert [answer.json()["usage"].get(each) for each in counts] == [plain["usage"].get(each) for each in counts]


def test_thinking_that_was_not_requested_is_not_reported(http: httpx.Client) -> None:
    for thinking in (None, {"type": "disabled"}):
        answer = http.post(MESSAGES, json=body_with(MESSAGES, "thinking", thinking))
        assert answer.status_code == 200
        assert "x-sluice-degraded" not in answer.headers


@pytest.mark.parametrize("edits", [None, [], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_context_edits_that_change_nothing_are_not_reported(http: httpx.Client, edits: Any) -> None:
    answer = http.post(MESSAGES, json=body_with(MESSAGES, "context_management", {"edits": edits}))
    assert answer.status_code == 200, answer.text
    assert "x-sluice-degraded" not in answer.headers


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"echo": True}, {"echo": True, "max_tokens": 0}])
def test_zero_logprobs_return_the_token_that_was_chosen(client: openai.OpenAI, more: Any) -> None:
    arguments: Any = {"model": "tekken", "prompt": "hi there", "max_tokens": 3, "logprobs": 0, **more}
    for choice in client.completions.create(**arguments).choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs or [])
    if "max_tokens" not in more:
        chunks = [chunk.choices[0] for chunk in client.completions.create(**arguments, stream=True) if chunk.choices]
        assert any(chunk.logprobs and chunk.logprobs.tokens for chunk in chunks)


def test_details_that_were_not_requested_are_null(client: openai.OpenAI) -> None:
    chat: Any = client.chat.completions.create(model="tekken", messages=USER, max_tokens=2)  # type: ignore[arg-type]
    message = chat.choices[0].message
    assert (message.reasoning, message.reasoning_content) == (None, None)
    assert (chat.prompt_token_ids, chat.prompt_logprobs, chat.choices[0].token_ids) == (None, None, None)
    choice: Any = client.completions.create(model="tekken", prompt="hi", max_tokens=2).choices[0]
    assert (choice.prompt_token_ids, choice.prompt_logprobs, choice.token_ids) == (None, None, None)
    model: Any = client.models.retrieve("tekken")
    assert (model.root, model.parent) == ("tekken", None)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("given", [{}, {"model": None}])
def test_model_may_be_left_out_where_one_is_served(http: httpx.Client, path: str, given: dict[str, Any]) -> None:
    answer = http.post(path, json={**given, **BODIES[path]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "tekken"


JSON_TYPE = {"content-type": "application/json"}
ANSWERS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    **{f"answer of {path}": ("POST", path, {"json": body}, 200) for path, body in BODIES.items()},
    **{
        f"stream of {path}": ("POST", path, {"json": {**BODIES[path], "stream": True}}, 200)
        for path in (CHAT, MESSAGES)
    },
    **{f"invalid body of {path}": ("POST", path, {"content": "{", "headers": JSON_TYPE}, 400) for path in BODIES},
    "unknown path": ("GET", "/v1/nothing", {}, 404),
    "wrong method": ("DELETE", CHAT, {}, 405),
    "other content type": ("POST", CHAT, {"content": "{}", "headers": {"content-type": "text/plain"}}, 415),
    "other host": ("GET", "/v1/models", {"headers": {"host": "other.example"}}, 421),
    "models": ("GET", "/v1/models", {}, 200),
    "metrics": ("GET", "/metrics", {}, 200),
    "probe": ("HEAD", "/", {}, 200),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_has_a_request_id_and_echoes_a_valid_one(http: httpx.Client, name: str) -> None:
    method, path, arguments, status = ANSWERS[name]
    own = arguments.pop("headers", {})

    def request_id(**headers: str) -> str:
        answer = http.request(method, path, **arguments, headers={**own, **headers})
        assert answer.status_code == status, answer.text
        found = answer.headers["x-request-id"]
        assert not path.startswith(MESSAGES) or answer.headers["request-id"] == found
        return found

    first, second = request_id(), request_id()
    assert first.startswith("req_")
    assert first != second
    assert request_id(**{"x-request-id": "trace-1.a:b_c"}) == "trace-1.a:b_c"
    for unsafe in ("", "a b", "a<script>", "a,b", "x" * 129):
        assert request_id(**{"x-request-id": unsafe}).startswith("req_")


def test_client_libraries_see_the_request_id(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "tekken", "messages": USER, "max_tokens": 2}
    answer = client.chat.completions.create(**arguments, extra_headers={"x-request-id": "mine"})
    assert answer._request_id == "mine"
    with pytest.raises(openai.BadRequestError) as failed:
        client.chat.completions.create(**arguments, extra_body={"nothing": 1})
    assert (failed.value.request_id or "").startswith("req_")


def test_thread_is_refused_so_that_the_client_library_continues_without(http: httpx.Client) -> None:
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        body = {"model": "tekken", **({**BODIES[MESSAGES]} if path == MESSAGES else {"messages": USER})}
        answer = http.post(path, json={**body, "thread": {"type": "create"}})
        assert answer.status_code == 400
        assert answer.json()["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
        assert http.post(path, json={**body, "thread": None}).status_code == 200


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
DEMANDED: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    (
        RESPONSES,
        {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "look"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
    ),
    (
        MESSAGES,
        {
            "tools": [{"name": "look", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]


@pytest.mark.parametrize(("path", "fields"), DEMANDED)
def test_demanded_call_wins_over_a_schema_of_the_text(http: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 100}
    answer = http.post(path, json={"model": "tekken", **BODIES[path], **limit, **fields})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if path == CHAT:
        called = [call["function"]["name"] for call in found["choices"][0]["message"]["tool_calls"]]
    else:
        called = [item["name"] for item in found["output" if path == RESPONSES else "content"] if "name" in item]
    assert called == ["look"]


def test_conflicting_definitions_of_tools_with_a_demanded_call_are_refused(http: httpx.Client) -> None:
    def tool(name: str, definition: dict[str, Any]) -> dict[str, Any]:
        parameters = {"type": "object", "$defs": {"D": definition}, "properties": {"d": {"$ref": "#/$defs/D"}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    body = {"model": "tekken", **BODIES[CHAT], "tool_choice": "required"}
    tools = [tool("f", {"type": "string"}), tool("g", {"type": "integer"})]
    error = http.post(CHAT, json={**body, "tools": tools}).json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "'D'" in error["message"]
    assert http.post(CHAT, json={**body, "tools": tools, "tool_choice": "auto"}).status_code == 200
    same = [tool("f", {"type": "string"}), tool("g", {"type": "string"})]
    assert http.post(CHAT, json={**body, "tools": same}).status_code == 200


def test_reasoning_that_only_another_server_can_read_is_left_out_and_reported(http: httpx.Client) -> None:
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"}
    answer = http.post(RESPONSES, json={**BODIES[RESPONSES], "input": [foreign, *USER]})
    assert answer.headers["x-sluice-degraded"] == "left_out:encrypted_reasoning"
    assert degraded_in(answer.json()) == ["left_out:encrypted_reasoning"]
    thought = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "AAA"}, {"type": "text", "text": "a"}],
    }
    answer = http.post(MESSAGES, json={**BODIES[MESSAGES], "messages": [*USER, thought, *USER]})
    assert answer.headers["x-sluice-degraded"] == "left_out:redacted_thinking"
    assert degraded_in(answer.json()) == ["left_out:redacted_thinking"]


def test_text_block_of_a_message_has_no_null_citations(http: httpx.Client) -> None:
    answer = http.post(MESSAGES, json=BODIES[MESSAGES])
    assert [sorted(block) for block in json.loads(answer.text)["content"]] == [["text", "type"]]
