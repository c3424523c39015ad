"""What engines do to a chat before its template, as changes of Sluice's, which prove a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.preprocess.contract.tokenizer import ChatRequest, Message, Tool
from tests.certificate.bodies import Body

Change = Callable[[ChatRequest], ChatRequest]
SWITCHES = ("enable_thinking", "thinking")


def with_messages(change: Callable[[list[Message]], list[Message]]) -> Change:
    """Returns the change of a chat's messages."""
    return lambda chat: replace(chat, messages=change(chat.messages))


def with_tools(change: Callable[[Tool], Tool]) -> Change:
    """Returns the change of each of a chat's tools."""
    return lambda chat: replace(chat, tools=[change(tool) for tool in chat.tools] if chat.tools else chat.tools)


def function_with(defaults: dict[str, Any], order: tuple[str, ...] = ()) -> Change:
    """Returns a change that writes fields of a tool's function which the client did not send.

    Args:
        order: of the names that come first; others follow as they are.
    """

    def change(tool: Tool) -> Tool:
        function = {**tool["function"], **{k: v for k, v in defaults.items() if k not in tool["function"]}}
        return {**tool, "function": {**{k: function[k] for k in order if k in function}, **function}}

    return with_tools(change)


def deferred(tool: Tool) -> Tool:
    """SGLang's field of every tool."""
    return {**tool, "defer_loading": None}


def unswitched(chat: ChatRequest) -> ChatRequest:
    """Without the switch for thinking."""
    kwargs = {name: value for name, value in chat.template_kwargs.items() if name not in SWITCHES}
    return replace(chat, template_kwargs=kwargs)


def switched_on(chat: ChatRequest) -> ChatRequest:
    """With thinking switched on."""
    return replace(chat, template_kwargs={**chat.template_kwargs, "enable_thinking": True})


def without_thinking_name(chat: ChatRequest) -> ChatRequest:
    """With the first name of the switch only."""
    kwargs = {name: value for name, value in chat.template_kwargs.items() if name != "thinking"}
    return replace(chat, template_kwargs=kwargs)


def with_effort_none(chat: ChatRequest) -> ChatRequest:
    """With the effort that switches thinking off, if it is."""
    off = chat.template_kwargs.get("enable_thinking") is False
    return replace(chat, template_kwargs={**chat.template_kwargs, "reasoning_effort": "none"}) if off else chat


def arguments_first(messages: list[Message]) -> list[Message]:
    """Calls with the arguments before the name."""

    def turned(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {"arguments": function["arguments"], "name": function["name"]}}

    return [
        {**message, "tool_calls": [turned(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def without_thoughts(messages: list[Message]) -> list[Message]:
    """Without the thoughts of earlier turns."""
    names = ("reasoning", "reasoning_content")
    return [{name: value for name, value in message.items() if name not in names} for message in messages]


def not_continued(chat: ChatRequest) -> ChatRequest:
    """With a new turn after the assistant's last message."""
    return replace(chat, continue_final_message=False, add_generation_prompt=True)


def empty_cut_arguments(messages: list[Message]) -> list[Message]:
    """Arguments that are no object of JSON become an empty one."""

    def whole(call: dict[str, Any]) -> dict[str, Any]:
        try:
            parsed = json.loads(call["function"]["arguments"])
        except json.JSONDecodeError:
            parsed = None
        fields = {} if isinstance(parsed, dict) else {"arguments": "{}"}
        return {**call, "function": {**call["function"], **fields}}

    return [
        {**message, "tool_calls": [whole(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def parts_joined(by: str) -> Change:
    """Returns the change that joins text parts."""

    def joined(message: Message) -> Message:
        content = message.get("content")
        if not isinstance(content, list) or not all(part["type"] == "text" for part in content):
            return message
        return {**message, "content": by.join(part["text"] for part in content)}

    return with_messages(lambda messages: [joined(message) for message in messages])


def developer_as_system(messages: list[Message]) -> list[Message]:
    """The role that templates know."""
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def developer_labelled(messages: list[Message]) -> list[Message]:
    """The first message with SGLang's label; Sluice's Responses have made it a system message."""
    first, *others = messages
    return [{**first, "role": "system", "content": f"Developer instructions:\n{first['content']}"}, *others]


def systems_first(messages: list[Message]) -> list[Message]:
    """All system messages as one, at the beginning."""
    systems = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(systems)}, *others] if systems else others


def last_as_users(chat: ChatRequest) -> ChatRequest:
    """The assistant's last message as the user's, and a new turn."""
    *before, last = chat.messages
    return replace(not_continued(chat), messages=[*before, {**last, "role": "user"}])


def system_blocks_joined(by: str) -> Callable[[Body], Body]:
    """Returns the change of a Messages body that joins the blocks of `system`."""

    def change(body: Body) -> Body:
        system = body.get("system")
        return body if not isinstance(system, list) else {**body, "system": by.join(block["text"] for block in system)}

    return change


def input_parts_joined(by: str) -> Callable[[Body], Body]:
    """Returns the change of a Responses or Messages body that joins the text parts of the user's messages."""

    def joined(message: Body) -> Body:
        content = message.get("content")
        if not isinstance(content, list) or not all(part["type"] in ("input_text", "text") for part in content):
            return message
        return {**message, "content": by.join(part["text"] for part in content)}

    return lambda body: {
        name: [joined(message) for message in value] if name in ("input", "messages") else value
        for name, value in body.items()
    }
