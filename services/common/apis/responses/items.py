"""Validates the items of the Responses API.

One turn of the model is several items (reasoning, a message, calls) but one chat message.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from os import urandom
from typing import Any

from services.common.apis.field_reader import FieldReader
from services.common.base.budgets import Budget
from services.common.types.media.parts import DETAILS

SEALED = "sluice1."
"""Prefix of `encrypted_content`, which holds the reasoning in base64: opaque to clients but not encrypted."""

_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "compaction",
    "item_reference",
)
_HOSTED_CALLS = re.compile(
    "(web_search|file_search|code_interpreter|image_generation|computer|tool_search|mcp|mcp_approval)"
    "_(call|call_output|list_tools|request|response)"
)
"""Items about tools that OpenAI runs itself, from a conversation that it began."""

MEDIA_PARTS = ("input_image", "input_audio")
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
_RESPONSE = "resp_"
_OUTPUT_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{48})[0-9a-f]{4,8}")
_STATUS = ("in_progress", "completed", "incomplete")


@dataclass(frozen=True, slots=True)
class Item:
    """A validated item.

    Attributes:
        stored: the form in which it is stored and listed, with an id.
        path: its path in the client's request.
    """

    stored: dict[str, Any]
    path: str


@dataclass(frozen=True, slots=True)
class Input:
    """The items of a request's `input`; `left_out` has the kinds of those that the model does not get."""

    items: list[Item]
    left_out: list[str]


def read_items(value: Any, list_items: Budget, field: str = "input") -> Input:
    """Returns the items of a request's `input`; raises SluiceError(INVALID_ARGUMENT) for an invalid one.

    Calls of hosted tools, and reasoning that another server has encrypted, are left out: a conversation continues
    here that began elsewhere.

    Args:
        list_items: the longest list of items, or of an item's parts.
        field: name of the request's field.
    """
    if isinstance(value, str):
        return Input([Item(user_message(value), "input")], [])
    found = Input([], [])
    for reader in FieldReader(value, field, "[]", list_items).items():
        if kind := _foreign(reader.value):
            found.left_out.append(kind)
        else:
            found.items.append(Item(_read(reader), reader.path))
    return found


def _foreign(item: Any) -> str:
    """Returns the kind of an item that only the server that made it can use; empty for others."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        return ""
    if _HOSTED_CALLS.fullmatch(kind):
        return kind
    sealed = item.get("encrypted_content")
    if not isinstance(sealed, str) or not sealed or sealed.startswith(SEALED):
        return ""
    if kind == "reasoning" and not item.get("content"):
        return "encrypted_reasoning"
    return "encrypted_compaction" if kind == "compaction" else ""


def user_message(text: str) -> dict[str, Any]:
    """Returns the item of a user's message."""
    return _message("user", [{"type": "input_text", "text": text}])


def compaction_item(summary: str) -> dict[str, Any]:
    """Returns the item that stands for a conversation."""
    return {"id": new_id("cmp"), "type": "compaction", "encrypted_content": seal(summary)}


def summary_of(item: dict[str, Any]) -> str:
    """Returns the summary in a compaction item."""
    return _unsealed(item["encrypted_content"]) or ""


def seal(reasoning: str) -> str:
    """Returns text in the opaque form of `encrypted_content`."""
    return SEALED + base64.b64encode(reasoning.encode()).decode()


def new_id(prefix: str) -> str:
    """Returns a new id in the format of OpenAI's API."""
    return f"{prefix}_{urandom(24).hex()}"


def item_id(response_id: str, index: int) -> str:
    """Returns the id, without its prefix, of an output item: it contains that of the response."""
    return f"{response_id.removeprefix(_RESPONSE)}{index:04x}"


def response_of(item_id: str) -> str:
    """Returns the id of the response that an output item belongs to; empty for the ids of other items."""
    found = _OUTPUT_ID.fullmatch(item_id)
    return f"{_RESPONSE}{found[1]}" if found else ""


def _read(reader: FieldReader) -> dict[str, Any]:
    if not isinstance(reader.value, dict):
        raise reader.invalid("must be an object")
    supported = f"the supported types are {', '.join(_ITEMS)}"
    reader.reject_other_kinds(_ITEMS, lambda kind: f"items are not accepted; {supported}")
    if reader.value.keys() == {"id"}:  # the type of a reference may be left out
        return _read_reference(reader)
    kind = reader.value.get("type", "message" if reader.value.keys() & {"role", "content"} else None)
    kind = "message" if kind == "message" else reader.kind(*_ITEMS)
    if reader.under("status").value is not None:
        reader.under("status").choice(*_STATUS)
    reader.under("id").optional(str)
    return _READERS[kind](reader)


def _read_message(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "role", "content", "id", "status", "phase")
    role = reader.under("role").choice("user", "assistant", "system", "developer")
    kind = "output_text" if role == "assistant" else "input_text"
    content = reader.under("content")
    if isinstance(content.value, str):
        parts = [{"type": kind, "text": content.value}]
    elif content.value is None:
        raise content.invalid("is missing")
    else:
        parts = [_part(part, kind) for part in content.items()]
        if not parts:
            raise content.invalid("must have at least one part")
    if role in ("system", "developer") and any(part["type"] in MEDIA_PARTS for part in parts):
        raise content.unsupported("images and audio are accepted in user messages and outputs of calls")
    open_ended = role == "assistant" and reader.value.get("status") in ("in_progress", "incomplete")
    return _message(role, parts, reader.value.get("id"), "incomplete" if open_ended else "completed")


