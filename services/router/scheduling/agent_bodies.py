"""Reads the prompt from bodies of the Responses, Messages and embeddings APIs, as the chat that engines make of them.

The translation decides which cached prefix a prompt is expected to have, never what an engine generates: where it
differs from the engine's own, fewer blocks match. Parts other than texts, images and audio are left out for the same
reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import chain
from typing import Any

from services.common.media.parts import AUDIO_TYPES, DETAILS
from services.router.scheduling.openai_body import Body, read_chat, read_completion, wrong_body

_SAID = ("text", "image")  # blocks of a message that are neither calls nor their results
MOST_DEPTH = 4  # of content within content, such as the parts of a tool's result


class Api(Enum):
    """API of a request, from its path."""

    CHAT = "chat"
    COMPLETION = "completion"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"


_PATHS = {
    "/chat/completions": Api.CHAT,
    "/completions": Api.COMPLETION,
    "/responses": Api.RESPONSES,
    "/messages": Api.MESSAGES,
    "/messages/count_tokens": Api.MESSAGES,
    "/embeddings": Api.EMBEDDINGS,
}


def api_of(path: str) -> Api | None:
    """Returns the API that a path such as ``/v1/chat/completions`` belongs to; None for others."""
    path = path.partition("?")[0].rstrip("/")
    return next((api for suffix, api in _PATHS.items() if path.endswith(suffix)), None)


def read_prompt(body: Mapping[str, Any], api: Api | None) -> Body | None:
    """Returns the prompt of a parsed body, or None if it has none that can be read.

    Args:
        api: None: the API follows from the body's fields.

    Raises:
        SluiceError: INVALID_ARGUMENT if the prompt is malformed.
    """
    if api is Api.MESSAGES:
        return read_chat(_of_messages(body))
    if api is Api.RESPONSES or (api is None and "input" in body and "messages" not in body):
        return read_chat(_of_responses(body))
    if api is Api.EMBEDDINGS:
        return _of_embeddings(body)
    if "messages" in body:
        return read_chat(body)
    return read_completion({**body, "prompt": _as_one(body["prompt"])}) if "prompt" in body else None


def has_several_prompts(body: Mapping[str, Any]) -> bool:
    """Returns whether a completion has more than one prompt."""
    given = body.get("prompt")
    return isinstance(given, list) and len(given) > 1 and isinstance(given[0], str | list)


def _of_embeddings(body: Mapping[str, Any]) -> Body | None:
    if "messages" in body:
        return read_chat(body)
    given = _as_one(body.get("input"))
    return None if given is None else read_completion({"prompt": given})


def _as_one(given: Any) -> Any:
    """Returns several prompts as one of their total length, which is what a request with them adds to a worker."""
    if not isinstance(given, list) or len(given) < 2:
        return given
    if all(isinstance(each, str) for each in given):
        return "".join(given)
    return list(chain.from_iterable(given)) if all(isinstance(each, list) for each in given) else given


def _of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if system := _text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in _objects(body.get("messages"), "messages"):
        messages += _anthropic(message)
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in _objects(body.get("tools"), "tools")
        if "input_schema" in tool
    ]
    return {"messages": messages, "tools": tools or None}


def _anthropic(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the chat messages of one message: its tool results first, then its texts, images and calls."""
    content = message.get("content")
    blocks = _objects(content, "content") if isinstance(content, list) else []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content"))}
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input"))},
        }
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    said = _content(content if isinstance(content, str) else [each for each in blocks if each.get("type") in _SAID])
    if said or calls:
        yield {"role": message.get("role"), "content": said, **({"tool_calls": calls} if calls else {})}


def _of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if isinstance(instructions := body.get("instructions"), str) and instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in _objects(given, "input"):
            _add_item(messages, item)
    tools = [
        {
            "type": "function",
            "function": {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None},
        }
        for tool in _objects(body.get("tools"), "tools")
        if tool.get("type") == "function"
    ]
    effort = body["reasoning"].get("effort") if isinstance(body.get("reasoning"), Mapping) else None
    return {"messages": messages, "tools": tools or None, "reasoning_effort": effort}


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        messages.append({"role": role, "content": _content(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))})


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Returns the text of content, or the parts of a chat if it has media items."""
    items = [_media(part) for part in content] if isinstance(content, list) else []
    if not any(items):
        return _text(content)
    parts: list[dict[str, Any]] = []
    for part, item in zip(content, items, strict=True):
        if item is not None:
            parts.append(item)
        elif text := _text([part]):
            parts.append({"type": "text", "text": text})
    return parts


def _media(part: Any) -> dict[str, Any] | None:
    """Returns the part of a chat for an image or audio; None for other parts, such as images known by a file id."""
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "input_audio":
        return _audio(part.get("input_audio"))
    url, source = part.get("image_url"), part.get("source")
    if part.get("type") == "image" and isinstance(source, Mapping):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif part.get("type") != "input_image":
        return None
    detail = {"detail": part["detail"]} if part.get("detail") in DETAILS else {}
    return {"type": "image_url", "image_url": {"url": url, **detail}} if isinstance(url, str) else None


def _audio(sound: Any) -> dict[str, Any] | None:
    """Returns the part of a chat for audio; None in formats that only some engines read."""
    form = sound.get("format") if isinstance(sound, Mapping) else None
    return {"type": "input_audio", "input_audio": sound} if isinstance(form, str) and form in AUDIO_TYPES else None


def _text(content: Any, depth: int = 0) -> str:
    """Returns the text of content: a string, or parts that have text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or depth > MOST_DEPTH:
        return ""
    texts = []
    for part in content:
        if isinstance(part, Mapping):
            texts.append(_text(part.get("text", part.get("content")), depth + 1))
        elif isinstance(part, str):
            texts.append(part)
    return "".join(texts)


def _objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise wrong_body(f"has {name} that are not a list of objects")
    return value
