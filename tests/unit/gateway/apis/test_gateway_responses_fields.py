"""Every field of the Responses API with every kind of wrong value: a request, or an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from services.common.apis.responses.conversation import conversation
from services.common.apis.responses.items import SEALED, read_items, reasoning_text, seal
from services.common.apis.responses.tools import read_tools
from services.common.base.errors import ErrorKind, SluiceError
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.apis.responses.translate import translate
from services.gateway.core.request import ChatPrompt
from services.gateway.operations.runner import TranslatedRequest
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error

MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def request_of(kind: type[BaseModel], body: dict[str, Any]) -> TranslatedRequest:
    fields: Any = check(kind, body, BUDGETS)
    tools = read_tools(fields.tools, fields.tool_choice, BUDGETS.list_items)
    items = read_items("earlier" if fields.input is None else fields.input, BUDGETS.list_items).items
    return translate(fields, conversation(fields.instructions, items), tools, "resp_1", BUDGETS, True)


def refused(**body: Any) -> SluiceError:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT) as caught:
        request_of(ResponsesRequest, {"model": "m", "input": "hi", **body})
    assert caught.value.param in caught.value.message
    return caught.value


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("x", "input[1]"),
        ({}, "input[1].type"),
        ({"role": "wizard", "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"role": "user", "content": []}, "input[1].content"),
        ({"role": "user", "content": ["x"]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": "x", "colour": 1}, "input[1].colour"),
        ({"role": "user", "content": "x", "status": "odd"}, "input[1].status"),
        ({"type": "local_shell_call"}, "input[1].type"),
        ({"type": "item_reference", "id": 5}, "input[1].id"),
        ({"type": "item_reference", "id": "msg_1", "role": "user"}, "input[1].role"),
        ({**CALL, "arguments": {}}, "input[1].arguments"),
        ({**CALL, "name": ""}, "input[1].name"),
        ({**CALL, "call_id": None}, "input[1].call_id"),
        ({**CALL, "namespace": 5}, "input[1].namespace"),
        ({**OUTPUT, "output": None}, "input[1].output"),
        ({**OUTPUT, "output": [{"type": "input_image"}]}, "input[1].output[0].image_url"),
        ({"type": "reasoning", "summary": "x"}, "input[1].summary"),
        ({"type": "reasoning", "content": [{"type": "odd"}]}, "input[1].content[0].type"),
        ({"type": "reasoning", "encrypted_content": SEALED + "\u00e4"}, "input[1].encrypted_content"),
    ],
)
def test_items_that_are_wrong(item: Any, param: str) -> None:
    assert refused(input=[MESSAGE, item]).param == param


@pytest.mark.parametrize(
    ("role", "accepted"),
    [
        ("user", "input_text, output_text, text, refusal, input_image, input_audio."),
        ("assistant", "input_text, output_text, text, refusal."),
    ],
)
def test_part_of_another_type_names_those_that_are_accepted(role: str, accepted: str) -> None:
    error = refused(input=[MESSAGE, {"role": role, "content": [{"type": "input_video"}]}])
    assert error.message.endswith(f"choose from {accepted}")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [TOOL, {"type": "local_shell"}]}, "tools[1].type"),
        ({"tools": [{**TOOL, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{**TOOL, "defer_loading": 5}]}, "tools[0].defer_loading"),
        ({"tools": [{**TOOL, "parameters": {"type": 5}}], "tool_choice": "required"}, "tools[0].parameters"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "odd"}}}},
            "text.format.schema",
        ),
        ({"reasoning": {"summary": "concise"}}, "reasoning"),
        ({"include": ["everything"]}, "include[0]"),
        ({"min_tokens": 10, "max_output_tokens": 5}, "min_tokens"),
    ],
)
def test_combinations_that_are_wrong(body: dict[str, Any], param: str) -> None:
    assert refused(**body).param == param


def messages_of(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return conversation(instructions, read_items(list(items), BUDGETS.list_items).items).messages


def test_one_turn_of_the_model_is_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {**CALL, "call_id": "d"}
    assert messages_of(MESSAGE, reasoning, said, CALL, other, OUTPUT, {**OUTPUT, "call_id": "d"}, MESSAGE) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [call, {**call, "id": "d"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        {"role": "tool", "tool_call_id": "d", "content": "x"},
        {"role": "user", "content": "hi"},
    ]
    assert [message["content"] for message in messages_of(said, said)] == ["I look.", "I look."]


def test_instructions_and_developer_messages_keep_role_and_place() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "No jokes."}]}
    assert messages_of(developer, MESSAGE, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "No jokes."},
        {"role": "user", "content": "hi"},
    ]
    assert [message["role"] for message in messages_of(MESSAGE, developer)] == ["user", "developer"]


def test_text_parts_of_user_stay_parts_and_those_of_outputs_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": parts}
    user, _, tool = messages_of({"role": "user", "content": parts}, call, output)
    assert user["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tool["content"] == "a\nb"


@given(st.text())
def test_sealed_reasoning_comes_back_as_it_was(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    (item,) = read_items([{"type": "reasoning", "encrypted_content": seal(text)}], BUDGETS.list_items).items
    assert reasoning_text(item.stored) == text


@given(st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=12), st.booleans(), st.data())
def test_turns_are_left_out_from_the_beginning(roles: list[str], system: bool, data: st.DataObject) -> None:
    items = read_items(
        [{"role": role, "content": f"{index}"} for index, role in enumerate(roles)], BUDGETS.list_items
    ).items
    whole = conversation("Be brief." if system else None, items)
    turns = data.draw(st.integers(0, len(whole.turn_starts()) - 1))
    cut = whole.without_oldest(turns)
    assert len(cut.messages) == len(cut.paths)
    assert cut.messages == whole.messages[:system] + whole.messages[len(whole.messages) - len(cut.messages) + system :]
    assert cut.messages[-1] == whole.messages[-1]
    if turns:
        assert cut.messages[system]["role"] == "user"


@pytest.mark.parametrize(
    ("status", "continues"), [("incomplete", True), ("in_progress", True), ("completed", False), (None, False)]
)
def test_last_message_of_assistant_is_continued_unless_complete(status: str | None, continues: bool) -> None:
    answer = {"role": "assistant", "content": "It is", "status": status}
    for body, expected in (([MESSAGE, answer], continues), ([answer, MESSAGE], False)):
        prompt = request_of(ResponsesRequest, {"model": "m", "input": body}).generation.prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.continue_final_message is expected
        assert prompt.add_generation_prompt is (False if expected else None)


def test_status_of_users_messages_continues_nothing() -> None:
    body = {"model": "m", "input": [{**MESSAGE, "status": "incomplete"}]}
    prompt = request_of(ResponsesRequest, body).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    assert not prompt.continue_final_message
