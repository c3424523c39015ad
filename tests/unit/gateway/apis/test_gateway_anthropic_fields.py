"""Every field of the Messages API with every kind of wrong value: a request, or an error that names the field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from services.common.apis.anthropic.blocks import read_chat
from services.common.base.errors import SluiceError, invalid
from services.gateway.apis.anthropic.schemas import MessagesRequest, explain
from services.gateway.apis.anthropic.translate import EngineCapabilities, translate
from services.gateway.apis.openai import validation
from services.gateway.core.request import ChatPrompt
from services.gateway.operations.runner import TranslatedRequest
from tests.support.data.bodies import BUDGETS
from tests.support.oracles.errors import raises_error

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CAPABILITIES = EngineCapabilities(structured_output=True, thinking_budget=True)
BODY = {"model": "m", "max_tokens": 2000, "messages": [USER]}


def request_of(kind: type[BaseModel], body: dict[str, Any]) -> TranslatedRequest:
    fields: Any = validation.check(kind, body, BUDGETS, explain)
    return translate(fields, "msg_1", CAPABILITIES, BUDGETS)


USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
CALLED = {"role": "assistant", "content": [USE]}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
FILE = {"type": "image", "source": {"type": "file", "file_id": "file_1"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
        ({"messages": [{"role": "user", "content": [FILE]}]}, "messages.0.content.0.source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [USER, CALLED]}, "messages.1.content"),
        ({"messages": [USER, CALLED, USER]}, "messages.2.content"),
        ({"messages": [USER, CALLED, CALLED]}, "messages.2.content"),
        ({"messages": [USER, {"role": "assistant", "content": [USE, USE]}]}, "messages.1.content.1.id"),
        ({"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages.1.content.0.input"),
        ({"messages": [USER, {"role": "assistant", "content": "and so "}]}, "messages.1.content"),
        (
            {"messages": [USER, CALLED, {"role": "user", "content": [{**RESULT, "content": [FILE]}]}]},
            "messages.2.content.0.content.0.source.type",
        ),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"system": [{"type": "text", "text": 5}]}, "system.0.text"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools.0.input_schema.type"),
        ({"tools": [{"name": "two words", "input_schema": {"type": "object"}}]}, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "odd"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {
                "tools": [{"name": "f", "input_schema": {"type": "object", "properties": 5}}],
                "tool_choice": {"type": "any"},
            },
            "tools.0.input_schema",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "max_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
            "output_config.format.schema",
        ),
        ({"stop_sequences": [" "]}, "stop_sequences.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"metadata": {"user": "x"}}, "metadata.user"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"min_tokens": 3000}, "min_tokens"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_wrong_is_named_as_anthropic_names_it(body: dict[str, Any], field: str) -> None:
    with raises_error(param=field) as caught:
        request_of(MessagesRequest, {**BODY, **body})
    assert field in caught.value.message


def test_a_missing_field() -> None:
    with pytest.raises(SluiceError, match=r"^max_tokens: Field required\.$"):
        request_of(MessagesRequest, {"model": "m", "messages": [USER]})


def test_blocks_become_messages_of_a_chat() -> None:
    chat = read_chat(
        [{"type": "text", "text": "Be brief."}],
        [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {**USE, "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {**RESULT, "is_error": True},
                    {"type": "text", "text": "and"},
                    {"type": "text", "text": "?"},
                ],
            },
            {"role": "user", "content": "!"},
        ],
        BUDGETS.list_items,
        BUDGETS.media,
    )
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    texts = [{"type": "text", "text": text} for text in ("and", "?", "!")]
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "Error: x"},
        {"role": "user", "content": texts},
    ]
    assert chat.paths == ["system", "messages.0", "messages.1", "messages.2.content.0", "messages.2"]


def prompt_of(**body: Any) -> ChatPrompt:
    prompt = request_of(MessagesRequest, {**BODY, **body}).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_an_answer_that_is_begun_is_gone_on_with() -> None:
    prompt = prompt_of(messages=[USER, {"role": "assistant", "content": "It is"}])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
    assert not prompt_of(messages=[USER, {"role": "assistant", "content": ""}]).continue_final_message


@pytest.mark.parametrize(
    ("thinking", "on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_option_reaches_the_template(thinking: Any, on: bool) -> None:
    prompt = prompt_of(**({"thinking": thinking} if thinking else {}))
    assert orjson.loads(prompt.template_kwargs_json) == {"enable_thinking": on, "thinking": on}
    own = prompt_of(chat_template_kwargs={"enable_thinking": not on})
    assert orjson.loads(own.template_kwargs_json)["enable_thinking"] is not on


def test_sampling_in_the_engines_words() -> None:
    body = {**BODY, "temperature": 0.3, "top_p": 0.9, "top_k": 0, "stop_sequences": ["x"], "seed": 5}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1500}
    made = request_of(MessagesRequest, body).generation
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.3, 0.9, None)
    assert (made.sampling.seed, made.sampling.thinking_token_budget) == (5, 1500)
    assert (made.stop.max_tokens, made.stop.strings) == (2000, ("x",))
    assert request_of(MessagesRequest, {**body, "top_p": 0}).generation.sampling.top_k == 1


def test_upstream_errors_name_the_clients_fields() -> None:
    body = {**BODY, "system": "s", "tools": [TOOL]}
    rename_fields = request_of(MessagesRequest, body).field_names.rename
    for param, message, expected in (
        ("messages[1].content", "messages[1].content is odd.", "messages.0 is odd."),
        ("tools[0].function.parameters", "tools[0].function.parameters is odd.", "tools.0.input_schema is odd."),
        ("max_completion_tokens", "It is too much.", "max_tokens: It is too much."),
        ("lora", "No such adapter.", "lora_path: No such adapter."),
        ("chat_template_kwargs.enable_thinking", "Unknown.", "thinking.type: Unknown."),
    ):
        assert rename_fields(invalid(message, param=param)).message == expected
    long = rename_fields(invalid("The prompt has 9 tokens.", param="messages", code="context_length_exceeded"))
    assert long.message == "prompt is too long: The prompt has 9 tokens."


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CLEAR = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
LATER = {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}


def tools_in(body: dict[str, Any]) -> list[str]:
    prompt = request_of(MessagesRequest, body).generation.prompt
    assert isinstance(prompt, ChatPrompt)
    return [tool["function"]["name"] for tool in orjson.loads(prompt.tools_json or b"[]")]


def test_fields_of_agents_without_effect_are_accepted_and_reported_if_they_would_change_something() -> None:
    scoped = {"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "scope": "global"}}
    body = {**BODY, "system": [scoped], "context_management": CLEAR, "tools": [TOOL, SEARCH]}
    assert request_of(MessagesRequest, body).generation.degraded == ("left_out:web_search_20250305",)
    without_edits: tuple[dict[str, list[object]] | None, ...] = ({"edits": []}, {}, None)
    for edits in without_edits:
        assert not request_of(MessagesRequest, {**BODY, "context_management": edits}).generation.degraded
    clear = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    redacted = {
        "role": "assistant",
        "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}],
    }
    body = {**BODY, "messages": [USER, redacted, USER], "context_management": clear, "diagnostics": {"a": 1}}
    assert request_of(MessagesRequest, body).generation.degraded == (
        "no_effect:context_management",
        "no_effect:diagnostics",
        "left_out:redacted_thinking",
    )


def test_deferred_tools_are_in_the_prompt_once_a_tool_result_refers_to_them() -> None:
    assert tools_in({**BODY, "tools": [TOOL, LATER]}) == ["f"]
    found = {**RESULT, "content": [{"type": "tool_reference", "tool_name": "later"}]}
    messages = [USER, CALLED, {"role": "user", "content": [found]}]
    assert tools_in({**BODY, "messages": messages, "tools": [TOOL, LATER]}) == ["f", "later"]
    hosted = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    assert tools_in({**BODY, "tools": [TOOL, LATER, hosted]}) == ["f", "later"]
