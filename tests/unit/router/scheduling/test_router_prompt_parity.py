"""The picker's prompt of a body is the gateway's, for every API and any of its fields."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.apis.prompts import ChatPrompt, TextPrompt, TokenPrompt
from services.common.apis.responses.conversation import conversation
from services.common.apis.responses.items import read_items, seal
from services.common.apis.responses.tools import read_tools
from services.gateway.apis.anthropic.schemas import MessagesRequest
from services.gateway.apis.anthropic.translate import EngineCapabilities
from services.gateway.apis.anthropic.translate import translate as translate_messages
from services.gateway.apis.openai.schemas import ChatCompletionRequest, CompletionRequest
from services.gateway.apis.openai.translate import chat_request, completion_requests
from services.gateway.apis.openai.validation import check
from services.gateway.apis.responses.schemas import ResponsesRequest
from services.gateway.apis.responses.translate import translate as translate_responses
from services.gateway.core.request import GenerationRequest
from services.gateway.settings import GatewaySettings
from services.router.scheduling.request_bodies import Api, ReadBody, read_prompt

BUDGETS = GatewaySettings().budgets
PNG = "data:image/png;base64,QUJD"
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
EFFORTS = st.sampled_from(["none", "low", "high"])
KWARGS = st.sampled_from([{"thinking": True}, {"enable_thinking": False}, {"tone": "dry"}])
TEXT = st.sampled_from(["", "a", "b c"])


def gateway_request(body: dict[str, Any], api: Api) -> GenerationRequest:
    if api is Api.CHAT:
        return chat_request(body, check(ChatCompletionRequest, body, BUDGETS), "r", 1, BUDGETS)
    if api is Api.COMPLETION:
        return completion_requests(check(CompletionRequest, body, BUDGETS), "r", 1, BUDGETS)[0]
    if api is Api.MESSAGES:
        fields = check(MessagesRequest, body, BUDGETS)
        return translate_messages(fields, "r", EngineCapabilities(False, False), BUDGETS).generation
    request = check(ResponsesRequest, body, BUDGETS)
    tools = read_tools(request.tools, request.tool_choice, BUDGETS.list_items)
    chat = conversation(request.instructions, read_items(request.input, BUDGETS.list_items).items)
    return translate_responses(request, chat, tools, "r", BUDGETS, False).generation


def optional(draw: Any, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The body with some of the fields."""
    return body | {name: draw(values) for name, values in fields.items() if draw(st.booleans())}


def chat_parts() -> Any:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}]
    return TEXT | st.lists(st.sampled_from(parts), min_size=1, max_size=3)


@st.composite
def chats(draw: Any) -> dict[str, Any]:
    roles = st.sampled_from(["system", "user", "assistant", "developer"])
    messages = draw(st.lists(st.fixed_dictionaries({"role": roles, "content": TEXT}), max_size=3))
    messages.append({"role": "user", "content": draw(chat_parts())})
    return optional(
        draw,
        {"model": "m", "messages": messages},
        tools=st.just([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]),
        reasoning_effort=EFFORTS,
        enable_thinking=st.booleans(),
        chat_template_kwargs=KWARGS,
        chat_template=st.just("{{ messages }}"),
        add_generation_prompt=st.booleans(),
        documents=st.just([{"title": "t"}]),
        cache_salt=st.just("s"),
    )


@st.composite
def completions(draw: Any) -> dict[str, Any]:
    prompts = st.sampled_from(["a", ["a"], [1, 2], [[1, 2]]])
    body = {"model": "m", "prompt": draw(prompts)}
    return optional(draw, body, add_special_tokens=st.booleans(), extra_key=st.just("s"))


