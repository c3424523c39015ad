"""Translates messages of content blocks to chat messages.

One Anthropic message can become several chat messages: each tool result becomes a message of its own, before the text.
Consecutive messages of the same role are merged.
"""

from __future__ import annotations

from collections.abc import Container, Set
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from services.common.apis.anthropic.images import has_image, read_image
from services.common.apis.field_reader import FieldReader
from services.common.base.budgets import Budget
from services.common.types.media.parts import MediaInput, MediaLimits, check_total

_SUPPORTED = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference")
_UNSUPPORTED_REASONS = {
    "document": "send the document's text in a text block, or its pages as images",
    "search_result": "send the search results in a text block",
    "container_upload": "containers are not supported",
}


@dataclass(slots=True)
class Chat:
    """Chat messages with the path of the client's message that each comes from.

    Until `join_assistant_texts` is called, the content of an assistant message is a list of texts, so that merging
    consecutive messages takes linear time.

    Attributes:
        open_calls: ids of calls in the last assistant message that have no result yet.
        references: names of the deferred tools that tool results refer to.
        left_out: types of the blocks that the model does not get.
        media: the media items, which references in the messages stand for.
        parts: the client's paths of content parts, by the chat's.
        limits: bounds on the media items.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open_calls: list[str] = field(default_factory=list)
    references: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    media: list[MediaInput] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)
    limits: MediaLimits = field(default_factory=MediaLimits)

    def add(self, message: dict[str, Any], path: str) -> None:
        self.messages.append(message)
        self.paths.append(path)

    def join_assistant_texts(self) -> None:
        """Joins the text lists of assistant messages; no message may be added afterwards."""
        for message in self.messages:
            if message["role"] == "assistant":
                message["content"] = "".join(message["content"])

    @property
    def continues(self) -> bool:
        """Whether the model continues the last message."""
        return bool(self.messages[-1]["role"] == "assistant")


def read_chat(system: Any, messages: list[Any], list_items: Budget, limits: MediaLimits) -> Chat:
    """Returns the chat; raises SluiceError(INVALID_ARGUMENT) for invalid or unsupported input.

    Args:
        list_items: the longest list of messages, or of a message's blocks.
        limits: bounds on the media items.
    """
    chat = Chat(limits=limits)
    if system:
        text = _texts(FieldReader(system, "system", ".", list_items))
        if text:
            chat.add({"role": "system", "content": text}, "system")
    reader = FieldReader(messages, "messages", ".", list_items)
    last: FieldReader | None = None
    for last in reader.items():
        _read(last, chat)
    if chat.open_calls and last is not None:
        raise _unanswered(last, chat.open_calls)
    chat.join_assistant_texts()
    if chat.messages and chat.messages[-1] == {"role": "assistant", "content": ""}:
        del chat.messages[-1], chat.paths[-1]  # there is nothing to continue
    if not any(message["role"] != "system" for message in chat.messages):
        raise reader.invalid("needs at least one message with content")
    _check_prefill(chat, last)
    return chat


def _read(reader: FieldReader, chat: Chat) -> None:
    role = reader.fields("role", "content").under("role").choice("user", "assistant", "system")
    content = reader.under("content")
    if content.value is None:
        raise content.invalid("is missing")
    if role == "system":
        chat.add({"role": "system", "content": _texts(content)}, reader.path)
        return
    blocks = [content.with_value({"type": "text", "text": content.value})]
    if not isinstance(content.value, str):
        blocks = list(content.items())
    for block in blocks:
        _check_kind(block)
    if role == "assistant":
        _read_assistant(reader, blocks, chat)
    else:
        _read_user(reader, blocks, chat)


def _check_kind(block: FieldReader) -> None:
    supported = f"the supported types are {', '.join(_SUPPORTED)}"
    block.reject_other_kinds(
        _SUPPORTED, lambda kind: f"blocks are not accepted; {_UNSUPPORTED_REASONS.get(kind, supported)}"
    )
    block.kind(*_SUPPORTED)
    check_cache_control(block)


def check_cache_control(reader: FieldReader) -> None:
    """Raises SluiceError(INVALID_ARGUMENT) if `cache_control` is malformed; valid values have no effect."""
    cache_control = reader.under("cache_control")
    if cache_control.optional(dict) is not None:
        cache_control.fields("type", "ttl", "scope").under("type").choice("ephemeral")
        cache_control.under("scope").optional(str)
        if cache_control.under("ttl").value is not None:
            cache_control.under("ttl").choice("5m", "1h")


def _read_user(reader: FieldReader, blocks: list[FieldReader], chat: Chat) -> None:
    contents: list[FieldReader] = []
    called = set(chat.open_calls)
    answered = set()
    for block in blocks:
        kind = block.value["type"]
        if kind == "tool_result":
            answered.add(_read_result(block, chat, called))
        elif kind in ("text", "image"):
            contents.append(block)
        else:
            raise block.under("type").invalid(f"is {kind!r}, which is allowed only in assistant messages")
    missing = [call for call in chat.open_calls if call not in answered]
    if missing:
        raise _unanswered(reader, missing)
    chat.open_calls = []
    if contents or not blocks:
        _append_user(chat, contents, reader.path)


def _read_result(block: FieldReader, chat: Chat, called: Set[str]) -> str:
    block.fields("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name")
    block.under("toolset_name").reject_unless(reason="toolsets do not exist here")
    content = block.under("content")
    result: Any = "Error: " if block.value.get("is_error") is True else ""
    if has_image(content.value):
        result = [{"type": "text", "text": result}] if result else []
        for part in content.items():
            _check_kind(part)
            part.kind("text", "image", "tool_reference")
            _add_part(chat, result, part, len(chat.messages))
    elif content.value is not None:
        result += _texts(content, chat.references)
    call = block.under("tool_use_id")
    if call.text(empty=False) not in called:
        raise call.invalid(f"is {call.value[:64]!r}, but the previous message has no `tool_use` block with this id")
    block.under("is_error").optional(bool)
    chat.add({"role": "tool", "tool_call_id": call.value, "content": result}, block.path)
    return str(call.value)


def _read_assistant(reader: FieldReader, blocks: list[FieldReader], chat: Chat) -> None:
    if chat.open_calls:
        raise _unanswered(reader, chat.open_calls)
    texts: list[str] = []
    thinking: list[str] = []
    calls: dict[str, dict[str, Any]] = {}
    for block in blocks:
        kind = block.value["type"]
        if kind == "text":
            texts.append(_text(block))
        elif kind == "thinking":
            block.fields("type", "thinking", "signature")
            block.under("signature").optional(str)
            thinking.append(block.under("thinking").text())
        elif kind == "redacted_thinking":
            chat.left_out.append(kind)
        elif kind == "tool_use":
            call = _read_call(block, calls)
            calls[call["id"]] = call
        else:
            raise block.under("type").invalid(f"is {kind!r}, which is allowed only in user messages")
    extra: dict[str, Any] = {}
    if reasoning := "".join(thinking):
        extra["reasoning_content"] = reasoning
    if calls:
        extra["tool_calls"] = list(calls.values())
        chat.open_calls = list(calls)
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == "assistant":  # has no calls: they would have no results
        last["content"] += texts
        last |= extra
    else:
        chat.add({"role": "assistant", "content": texts, **extra}, reader.path)


def _read_call(block: FieldReader, others: Container[str]) -> dict[str, Any]:
    block.fields("type", "id", "name", "input", "cache_control", "caller", "toolset_name")
    block.under("toolset_name").reject_unless(reason="toolsets do not exist here")
    call = block.under("id")
    if call.text(empty=False) in others:
        raise call.invalid("repeats the id of another `tool_use` block; ids must be unique")
    arguments = block.under("input")
    if arguments.optional(dict) is None:
        raise arguments.invalid("is missing")
    function = {"name": block.under("name").text(empty=False), "arguments": orjson.dumps(arguments.value).decode()}
    return {"id": call.value, "type": "function", "function": function}


def _append_user(chat: Chat, blocks: list[FieldReader], path: str) -> None:
    """Appends blocks of texts and images, to the last message if it is a user's."""
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") != "user":
        if len(blocks) == 1 and blocks[0].value["type"] == "text":
            chat.add({"role": "user", "content": _text(blocks[0])}, path)
            return
        last = {"role": "user", "content": []}
        chat.add(last, path)
    elif isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}]
    for block in blocks:
        _add_part(chat, last["content"], block, len(chat.messages) - 1)


