"""An OpenAI body is read as far as it decides the prompt, and every fault names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.base.errors import ErrorKind, SluiceError
from services.preprocess.contract.validation import parse_chat
from services.worker.local_processing.body import read_body
from tests.support.data.chat_matrix import chats
from tests.support.oracles.errors import raises_error

USER = {"role": "user", "content": "Hello"}


@given(chat=chats())
def test_a_chat_is_the_one_that_preprocess_would_read(chat: dict[str, Any]) -> None:
    read = read_body(json.dumps({"model": "m", "temperature": 0.5, "stop": ["x"], **chat}).encode())
    part = {name: json.dumps(chat[name]).encode() if name in chat else b"" for name in ("messages", "tools")}
    expected = parse_chat(
        part["messages"],
        part["tools"],
        json.dumps(chat.get("chat_template_kwargs")).encode(),
        add_generation_prompt=chat.get("add_generation_prompt"),
        continue_final_message=chat.get("continue_final_message", False),
    )
    assert read.chat == expected
    assert read.parallel_tool_calls


def test_what_decides_the_prompt_is_read_and_the_rest_is_not() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": [USER],
        "tools": tools,
        "tool_choice": "required",
        "documents": [{"text": "d"}],
        "chat_template": "{{ messages[0].content }}",
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "parallel_tool_calls": False,
        "temperature": "as hot as it gets",
    }
    read = read_body(json.dumps(body).encode())
    assert (read.chat.tools, read.chat.tool_choice, read.chat.documents) == (tools, "required", [{"text": "d"}])
    assert read.chat.chat_template == body["chat_template"]
    assert read.chat.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert read.chat.add_generation_prompt is False
    assert not read.parallel_tool_calls


@pytest.mark.parametrize(
    ("document", "param"),
    [
        (b"", "messages_json"),
        (b"{", "messages_json"),
        (b'{"messages": "\xff"}', "messages_json"),
        (b"[]", "messages_json"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "robot"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content"),
    ],
)
def test_a_body_that_is_none_is_refused_by_its_field(document: bytes, param: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=param):
        read_body(document)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", {}),
        ("tool_choice", "sometimes"),
        ("documents", "all"),
        ("chat_template", 1),
        ("chat_template_kwargs", []),
        ("add_generation_prompt", "yes"),
        ("continue_final_message", 1),
        ("parallel_tool_calls", "no"),
        ("reasoning_effort", 3),
    ],
)
def test_every_field_has_its_type(field: str, value: object) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param=field):
        read_body(json.dumps({"messages": [USER], field: value}).encode())


@given(document=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_chat_or_a_typed_error(document: bytes) -> None:
    refused = ErrorKind.INVALID_ARGUMENT
    try:
        read_body(document)  # Hypothesis also draws texts of the sources, and some are chats
    except SluiceError as error:
        refused = error.kind
    assert refused is ErrorKind.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video_url"])
def test_a_media_item_is_refused_with_its_part(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, "media": 0}]
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT, param="messages[1].content[1]") as refused:
        read_body(json.dumps({"messages": [USER, {"role": "user", "content": parts}]}).encode())
    assert "text only" in refused.value.message
