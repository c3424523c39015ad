"""Gives calls of tools, their ids, arguments and results the form that a template shows."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from services.common.base.errors import SluiceError
from services.common.base.sendable_text import sendable_json
from services.common.net.intake.json_intake import foreign_json
from services.preprocess.contract.tokenizer import Message
from services.preprocess.templates.capabilities import ANY, HIDDEN, NAMED, SHORT, TEXT, TemplateCapabilities
from services.preprocess.templates.turns import CALLS_AS_TEXT, LOOSE_ARGUMENTS, RESULTS_AS_USER, Turn, joined

RAW_ARGUMENTS = "raw_arguments"
"""Key of arguments that are not a JSON object, for templates that only show objects."""
SHORT_ID_CHARS = 9


def with_ids(turns: list[Turn], known: TemplateCapabilities) -> list[Turn]:
    """Returns the turns with ids of calls in the form that the template shows, the same in calls and results."""
    calling = [turn.message for turn in turns if "tool_calls" in turn.message]
    if not calling or (known.call_ids == ANY and not any(map(_lacks_ids, calling))):
        return turns
    renamed: list[Turn] = []
    ids: dict[str | None, str] = {}
    unanswered: list[str] = []
    count = 0
    for turn in turns:
        message = turn.message
        if calls := message.get("tool_calls"):
            ids, unanswered, given = {}, [], []
            for call in calls:
                native = _native_id(call.get("id"), call["function"].get("name", ""), count, known.call_ids)
                ids[call.get("id")] = native
                unanswered.append(native)
                given.append({**call, "id": native})
                count += 1
            message = {**message, "tool_calls": given}
        elif message["role"] == "tool":
            old = message.get("tool_call_id")
            fallback = unanswered[0] if unanswered else _native_id(old, "tool", count, known.call_ids)
            native = ids.get(old, fallback) if old else fallback
            if native in unanswered:
                unanswered.remove(native)
            message = {**message, "tool_call_id": native}
        renamed.append(turn._replace(message=message))
    return renamed


def _lacks_ids(message: Message) -> bool:
    """Returns whether a call has no id, by which many templates find its result."""
    return not all("id" in call and call["id"] for call in message["tool_calls"] or ())


def _native_id(call_id: str | None, name: str, index: int, form: str) -> str:
    if form == NAMED:
        return call_id if call_id and name in call_id else f"functions.{name}:{index}"
    if form == SHORT:
        return short_id(call_id or f"call{index}")
    return call_id or f"call_{index}"


def short_id(call_id: str) -> str:
    """Returns the 9 letters and digits for a tool call id; equal ids stay equal.

    Engines keep the last 9 characters; if those are too few or not alphanumeric, a digest is used.
    """
    tail = call_id[-SHORT_ID_CHARS:]
    if len(tail) == SHORT_ID_CHARS and tail.isascii() and tail.isalnum():
        return tail
    return hashlib.sha256(call_id.encode()).hexdigest()[:SHORT_ID_CHARS]


def without_calls(turn: Turn, known: TemplateCapabilities, notes: dict[str, None]) -> Turn:
    """Returns a turn with calls and results as text where the template does not show them."""
    message = turn.message
    if message["role"] == "tool" and not known.tool_results:
        notes[RESULTS_AS_USER] = None
        return turn._replace(message={"role": "user", "content": message["content"]})
    if (calls := message.get("tool_calls")) and known.arguments == HIDDEN:
        notes[CALLS_AS_TEXT] = None
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        texts = "\n".join(_as_text(call["function"]) for call in calls)
        return turn._replace(message={**kept, "content": joined(message.get("content"), texts)})
    return turn


def _as_text(function: dict[str, Any]) -> str:
    arguments = _object(function.get("arguments"))
    shown = function.get("arguments") if arguments is None else arguments
    return orjson.dumps({"name": function["name"], "arguments": shown}).decode()


def _object(arguments: Any) -> dict[str, Any] | None:
    """Returns arguments as an object; None if they are none."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        parsed = foreign_json(sendable_json(arguments).encode(errors="replace"), "arguments")
    except SluiceError:
        return None
    return {} if parsed is None else parsed if isinstance(parsed, dict) else None


def with_arguments(function: dict[str, Any], known: TemplateCapabilities, notes: dict[str, None]) -> dict[str, Any]:
    """Returns the function of a call with arguments in the form of the template."""
    given = function.get("arguments")
    arguments = _object(given)
    if arguments is None:
        notes[LOOSE_ARGUMENTS] = None
        if known.loose_arguments:
            return function
        arguments = {RAW_ARGUMENTS: given}
    elif known.arguments == TEXT and isinstance(given, str) and given.strip():
        return function
    if known.arguments == TEXT:
        return {**function, "arguments": orjson.dumps(arguments).decode()}
    return {**function, "arguments": arguments}


def one_call_a_turn(turns: list[Turn]) -> list[Turn]:
    """Returns the turns with each call in a turn of its own, followed by its result."""
    single: list[Turn] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        calls = turn.message.get("tool_calls") or ()
        at += 1
        if len(calls) < 2:
            single.append(turn)
            continue
        end = at
        while end < len(turns) and turns[end].message["role"] == "tool":
            end += 1
        results, at = turns[at:end], end
        for index, call in enumerate(calls):
            own = _results_of(call, results, len(calls) - index)
            content = turn.message["content"] if index == 0 else None if turn.message["content"] is None else ""
            kept = turn.message if index == 0 else {"role": "assistant"}
            single.append(turn._replace(message={**kept, "content": content, "tool_calls": [call]}))
            single += own
            results = [result for result in results if result not in own]
        single += results
    return single


def _results_of(call: dict[str, Any], results: list[Turn], left: int) -> list[Turn]:
    """Returns the results of a call: those with its id, or else the next one while there are as many as calls."""
    own = [result for result in results if call.get("id") and result.message.get("tool_call_id") == call["id"]]
    return own or (results[:1] if len(results) >= left else [])
