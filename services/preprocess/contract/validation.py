"""Validates chats from clients, so that templates and tokenizers only receive well-formed ones.

Every error is one sentence and names the field as in the client's request, such as ``messages[2].role``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.common.base.errors import ErrorKind, SluiceError, invalid, quoted
from services.common.net.intake.json_intake import foreign_json
from services.common.types.media.parts import MediaInput
from services.common.types.media.spans import MediaKind
from services.preprocess.contract.tokenizer import ChatRequest, Message, Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA_PARTS = tuple(kind.capability for kind in MediaKind)
"""Types of content parts that refer to a media item."""
BILLING = "x-anthropic-billing-header:"
_INSTRUCTING = ("system", "developer")
_TEXTS = ("name", "tool_call_id", "refusal", "reasoning", "reasoning_content")
_REQUEST_FIELDS = ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")


def parse_chat(
    messages_json: bytes,
    tools_json: bytes = b"",
    template_kwargs_json: bytes = b"",
    documents_json: bytes = b"",
    tool_choice_json: bytes = b"",
    *,
    chat_template: str = "",
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    media: Sequence[MediaInput] = (),
) -> ChatRequest:
    """Parses and validates a chat whose parts are JSON; empty bytes are an unset part.

    Args:
        media: the items that its content parts refer to, each once and in order.

    Raises:
        SluiceError: INVALID_ARGUMENT naming the field; invalid UTF-8, lone surrogates and NaN are not valid JSON.
    """
    return checked_chat(
        foreign_json(messages_json, "messages") if messages_json else None,
        foreign_json(tools_json, "tools") if tools_json else None,
        foreign_json(template_kwargs_json, "chat_template_kwargs") if template_kwargs_json else None,
        foreign_json(documents_json, "documents") if documents_json else None,
        foreign_json(tool_choice_json, "tool_choice") if tool_choice_json else None,
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        media=media,
    )


def checked_chat(
    messages: Any,
    tools: Any = None,
    template_kwargs: Any = None,
    documents: Any = None,
    tool_choice: Any = None,
    *,
    chat_template: str = "",
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    media: Sequence[MediaInput] = (),
) -> ChatRequest:
    """Validates a chat whose parts are parsed already; None is an unset part."""
    if add_generation_prompt and continue_final_message:
        raise invalid(
            "add_generation_prompt and continue_final_message are mutually exclusive; set only one of them.",
            param="continue_final_message",
        )
    checked_tools = None if tools is None else _check_tools(tools)
    return ChatRequest(
        messages=_without_billing_line(check_messages(messages, media)),
        tools=checked_tools,
        template_kwargs={} if template_kwargs is None else _check_kwargs(template_kwargs),
        chat_template=chat_template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        documents=None if documents is None else _check_documents(documents),
        tool_choice=None if tool_choice is None else _check_tool_choice(tool_choice, checked_tools),
    )


def check_messages(messages: Any, media: Sequence[MediaInput] = ()) -> list[Message]:
    """Returns the messages unchanged; raises SluiceError(INVALID_ARGUMENT) naming the first invalid field."""
    if not isinstance(messages, list):
        raise invalid("messages must be an array of messages.", param="messages")
    if not messages:
        raise invalid("messages must contain at least one message.", param="messages")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
    _check_references(messages, media)
    return messages


def _without_billing_line(messages: list[Message]) -> list[Message]:
    """Returns the messages without the line of the first one that only bills: it differs in every request, so that no
    prompt would share the prefix of another.
    """
    first = messages[0]
    if first["role"] not in _INSTRUCTING:
        return messages
    content = first.get("content")
    if isinstance(content, str) and content.startswith(BILLING):
        kept: Any = content.partition("\n")[2]
    elif isinstance(content, list) and content and _bills(content[0]):
        line = content[0]["text"].partition("\n")[2]
        kept = [*([{**content[0], "text": line}] if line else ()), *content[1:]]
    else:
        return messages
    return [*([{**first, "content": kept}] if kept or len(messages) == 1 else ()), *messages[1:]]


def _bills(part: Message) -> bool:
    return part["type"] == "text" and bool(part["text"].startswith(BILLING))


def _check_references(messages: list[Message], media: Sequence[MediaInput]) -> None:
    """Checks that content parts refer to all media items, in order."""
    used = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] not in MEDIA_PARTS:
                continue
            where = f"messages[{index}].content[{at}]"
            if used == len(media):
                raise invalid(
                    f"{where}.type {quoted(part['type'])} is not supported; send text.", param=f"{where}.type"
                )
            if part.get("media") != used or isinstance(part["media"], bool):
                raise invalid(f"{where}.media must be {used}, the next of the media items.", param=f"{where}.media")
            if part["type"] != media[used].kind.capability:
                raise invalid(
                    f"{where}.type must be {media[used].kind.capability}, the kind of its media item.",
                    param=f"{where}.type",
                )
            used += 1
    if used < len(media):
        raise invalid(f"No content part refers to media item {used}; leave it out.", param=media[used].part or "media")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object with a role and content.", param=where)
    role = message.get("role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"{quoted(role)} is unknown"
        raise invalid(f"{where}.role {problem}; choose from {', '.join(ROLES)}.", param=f"{where}.role")
    for name in _TEXTS:
        if not isinstance(message.get(name), str | None):
            raise invalid(f"{where}.{name} must be a string.", param=f"{where}.{name}")
    calls = message.get("tool_calls")
    if calls is not None:
        if role != "assistant":
            raise invalid(f"{where}.tool_calls is only allowed in assistant messages.", param=f"{where}.tool_calls")
        _check_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not calls:
            raise invalid(
                f"{where}.content is missing; set it to a string or an array of content parts.",
                param=f"{where}.content",
            )
    elif not isinstance(content, str):
        _check_parts(content, f"{where}.content")


def _check_parts(parts: Any, where: str) -> None:
    if not isinstance(parts, list):
        raise invalid(f"{where} must be a string or an array of content parts.", param=where)
    for index, part in enumerate(parts):
        here = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise invalid(f"{here} must be an object with a type.", param=here)
        kind = part.get("type")
        if not isinstance(kind, str):
            raise invalid(f"{here}.type {'is missing' if kind is None else 'must be a string'}.", param=f"{here}.type")
        if kind in MEDIA_PARTS:
            continue
        if kind not in ("text", "refusal"):
            raise invalid(f"{here}.type {quoted(kind)} is not supported; send text.", param=f"{here}.type")
        if not isinstance(part.get(kind), str):
            raise invalid(f"{here}.{kind} must be a string.", param=f"{here}.{kind}")


def _check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise invalid(f"{where} must be an array of tool calls.", param=where)
    for index, call in enumerate(calls):
        here = f"{where}[{index}]"
        _function_name(call, here)
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str | dict | None):
            raise invalid(f"{here}.function.arguments must be a string of JSON.", param=f"{here}.function.arguments")
        if not isinstance(call.get("id"), str | None):
            raise invalid(f"{here}.id must be a string.", param=f"{here}.id")


def _function_name(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise invalid(f"{where} must be an object of type function with a function.", param=where)
    if item.get("type", "function") != "function":
        raise invalid(f"{where}.type {quoted(item['type'])} is unknown; use function.", param=f"{where}.type")
    function = item.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function must be an object with a name.", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.function.name must be a non-empty string.", param=f"{where}.function.name")
    return name


def _check_tools(tools: Any) -> list[Tool] | None:
    if not isinstance(tools, list):
        raise invalid("tools must be an array of tools.", param="tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        _function_name(tool, where)
        if not isinstance(tool["function"].get("parameters"), dict | None):
            raise invalid(
                f"{where}.function.parameters must be a JSON schema object.", param=f"{where}.function.parameters"
            )
    return tools or None


def _check_tool_choice(choice: Any, tools: list[Tool] | None) -> str | dict[str, Any] | None:
    if choice in ("none", "auto"):
        return choice  # type: ignore[no-any-return]
    if choice != "required" and not isinstance(choice, dict):
        raise invalid("tool_choice must be none, auto, required or one function.", param="tool_choice")
    if not tools:
        raise invalid("tool_choice requires a tool call, but tools is empty.", param="tool_choice")
    if isinstance(choice, dict):
        name = _function_name(choice, "tool_choice")
        if name not in {tool["function"]["name"] for tool in tools}:
            raise invalid(f"tool_choice names {quoted(name)}, which is not among tools.", param="tool_choice")
    return choice  # type: ignore[no-any-return]


def _check_kwargs(kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, dict):
        raise invalid("chat_template_kwargs must be an object.", param="chat_template_kwargs")
    for name in _REQUEST_FIELDS:
        if name in kwargs:
            raise invalid(
                f"chat_template_kwargs must not contain {name}; it is a field of the request.",
                param=f"chat_template_kwargs.{name}",
            )
    return kwargs


def _check_documents(documents: Any) -> list[dict[str, Any]] | None:
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise invalid("documents must be an array of objects.", param="documents")
    return documents or None


def as_json(value: Any) -> bytes:
    """Serializes parsed values for another process; raises SluiceError(INVALID_ARGUMENT) if that is impossible.

    The parser accepts deeper nesting than the serializer.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise invalid("The chat is nested too deeply, or its text is not valid Unicode.", param="messages") from error


def too_large(size: int, limit: int, param: str) -> SluiceError:
    """Returns the error of a prompt over the size limit; sizes in bytes."""
    return SluiceError(
        ErrorKind.TOO_LARGE,
        f"The prompt has {size:,} bytes; send at most {limit:,}.",
        param=param,
        code="prompt_too_large",
    )


def typed_placeholder() -> SluiceError:
    """Returns the error of a chat with images and text that the engine takes for one more image."""
    return invalid(
        "The chat has the placeholder of an image in its text, which the engine takes for an image; remove it.",
        param="messages",
        code="invalid_media",
    )
