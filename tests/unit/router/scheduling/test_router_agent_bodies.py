"""Prompts of the Responses, Messages and embeddings APIs as the chat that engines make of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import ErrorKind, SluiceError
from services.common.media.spans import MediaKind
from services.common.packing import pack_u32
from services.router.scheduling.agent_bodies import Api, api_of, read_prompt
from services.router.scheduling.openai_body import Body, ChatBody, TextBody, TokenBody
from tests.support.oracles.errors import raises_error


def chat_of(body: dict[str, Any], api: Api) -> tuple[list[dict[str, Any]], Any]:
    read = read_prompt(body, api)
    assert isinstance(read, ChatBody)
    return json.loads(read.messages_json), json.loads(read.tools_json or b"null")


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", Api.CHAT),
        ("/prefix/v1/completions?x=1", Api.COMPLETION),
        ("/v1/responses/", Api.RESPONSES),
        ("/v1/messages", Api.MESSAGES),
        ("/v1/embeddings", Api.EMBEDDINGS),
        ("/v1/models", None),
        ("", None),
    ],
)
def test_api_follows_from_the_path(path: str, api: Api | None) -> None:
    assert api_of(path) is api


def test_messages_become_a_chat_with_tool_results_before_texts() -> None:
    messages, tools = chat_of(
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": "weather?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Bern"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                        {"type": "text", "text": "thanks"},
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}, {"type": "web_search"}],
        },
        Api.MESSAGES,
    )
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "thanks"},
    ]
    assert [tool["function"]["name"] for tool in tools] == ["f"]


def test_responses_become_a_chat_with_calls_in_the_assistants_message() -> None:
    messages, tools = chat_of(
        {
            "instructions": "Be brief.",
            "input": [
                {"role": "developer", "content": "x"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": []},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "done"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}, {"type": "web_search"}],
        },
        Api.RESPONSES,
    )
    assert [message["role"] for message in messages] == ["system", "system", "user", "assistant", "tool"]
    assert messages[3]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert [tool["function"] for tool in tools] == [{"name": "f", "parameters": {"type": "object"}}]


def part_of(number: int, text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text} if text else {"type": "image", "media": number}


def test_images_of_messages_become_media_items_in_order() -> None:
    png = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    far = {"type": "url", "url": "https://example.org/a.jpg"}
    blocks = [
        {"type": "tool_result", "tool_use_id": "t", "content": [part_of(0, "seen"), {"type": "image", "source": png}]},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "text", "text": "and"},
        {"type": "image", "source": far},
    ]
    body = read_prompt({"messages": [{"role": "user", "content": blocks}]}, Api.MESSAGES)
    assert isinstance(body, ChatBody)
    assert json.loads(body.messages_json) == [
        {"role": "tool", "tool_call_id": "t", "content": [part_of(0, "seen"), part_of(0)]},
        {"role": "user", "content": [part_of(0, "and"), part_of(1)]},
    ]
    assert [(item.data, item.url, item.media_type) for item in body.media] == [
        (b"ABC", "", "image/png"),
        (b"", "https://example.org/a.jpg", ""),
    ]


def test_images_of_responses_become_media_items_in_order() -> None:
    url = "data:image/png;base64,"
    items = [
        {"role": "user", "content": [
            {"type": "input_image", "image_url": url + "QUJD", "detail": "low"},
            {"type": "input_text", "text": "What?"},
            {"type": "input_image", "file_id": "f"},
        ]},
        {"type": "function_call_output", "call_id": "c", "output": [
            {"type": "input_image", "image_url": url + "REVG", "detail": "original"}
        ]},
    ]  # fmt: skip
    body = read_prompt({"input": items}, Api.RESPONSES)
    assert isinstance(body, ChatBody)
    assert json.loads(body.messages_json) == [
        {"role": "user", "content": [part_of(0), part_of(0, "What?")]},
        {"role": "tool", "tool_call_id": "c", "content": [part_of(1)]},
    ]
    assert [(item.data, item.detail) for item in body.media] == [(b"ABC", "low"), (b"DEF", "")]


def test_audio_of_responses_becomes_a_media_item() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
    body = read_prompt({"input": [{"role": "user", "content": [sound]}]}, Api.RESPONSES)
    assert isinstance(body, ChatBody)
    assert json.loads(body.messages_json) == [{"role": "user", "content": [{"type": "audio", "media": 0}]}]
    assert [(item.kind, item.data, item.media_type) for item in body.media] == [(MediaKind.AUDIO, b"ABC", "audio/wav")]


@pytest.mark.parametrize("sound", [None, "QUJD", {}, {"data": "QUJD", "format": "aac"}, {"data": "QUJD", "format": []}])
def test_audio_of_responses_in_another_format_is_left_out(sound: Any) -> None:
    parts = [{"type": "input_audio", "input_audio": sound}, {"type": "input_text", "text": "What?"}]
    body = read_prompt({"input": [{"role": "user", "content": parts}]}, Api.RESPONSES)
    assert isinstance(body, ChatBody)
    assert (json.loads(body.messages_json), body.media) == ([{"role": "user", "content": "What?"}], ())


@pytest.mark.parametrize("api", [Api.MESSAGES, Api.RESPONSES])
def test_broken_image_of_an_agent_is_refused(api: Api) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "%"}
    parts = {
        Api.MESSAGES: {"type": "image", "source": source},
        Api.RESPONSES: {"type": "input_image", "image_url": "data:image/png;base64,%"},
    }
    turns = [{"role": "user", "content": [parts[api]]}]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, code="invalid_media"):
        read_prompt({"messages" if api is Api.MESSAGES else "input": turns}, api)


def test_several_prompts_or_inputs_are_one_of_their_total_length() -> None:
    assert read_prompt({"input": ["one", "two"]}, Api.EMBEDDINGS) == TextBody("onetwo")
    assert read_prompt({"prompt": ["one", "two"]}, Api.COMPLETION) == TextBody("onetwo")
    assert read_prompt({"prompt": [[1], [2, 3]]}, Api.COMPLETION) == TokenBody(pack_u32([1, 2, 3]))
    for mixed in (["one", [2]], [1, "two"], [[1], 2]):
        with pytest.raises(SluiceError):
            read_prompt({"prompt": mixed}, Api.COMPLETION)


def test_body_without_a_prompt_is_none() -> None:
    assert read_prompt({"model": "m"}, None) is None


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"messages": {}}, Api.MESSAGES),
        ({"messages": ["x"]}, Api.MESSAGES),
        ({"messages": []}, Api.MESSAGES),
        ({"input": [1]}, Api.RESPONSES),
        ({"input": 5}, Api.RESPONSES),
        ({"input": {}}, Api.EMBEDDINGS),
    ],
)
def test_malformed_prompt_is_rejected(body: dict[str, Any], api: Api) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT):
        read_prompt(body, api)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "input", "id", "name"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.sampled_from(["messages", "input", "system", "tools", "prompt"]), _JSON), st.sampled_from([*Api])
)
def test_any_body_is_read_or_rejected_by_a_typed_error(body: dict[str, Any], api: Api) -> None:
    try:
        read: object = read_prompt(body, api)
    except SluiceError as error:
        read = error.kind
    assert read is None or isinstance(read, Body) or read is ErrorKind.INVALID_ARGUMENT
