from __future__ import annotations

import json
from typing import Any

import pytest

from services.common.errors import ErrorKind, SluiceError
from services.preprocess.validation import parse_chat
from tests.support.oracles.errors import raises_error

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


def call(name: Any = "f", arguments: Any = "{}", **extra: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **extra}


BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ({}, "messages"),
    ("hi", "messages"),
    (None, "messages"),
    ([7], "messages[0]"),
    ([USER, {"content": "x"}], "messages[1].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([USER, USER, {"role": "user"}], "messages[2].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "assistant"}], "messages[0].content"),
    ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        "messages[0].content[1].type",
    ),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    ([{"role": "tool", "content": "x", "tool_call_id": True}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0].function"),
    ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
    ([{"role": "assistant", "tool_calls": [call(name="")]}], "messages[0].tool_calls[0].function.name"),
    ([{"role": "assistant", "tool_calls": [call(arguments=[1])]}], "messages[0].tool_calls[0].function.arguments"),
    ([{"role": "assistant", "tool_calls": [call(type="shell")]}], "messages[0].tool_calls[0].type"),
    ([{"role": "assistant", "tool_calls": [call(id=5)]}], "messages[0].tool_calls[0].id"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_a_bad_message_is_refused_naming_its_field(messages: Any, param: str) -> None:
    data = json.dumps(messages).encode() if messages is not None else b""
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param) as caught:
        parse_chat(data)
    assert caught.value.message.endswith(".")


def test_an_image_is_refused_as_not_supported() -> None:
    with pytest.raises(SluiceError, match="'image_url' is not supported"):
        parse_chat(json.dumps([{"role": "user", "content": [{"type": "image_url"}]}]).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[NaN]",
        b'[{"role": "user", "content": "\xff"}]',
        b'[{"role": "user", "content": "\\ud800"}]',
        b"[" * 5000,
    ],
    ids=["cut", "nan", "no utf-8", "lone surrogate", "deep"],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with raises_error(match="messages is not valid JSON", param="messages"):
        parse_chat(data)


BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"tools_json": {}}, "tools"),
    ({"tools_json": [5]}, "tools[0]"),
    ({"tools_json": [TOOL, {"type": "function"}]}, "tools[1].function"),
    ({"tools_json": [{"type": "retrieval", "function": {"name": "x"}}]}, "tools[0].type"),
    ({"tools_json": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools_json": [{"function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tool_choice_json": "sometimes"}, "tool_choice"),
    ({"tool_choice_json": 5}, "tool_choice"),
    ({"tool_choice_json": "required"}, "tool_choice"),
    ({"tool_choice_json": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools_json": [TOOL], "tool_choice_json": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools_json": [TOOL], "tool_choice_json": {"type": "function"}}, "tool_choice.function"),
    ({"template_kwargs_json": []}, "chat_template_kwargs"),
    ({"template_kwargs_json": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"template_kwargs_json": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ({"documents_json": {}}, "documents"),
    ({"documents_json": ["x"]}, "documents"),
]


@pytest.mark.parametrize(("parts", "param"), BAD_PARTS)
def test_a_bad_part_is_refused_naming_its_field(parts: dict[str, Any], param: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        parse_chat(json.dumps([USER]).encode(), **{name: json.dumps(part).encode() for name, part in parts.items()})


def test_opening_a_new_turn_and_continuing_the_last_exclude_each_other() -> None:
    with raises_error(param="continue_final_message"):
        parse_chat(json.dumps([USER]).encode(), add_generation_prompt=True, continue_final_message=True)


def test_a_good_chat_arrives_as_written() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "ü"}], "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call()], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    chat = parse_chat(
        json.dumps(messages).encode(),
        json.dumps([TOOL]).encode(),
        b'{"enable_thinking": false}',
        b'[{"title": "t"}]',
        b'{"type": "function", "function": {"name": "get_weather"}}',
    )
    assert chat.messages == messages
    assert chat.tools == chat.prompt_tools == [TOOL]
    assert chat.template_kwargs == {"enable_thinking": False}
    assert chat.documents == [{"title": "t"}]


def test_with_tool_choice_none_the_prompt_holds_no_tools() -> None:
    chat = parse_chat(json.dumps([USER]).encode(), json.dumps([TOOL]).encode(), tool_choice_json=b'"none"')
    assert chat.prompt_tools is None


def test_empty_lists_are_unset() -> None:
    chat = parse_chat(json.dumps([USER]).encode(), b"[]", b"{}", b"[]", b"null")
    assert (chat.tools, chat.template_kwargs, chat.documents, chat.tool_choice) == (None, {}, None, None)