def response_part(text: str = "a") -> Any:
    parts = [
        {"type": "input_text", "text": text},
        {"type": "input_image", "image_url": PNG, "detail": "high"},
        {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
    ]
    return st.lists(st.sampled_from(parts), min_size=1, max_size=3)


@st.composite
def response_turn(draw: st.DrawFn, number: int) -> list[dict[str, Any]]:
    call = {"call_id": f"c{number}", "name": "f", **draw(st.sampled_from([{}, {"namespace": "n"}]))}
    output = draw(TEXT | response_part())
    refusal = {"type": "refusal", "refusal": "no"}
    said = [{"type": "output_text", "text": "b", "annotations": []}, *draw(st.sampled_from([[], [refusal]]))]
    answered = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
    custom_answered = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "o"}
    summary = [{"type": "summary_text", "text": "s"}]
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": draw(TEXT | response_part())}],
        [{"role": "developer", "content": [{"type": "input_text", "text": text} for text in ("x", "y")]}],
        [{"role": "assistant", "content": said, "status": draw(st.sampled_from(["completed", "incomplete"]))}],
        [{"type": "reasoning", "summary": summary}, {"role": "assistant", "content": "z"}],
        [{"type": "reasoning", "summary": [], "encrypted_content": seal("t")}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "foreign"}],
        [{"type": "compaction", "encrypted_content": seal("so far")}],
        [{"type": "function_call", "arguments": "{}", **call}, answered],
        [{"type": "custom_tool_call", "input": "i", **call}, custom_answered],
        [{"type": "web_search_call", "id": "ws_1", "status": "completed"}],
    ]
    return draw(st.sampled_from(turns))


@st.composite
def responses(draw: Any) -> dict[str, Any]:
    items = [item for number in range(draw(st.integers(0, 4))) for item in draw(response_turn(number))]
    items.append({"role": "user", "content": "go on"})
    function = {"type": "function", "name": "f", "parameters": SCHEMA}
    custom = {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}}
    tools = [function, custom, {"type": "namespace", "name": "n", "tools": [function]}, {"type": "web_search"}]
    named = {"type": "custom", "name": "c"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    body: dict[str, Any] = {"model": "m", "input": draw(st.sampled_from(["hello", items]))}
    if draw(st.booleans()):
        body |= {"tools": tools, "tool_choice": draw(st.sampled_from(["auto", "none", named, allowed, None]))}
    return optional(
        draw,
        body,
        instructions=TEXT,
        reasoning=st.fixed_dictionaries({"effort": EFFORTS}),
        chat_template_kwargs=KWARGS,
        cache_salt=st.just("s"),
    )


@st.composite
def message_turn(draw: st.DrawFn, number: int) -> list[dict[str, Any]]:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    text = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": f"t{number}", "name": "f", "input": {"x": "1"}}
    content = draw(st.sampled_from(["r", [text, text], [text, image], [{"type": "tool_reference", "tool_name": "f"}]]))
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": content, "is_error": draw(st.booleans())}
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    turns: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": draw(st.sampled_from(["q", [text], [text, image], [image, text, text]]))}],
        [{"role": "assistant", "content": draw(st.sampled_from(["b", [text, text], [thought, text]]))}],
        [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "d"}, text]}],
        [{"role": "system", "content": [text]}],
        [{"role": "assistant", "content": [thought, text, use]}, {"role": "user", "content": [result, text]}],
    ]
    return draw(st.sampled_from(turns))


@st.composite
def messages(draw: Any) -> dict[str, Any]:
    turns = [turn for number in range(draw(st.integers(0, 4))) for turn in draw(message_turn(number))]
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 4_000,
        "messages": [*turns, {"role": "user", "content": "go on"}],
    }
    if draw(st.booleans()):
        body["messages"].append({"role": "assistant", "content": "The answer"})
    tool = {"name": "f", "input_schema": SCHEMA, "defer_loading": draw(st.booleans())}
    search = {"type": "web_search_20250305", "name": "web_search"}
    choices = st.sampled_from([{"type": "auto"}, {"type": "none"}])
    billing = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "Be brief.")]
    return optional(
        draw,
        body,
        system=st.sampled_from(["Be brief.", billing]),
        tools=st.just([tool, search]),
        tool_choice=choices,
        thinking=st.sampled_from(
            [{"type": "enabled", "budget_tokens": 2_000}, {"type": "disabled"}, {"type": "adaptive"}]
        ),
        output_config=st.just({"effort": "low"}),
        chat_template_kwargs=KWARGS,
        cache_salt=st.just("s"),
    )


BODIES = {Api.CHAT: chats(), Api.COMPLETION: completions(), Api.RESPONSES: responses(), Api.MESSAGES: messages()}


@pytest.mark.parametrize("api", BODIES, ids=lambda api: api.value)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_prompt_of_any_body_is_the_gateways(api: Api, data: st.DataObject) -> None:
    body = data.draw(BODIES[api])
    expected = gateway_request(body, api)
    read = read_prompt(body, api)
    assert isinstance(read, ReadBody), read
    assert isinstance(expected.prompt, ChatPrompt | TextPrompt | TokenPrompt)
    assert (read.prompt, read.cache_salt) == (expected.prompt, expected.cache_salt)