def _add_part(chat: Chat, parts: list[dict[str, Any]], block: FieldReader, message: int) -> None:
    """Appends a block to the parts of the chat message with this index."""
    if block.value["type"] != "image":
        parts.append({"type": "text", "text": _text_of(block, chat.references)})
        return
    item = read_image(block, chat.limits, len(chat.media))
    check_total((*chat.media, item), chat.limits)
    part = f"messages[{message}].content[{len(parts)}]"
    chat.parts[part] = block.path
    parts.append({"type": "image", "media": len(chat.media)})
    chat.media.append(replace(item, part=part))


def _text(block: FieldReader) -> str:
    block.fields("type", "text", "cache_control", "citations")
    block.under("citations").reject_unless([], reason="Sluice does not generate citations")
    return block.under("text").text()


def _texts(reader: FieldReader, references: set[str] | None = None) -> str:
    """Returns a string as it is, and a list of text blocks joined by newlines.

    Args:
        references: collects the tools that blocks refer to; None where only text is allowed.
    """
    if isinstance(reader.value, str):
        return reader.value
    texts = []
    for block in reader.items():
        _check_kind(block)
        block.kind("text") if references is None else block.kind("text", "tool_reference")
        texts.append(_text(block) if references is None else _text_of(block, references))
    return "\n".join(texts)


def _text_of(block: FieldReader, references: set[str]) -> str:
    """Returns the text of a block, and of a reference to a tool, which is added to `references`."""
    if block.value["type"] == "text":
        return _text(block)
    name = block.fields("type", "tool_name", "cache_control").under("tool_name").text(empty=False)
    references.add(name)
    return f"The tool {name} is available now."


def _unanswered(reader: FieldReader, calls: list[str]) -> Exception:
    return reader.under("content").invalid(
        f"lacks `tool_result` blocks for the calls {', '.join(call[:64] for call in calls[:8])} of the previous "
        "message; send the result of each call in the message that follows it"
    )


def _check_prefill(chat: Chat, last: FieldReader | None) -> None:
    if last is not None and chat.continues and chat.messages[-1]["content"] != chat.messages[-1]["content"].rstrip():
        raise last.under("content").invalid("must not end with white space, because the model continues the text")