def _message(
    role: str, parts: list[dict[str, Any]], item_id: str | None = None, status: str = "completed"
) -> dict[str, Any]:
    content = [{**part, "annotations": []} if part["type"] == "output_text" else part for part in parts]
    return {
        "id": item_id or new_id("msg"),
        "type": "message",
        "status": status,
        "role": role,
        "content": content,
    }


def _part(reader: FieldReader, kind: str) -> dict[str, Any]:
    """Returns a part of a message or of a call's output; `kind` is the type that texts are stored with."""
    part_type = reader.value.get("type") if isinstance(reader.value, dict) else None
    if part_type == "input_file":
        raise reader.under("type").unsupported("send the text of the file, or its pages as images")
    if part_type in MEDIA_PARTS:
        if kind != "input_text":
            raise reader.under("type").invalid(f"is {part_type!r}, which is not allowed in assistant messages")
        return _image(reader) if part_type == "input_image" else _audio(reader)
    part_type = reader.kind(*_TEXT_PARTS, *(MEDIA_PARTS if kind == "input_text" else ()))
    reader.fields("type", "text", "refusal", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint")
    if part_type == "refusal":
        return {"type": "refusal", "refusal": reader.under("refusal").text()}
    return {"type": kind, "text": reader.under("text").text()}


def _image(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "image_url", "detail", "file_id", "prompt_cache_breakpoint")
    reader.under("file_id").reject_unless(reason="send the image as image_url")
    url = reader.under("image_url").text(empty=False)
    part = {"type": "input_image", "image_url": url}
    detail = reader.under("detail")
    return part if detail.value is None else {**part, "detail": detail.choice(*DETAILS)}


def _audio(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "input_audio")
    audio = reader.under("input_audio").fields("data", "format")
    values = {"data": audio.under("data").text(empty=False), "format": audio.under("format").text(empty=False)}
    return {"type": "input_audio", "input_audio": values}


def _read_call(reader: FieldReader) -> dict[str, Any]:
    reader.fields(
        "type", "id", "status", "call_id", "name", "arguments", "parsed_arguments", "caller", "namespace", "async"
    )
    reader.under("async").reject_unless(False, reason="calls are synchronous")
    return {
        "id": reader.value.get("id") or new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": reader.under("call_id").text(empty=False),
        "name": reader.under("name").text(empty=False),
        "arguments": reader.under("arguments").text(),
        **_namespace(reader),
    }


def _namespace(reader: FieldReader) -> dict[str, str]:
    namespace = reader.under("namespace").optional(str)
    return {"namespace": namespace} if namespace else {}


def _read_custom_call(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "id", "status", "call_id", "name", "input", "caller", "namespace")
    return {
        "id": reader.value.get("id") or new_id("ctc"),
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": reader.under("call_id").text(empty=False),
        "name": reader.under("name").text(empty=False),
        "input": reader.under("input").text(),
        **_namespace(reader),
    }


def _read_output(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "id", "status", "call_id", "output", "name", "caller", "namespace")
    output = reader.under("output")
    is_list = isinstance(output.value, list)
    return {
        "id": reader.value.get("id") or new_id("fco" if reader.value["type"] == "function_call_output" else "ctco"),
        "type": reader.value["type"],
        "status": "completed",
        "call_id": reader.under("call_id").text(empty=False),
        "output": [_part(part, "input_text") for part in output.items()] if is_list else output.text(),
    }


def _read_reasoning(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "id", "status", "summary", "content", "encrypted_content")
    summary = _texts(reader.under("summary"), "summary_text")
    content = _texts(reader.under("content"), "reasoning_text")
    sealed = reader.under("encrypted_content")
    if sealed.optional(str) and sealed.value.startswith(SEALED) and _unsealed(sealed.value) is None:
        raise sealed.invalid("was not created by Sluice; send reasoning items unchanged, or remove them")
    return {
        "id": reader.value.get("id") or new_id("rs"),
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
        **({"encrypted_content": sealed.value} if sealed.value else {}),
    }


def _read_compaction(reader: FieldReader) -> dict[str, Any]:
    reader.fields("type", "id", "status", "encrypted_content", "created_by")
    sealed = reader.under("encrypted_content")
    if _unsealed(sealed.text(empty=False)) is None:
        raise sealed.invalid("was not created by Sluice; send compaction items unchanged, or remove them")
    return {"id": reader.value.get("id") or new_id("cmp"), "type": "compaction", "encrypted_content": sealed.value}


def _read_reference(reader: FieldReader) -> dict[str, Any]:
    """Returns a reference, which stands for a stored item until it is replaced with it."""
    reader.fields("type", "id")
    return {"type": "item_reference", "id": reader.under("id").text(empty=False)}


_READERS: dict[str, Callable[[FieldReader], dict[str, Any]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
    "reasoning": _read_reasoning,
    "compaction": _read_compaction,
    "item_reference": _read_reference,
}


def _texts(reader: FieldReader, kind: str) -> list[str]:
    if reader.value is None:
        return []
    texts = []
    for part in reader.items():
        part.kind(kind)
        texts.append(part.fields("type", "text").under("text").text())
    return texts


def _unsealed(sealed: str) -> str | None:
    """Returns the reasoning in `encrypted_content`, or None if Sluice did not create it."""
    if not sealed.startswith(SEALED):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def reasoning_text(item: dict[str, Any]) -> str:
    """Returns the text of a reasoning item, from its content, its `encrypted_content` or its summary."""
    if item.get("content"):
        return "".join(part["text"] for part in item["content"])
    if item.get("encrypted_content") and (reasoning := _unsealed(item["encrypted_content"])) is not None:
        return reasoning
    return "\n\n".join(part["text"] for part in item.get("summary") or ())
