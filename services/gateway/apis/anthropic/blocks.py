"""Messages of content blocks as messages of a chat.

One of Anthropic's turns can be several messages of a chat: results of tools come first, each on its own. Turns of one
role that follow each other are one turn.
"""

from __future__ import annotations

from collections.abc import Container, Set
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.common.budgets import Budget
from services.gateway.apis.common.field_reader import FieldReader

_READ = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
_WHY = {
    "image": "models here read text, not images",
    "document": "models here read text; send the document's text in a text block",
    "search_result": "send what was found in a text block",
    "container_upload": "nothing runs in containers here",
}


@dataclass(slots=True)
class Chat:
    """A chat's messages and where each comes from.

    Until `join_answers` the content of the assistant's messages is the list of its texts: turns that follow each other
    are one message, and each would copy what came before it.

    Attributes:
        open_calls: ids of the last turn's calls that have no result yet.
        place: of the last turn.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    open_calls: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], path: str) -> None:
        """One more message."""
        self.messages.append(message)
        self.paths.append(path)

    def join_answers(self) -> None:
        """Makes the assistant's contents texts; nothing is added to the chat afterwards."""
        for message in self.messages:
            if message["role"] == "assistant":
                message["content"] = "".join(message["content"])

    @property
    def continues(self) -> bool:
        """Whether the last message is one that the model is to go on with."""
        return bool(self.messages[-1]["role"] == "assistant")


def read_chat(system: Any, messages: list[Any], list_items: Budget) -> Chat:
    """The chat; SluiceError(INVALID_ARGUMENT) names what is wrong or what no model here can read.

    Args:
        list_items: longest list of messages, or of a message's blocks.
    """
    chat = Chat()
    if system:
        text = _texts(FieldReader(system, "system", ".", list_items))
        if text:
            chat.add({"role": "system", "content": text}, "system")
    place = FieldReader(messages, "messages", ".", list_items)
    last: FieldReader | None = None
    for last in place.items():
        _read(last, chat)
    if chat.open_calls and last is not None:
        raise _unanswered(last, chat.open_calls)
    chat.join_answers()
    if chat.messages and chat.messages[-1] == {"role": "assistant", "content": ""}:
        del chat.messages[-1], chat.paths[-1]  # there is nothing to go on with
    if not any(message["role"] != "system" for message in chat.messages):
        raise place.wrong("at least one message must say something")
    _check_prefill(chat, last)
    return chat


def _read(place: FieldReader, chat: Chat) -> None:
    role = place.fields("role", "content").under("role").choice("user", "assistant", "system")
    content = place.under("content")
    if content.value is None:
        raise content.wrong("is missing")
    if role == "system":
        chat.add({"role": "system", "content": _texts(content)}, place.path)
        return
    blocks = [content.instead({"type": "text", "text": content.value})]
    if not isinstance(content.value, str):
        blocks = list(content.items())
    for block in blocks:
        _check_kind(block)
    if role == "assistant":
        _read_answer(place, blocks, chat)
    else:
        _read_question(place, blocks, chat)


def _check_kind(block: FieldReader) -> None:
    kind = block.value.get("type") if isinstance(block.value, dict) else None
    if isinstance(kind, str) and kind not in _READ:
        why = _WHY.get(kind, f"blocks here are of type {', '.join(_READ)}")
        raise block.under("type").unsupported(f"{kind[:64]!r} cannot be read; {why}")
    block.kind(*_READ)
    check_mark(block)


def check_mark(place: FieldReader) -> None:
    """SluiceError(INVALID_ARGUMENT) when a mark of the prompt cache, which has no effect here, is none."""
    mark = place.under("cache_control")
    if mark.optional(dict) is not None:
        mark.fields("type", "ttl").under("type").choice("ephemeral")
        if mark.under("ttl").value is not None:
            mark.under("ttl").choice("5m", "1h")


