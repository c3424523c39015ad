"""Tools of the Responses API other than plain functions: custom tools, namespaces and hosted tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.apis.responses.conversation import conversation, with_instruction
from services.common.apis.responses.custom_tools import InputReader, arguments_of, input_of
from services.common.apis.responses.items import compaction_item, read_items, summary_of
from services.common.apis.responses.tools import ChatTools, read_tools
from services.common.base.errors import ErrorKind
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.event_encoder import ResponseEventEncoder
from services.gateway.apis.responses.resource import OutputOptions, Resource, compacted
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.apis.responses.translate import translate
from services.gateway.core.request import Finish, FinishReason, SamplingParams
from services.gateway.operations.output import Counts
from services.gateway.operations.transcript import Block, BlockKind
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error

SHELL = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [SHELL, PATCH]}
SEARCH = {"type": "web_search", "external_web_access": False}
COUNTS = Counts(1, 1, 0, 0)


def tools_of(*tools: Any, choice: Any = None) -> ChatTools:
    return read_tools(list(tools), choice, BUDGETS.list_items)


def test_custom_tool_becomes_a_function_with_one_string_and_its_grammar() -> None:
    [tool] = tools_of(PATCH).chat
    assert tool["function"]["name"] == "apply_patch"
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert 'lark grammar:\nstart: "*** Begin Patch"' in tool["function"]["description"]


def test_namespace_is_flattened_into_functions_with_its_name() -> None:
    found = tools_of(SHELL, AGENTS)
    assert [tool["function"]["name"] for tool in found.chat] == ["shell", "agents__shell", "agents__apply_patch"]
    assert list(found.paths) == ["tools[0]", "tools[1].tools[0]", "tools[1].tools[1]"]


def test_hosted_tools_are_left_out_and_named() -> None:
    found = tools_of(SEARCH, SHELL, {"type": "web_search_2025_08_26"}, {"type": "mcp", "server_label": "x"})
    assert [tool["function"]["name"] for tool in found.chat] == ["shell"]
    assert list(found.left_out) == ["web_search", "web_search_2025_08_26", "mcp"]


def test_tool_choice_names_tools_of_every_kind() -> None:
    for choice, name in (
        ({"type": "function", "name": "shell"}, "shell"),
        ({"type": "function", "name": "shell", "namespace": "agents"}, "agents__shell"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
    ):
        assert tools_of(SHELL, PATCH, AGENTS, choice=choice).choice["function"]["name"] == name
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [SEARCH, {"type": "custom", "name": "apply_patch"}],
    }
    found = tools_of(SHELL, PATCH, choice=allowed)
    assert [tool["function"]["name"] for tool in found.chat] == ["apply_patch"]
    assert found.choice == "required"


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "namespace", "name": "n", "tools": [AGENTS]}], None, "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "n", "tools": [SEARCH]}], None, "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "two words", "tools": []}], None, "tools[0].name"),
        (
            [{"type": "namespace", "name": "n" * 100, "tools": [{**SHELL, "name": "s" * 100}]}],
            None,
            "tools[0].tools[0].name",
        ),
        (
            [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf", "definition": ""}}],
            None,
            "tools[0].format.syntax",
        ),
        ([SHELL, {**PATCH, "name": "shell"}], None, "tools[1].name"),
        ([SHELL], {"type": "web_search"}, "tool_choice.type"),
        ([SHELL], {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}, "tool_choice.tools"),
        ([SHELL], {"type": "function", "name": "shell", "namespace": "n"}, "tool_choice.name"),
    ],
)
def test_invalid_tools_name_the_field(tools: list[Any], choice: Any, param: str) -> None:
    with raises_error(kind=ErrorKind.INVALID_ARGUMENT) as caught:
        tools_of(*tools, choice=choice)
    assert caught.value.param == param


def test_calls_of_the_history_become_calls_of_the_flattened_functions() -> None:
    items = [
        {"role": "user", "content": "Edit."},
        {"type": "function_call", "call_id": "a", "name": "shell", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "done"},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": 'say "hi"\n'},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
    ]
    messages = conversation(None, read_items(items, BUDGETS.list_items).items).messages
    calls = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    assert [call["name"] for call in calls] == ["agents__shell", "apply_patch"]
    assert json.loads(calls[1]["arguments"]) == {"input": 'say "hi"\n'}
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["done", "ok"]


@given(text=st.text(), cuts=st.lists(st.integers(1, 7), min_size=1), ascii_only=st.booleans())
def test_input_of_a_custom_call_is_decoded_at_any_split(text: str, cuts: list[int], ascii_only: bool) -> None:
    arguments, reader = json.dumps({"input": text}, ensure_ascii=ascii_only), InputReader()
    pieces: list[str] = []
    start = 0
    while start < len(arguments):
        size = cuts[len(pieces) % len(cuts)]
        pieces.append(reader.feed(arguments[start : start + size]))
        start += size
    assert "".join(pieces) + reader.finish() == text == input_of(arguments_of(text))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** End Patch"),
        ("*** " + "x" * 1000, "*** " + "x" * 1000),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": "a\\d\\n', "a\\d\n"),
        ('{"input": "raw\nline"}', "raw\nline"),
        ("", ""),
    ],
)
def test_arguments_of_another_form_are_the_input(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    reader = InputReader()
    assert "".join(map(reader.feed, arguments)) + reader.finish() == text


def events_of(*calls: tuple[str, str], tools: ChatTools) -> list[dict[str, Any]]:
    fields = check(ResponsesRequest, {"model": "m", "input": "x"}, BUDGETS)
    encoder = ResponseEventEncoder(
        lambda: Resource("resp_1", fields, SamplingParams(), None),
        OutputOptions.of_request(fields, tools.client, None),
        lambda response: None,
    )
    data = encoder.opening(COUNTS)
    for number, (name, arguments) in enumerate(calls):
        data += encoder.call(number, f"call_{number}", name, "")
        for piece in arguments:
            data += encoder.call(number, "", "", piece)
    data += encoder.closing(Finish(FinishReason.TOOL_CALLS), COUNTS)
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: ")]


def test_streamed_calls_are_given_back_as_the_client_named_their_tools() -> None:
    arguments = arguments_of("*** Begin Patch")
    events = events_of(
        ("apply_patch", arguments), ("agents__shell", "{}"), ("other", "{}"), tools=tools_of(PATCH, AGENTS)
    )
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == "*** Begin Patch"
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == "*** Begin Patch"
    custom, spaced, other = events[-1]["response"]["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", "*** Begin Patch")
    assert (spaced["type"], spaced["name"], spaced["namespace"]) == ("function_call", "shell", "agents")
    assert (other["name"], "namespace" in other) == ("other", False)
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert items == [custom, spaced, other]


def test_items_that_only_their_server_can_use_are_left_out_and_named() -> None:
    found = read_items(
        [
            {"role": "user", "content": "Go on."},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
            {"type": "mcp_list_tools", "id": "m", "server_label": "x", "tools": []},
        ],
        BUDGETS.list_items,
    )
    assert [item.stored["type"] for item in found.items] == ["message"]
    assert found.left_out == ["web_search_call", "encrypted_reasoning", "mcp_list_tools"]


def test_fields_without_effect_and_left_out_parts_are_reported() -> None:
    body = {"model": "m", "input": "x", "text": {"verbosity": "low"}, "context_management": [{"type": "compaction"}]}
    fields = check(ResponsesRequest, {**body, "client_metadata": {"a": "b"}}, BUDGETS)
    found = read_items("x", BUDGETS.list_items)
    tools = tools_of(SEARCH)
    translated = translate(
        fields, conversation(None, found.items), tools, "resp_1", BUDGETS, True, [*tools.left_out, *found.left_out]
    )
    assert translated.generation.degraded == (
        "no_effect:context_management",
        "no_effect:text.verbosity",
        "left_out:web_search",
    )


def test_compaction_item_stands_for_the_conversation() -> None:
    item = compaction_item("They met.")
    [read] = read_items([item], BUDGETS.list_items).items
    assert read.stored == item
    [message] = conversation(None, [read]).messages
    assert (message["role"], message["content"].splitlines()[-1]) == ("user", "They met.")
    foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert read_items([foreign], BUDGETS.list_items).left_out == ["encrypted_compaction"]


def test_compacted_conversation_has_the_users_messages_and_the_summary() -> None:
    items = read_items(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
        BUDGETS.list_items,
    ).items
    assert len(with_instruction(items)) == 4
    made = compacted(
        items, [Block(BlockKind.REASONING, pieces=["hm"]), Block(BlockKind.TEXT, pieces=["They ", "met."])], COUNTS
    )
    *asked, last = made["output"]
    assert [item["content"][0]["text"] for item in asked] == ["a", "c"]
    assert summary_of(last) == "They met."
