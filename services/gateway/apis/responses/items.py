"""Items of the Responses API as messages of a chat.

One turn of the model is several items (reasoning, a message, calls), and one message of a chat.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from dataclasses import dataclass
from typing import Any

from services.common.budgets import Budget
from services.gateway.apis.common.field_reader import FieldReader

SEALED = "sluice1."
"""What `encrypted_content` begins with: the reasoning in base64, opaque to clients and no secret."""

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_HOSTED = {
    "item_reference": "send the item itself, or use previous_response_id",
    "custom_tool_call": "describe the tool as a function",
    "custom_tool_call_output": "describe the tool as a function",
    "compaction": "nothing is compacted here",
}
_STATUS = ("in_progress", "completed", "incomplete")


@dataclass(frozen=True, slots=True)
class Item:
    """One checked item.

    Attributes:
        stored: how it is kept and listed, with an id.
        path: where the client wrote it.
    """

    stored: dict[str, Any]
    path: str


def read_items(given: Any, list_items: Budget) -> list[Item]:
    """The items of a request's `input`; SluiceError(INVALID_ARGUMENT) names what is wrong with one.

    Args:
        list_items: longest list of items, or of an item's parts.
    """
    if isinstance(given, str):
        return [Item(_message("user", [{"type": "input_text", "text": given}]), "input")]
    return [Item(_read(place), place.path) for place in FieldReader(given, "input", "[]", list_items).items()]


def seal(reasoning: str) -> str:
    """Reasoning that a client keeps without looking at it."""
    return SEALED + base64.b64encode(reasoning.encode()).decode()


def new_id(prefix: str) -> str:
    """An id as OpenAI's API writes it."""
    return f"{prefix}_{secrets.token_hex(24)}"


def _read(place: FieldReader) -> dict[str, Any]:
    if not isinstance(place.value, dict):
        raise place.wrong("must be an object")
    kind = place.value.get("type", "message" if place.value.keys() & {"role", "content"} else None)
    if isinstance(kind, str) and kind not in _ITEMS:
        why = _HOSTED.get(kind, f"items here are of type {', '.join(_ITEMS)}")
        raise place.under("type").unsupported(f"{kind[:64]!r} cannot be understood; {why}")
    if kind != "message":
        place.kind(*_ITEMS)
    if place.under("status").value is not None:
        place.under("status").choice(*_STATUS)
    place.under("id").optional(str)
    readers = {"message": _read_message, "function_call": _read_call, "function_call_output": _read_output}
    return readers.get(str(kind), _read_reasoning)(place)


def _read_message(place: FieldReader) -> dict[str, Any]:
    place.fields("type", "role", "content", "id", "status", "phase")
    role = place.under("role").choice("user", "assistant", "system", "developer")
    kind = "output_text" if role == "assistant" else "input_text"
    content = place.under("content")
    if isinstance(content.value, str):
        parts = [{"type": kind, "text": content.value}]
    elif content.value is None:
        raise content.wrong("is missing")
    else:
        parts = [_part(part, kind) for part in content.items()]
        if not parts:
            raise content.wrong("must hold at least one part")
    return _message(role, parts, place.value.get("id"))


def _message(role: str, parts: list[dict[str, Any]], item_id: str | None = None) -> dict[str, Any]:
    shown = [{**part, "annotations": []} if part["type"] == "output_text" else part for part in parts]
    return {
        "id": item_id or new_id("msg"),
        "type": "message",
        "status": "completed",
        "role": role,
        "content": shown,
    }


def _part(place: FieldReader, kind: str) -> dict[str, Any]:
    """A part of a message or of a call's output; `kind` is what texts are kept as."""
    if isinstance(place.value, dict) and place.value.get("type") in ("input_image", "input_file", "input_audio"):
        raise place.under("type").unsupported(f"models here read text, and this is {place.value['type']!r}")
    found = place.kind("input_text", "output_text", "text", "refusal")
    place.fields("type", "text", "refusal", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint")
    if found == "refusal":
        return {"type": "refusal", "refusal": place.under("refusal").text()}
    return {"type": kind, "text": place.under("text").text()}


def _read_call(place: FieldReader) -> dict[str, Any]:
    place.fields(
        "type", "id", "status", "call_id", "name", "arguments", "parsed_arguments", "caller", "namespace", "async"
    )
    place.under("namespace").ignored(why="functions here have no namespaces")
    place.under("async").ignored(False, why="calls here are not asynchronous")
    return {
        "id": place.value.get("id") or new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": place.under("call_id").text(empty=False),
        "name": place.under("name").text(empty=False),
        "arguments": place.under("arguments").text(),
    }


def _read_output(place: FieldReader) -> dict[str, Any]:
    place.fields("type", "id", "status", "call_id", "output", "name", "caller", "namespace")
    output = place.under("output")
    listed = isinstance(output.value, list)
    return {
        "id": place.value.get("id") or new_id("fco"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": place.under("call_id").text(empty=False),
        "output": [_part(part, "input_text") for part in output.items()] if listed else output.text(),
    }


def _read_reasoning(place: FieldReader) -> dict[str, Any]:
    place.fields("type", "id", "status", "summary", "content", "encrypted_content")
    summary = _texts(place.under("summary"), "summary_text")
    content = _texts(place.under("content"), "reasoning_text")
    sealed = place.under("encrypted_content")
    if sealed.optional(str) and _unsealed(sealed.value) is None:
        raise sealed.wrong("was not written here; send reasoning items as they came, or leave them out")
    return {
        "id": place.value.get("id") or new_id("rs"),
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text} for text in summary],
        "content": [{"type": "reasoning_text", "text": text} for text in content],
        "encrypted_content": sealed.value,
    }


def _texts(place: FieldReader, kind: str) -> list[str]:
    if place.value is None:
        return []
    texts = []
    for part in place.items():
        part.kind(kind)
        texts.append(part.fields("type", "text").under("text").text())
    return texts


def _unsealed(sealed: str) -> str | None:
    """Returns what was sealed; None when it was not sealed here."""
    if not sealed.startswith(SEALED):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def reasoning_text(item: dict[str, Any]) -> str:
    """What a reasoning item says: its content, or what is sealed in it, or its summary."""
    if item.get("content"):
        return "".join(part["text"] for part in item["content"])
    if item.get("encrypted_content") and (reasoning := _unsealed(item["encrypted_content"])) is not None:
        return reasoning
    return "\n\n".join(part["text"] for part in item.get("summary") or ())