def _read_question(place: FieldReader, blocks: list[FieldReader], chat: Chat) -> None:
    texts = []
    called = set(chat.open_calls)
    answered = set()
    for block in blocks:
        kind = block.value["type"]
        if kind == "tool_result":
            answered.add(_read_result(block, chat, called))
        elif kind == "text":
            texts.append(_text(block))
        else:
            raise block.under("type").wrong(f"is {kind!r}, which belongs to messages of the assistant")
    left = [call for call in chat.open_calls if call not in answered]
    if left:
        raise _unanswered(place, left)
    chat.open_calls = []
    if texts or not blocks:
        _append(chat, "user", texts, place.path)


def _read_result(block: FieldReader, chat: Chat, called: Set[str]) -> str:
    block.fields("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name")
    block.under("toolset_name").ignored(why="there are no toolsets here")
    call = block.under("tool_use_id")
    if call.text(empty=False) not in called:
        raise call.wrong(f"is {call.value[:64]!r}, but the message before has no `tool_use` block with this id")
    content = block.under("content")
    said = "" if content.value is None else _texts(content)
    if block.under("is_error").optional(bool):
        said = f"Error: {said}"
    chat.add({"role": "tool", "tool_call_id": call.value, "content": said}, block.path)
    return str(call.value)


def _read_answer(place: FieldReader, blocks: list[FieldReader], chat: Chat) -> None:
    if chat.open_calls:
        raise _unanswered(place, chat.open_calls)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: dict[str, dict[str, Any]] = {}
    for block in blocks:
        kind = block.value["type"]
        if kind == "text":
            texts.append(_text(block))
        elif kind == "thinking":
            block.fields("type", "thinking", "signature")
            block.under("signature").optional(str)
            thoughts.append(block.under("thinking").text())
        elif kind == "tool_use":
            call = _read_call(block, calls)
            calls[call["id"]] = call
        else:
            what = "was not written here; leave it out" if kind == "redacted_thinking" else "belongs to the user"
            raise block.under("type").wrong(f"is {kind!r}, which {what}")
    said: dict[str, Any] = {}
    if thought := "".join(thoughts):
        said["reasoning_content"] = thought
    if calls:
        said["tool_calls"] = list(calls.values())
        chat.open_calls = list(calls)
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == "assistant":  # has no calls: they would be unanswered
        last["content"] += texts
        last |= said
    else:
        chat.add({"role": "assistant", "content": texts, **said}, place.path)


def _read_call(block: FieldReader, others: Container[str]) -> dict[str, Any]:
    block.fields("type", "id", "name", "input", "cache_control", "caller", "toolset_name")
    block.under("toolset_name").ignored(why="there are no toolsets here")
    call = block.under("id")
    if call.text(empty=False) in others:
        raise call.wrong("is that of another `tool_use` block; ids must be unique")
    given = block.under("input")
    if given.optional(dict) is None:
        raise given.wrong("is missing")
    function = {"name": block.under("name").text(empty=False), "arguments": orjson.dumps(given.value).decode()}
    return {"id": call.value, "type": "function", "function": function}


def _append(chat: Chat, role: str, texts: list[str], path: str) -> None:
    """Text of a role; more of what the same role just said is the same message."""
    parts = [{"type": "text", "text": text} for text in texts]
    last = chat.messages[-1] if chat.messages else {}
    if last.get("role") == role:
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"] += parts
    else:
        chat.add({"role": role, "content": texts[0] if len(texts) == 1 else parts}, path)


def _text(block: FieldReader) -> str:
    block.fields("type", "text", "cache_control", "citations")
    block.under("citations").ignored([], why="nothing here cites")
    return block.under("text").text()


def _texts(place: FieldReader) -> str:
    """A string, or the texts of a list of text blocks, a line each."""
    if isinstance(place.value, str):
        return place.value
    texts = []
    for block in place.items():
        _check_kind(block)
        block.kind("text")
        texts.append(_text(block))
    return "\n".join(texts)


def _unanswered(place: FieldReader, calls: list[str]) -> Exception:
    return place.under("content").wrong(
        f"lacks `tool_result` blocks: the calls {', '.join(call[:64] for call in calls[:8])} of the message before "
        "have no results; each must have one right after it"
    )


def _check_prefill(chat: Chat, last: FieldReader | None) -> None:
    if last is not None and chat.continues and chat.messages[-1]["content"] != chat.messages[-1]["content"].rstrip():
        raise last.under("content").wrong("must not end with white space, because the model goes on from there")
