"""Fits a conversation to what a chat template can show, so that none of its text is lost.

Each step changes only what the template's capabilities require: a conversation that the template shows as it is stays
so. Steps are deterministic from the start of the conversation, so a longer one keeps the prefix of a shorter one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.preprocess.contract.tokenizer import Message, Tool
from services.preprocess.templates.calls import one_call_a_turn, with_arguments, with_ids, without_calls
from services.preprocess.templates.capabilities import (
    AFTER,
    HIDDEN,
    REASONING_FIELDS,
    STANDARD_FIELDS,
    TOGETHER,
    TemplateCapabilities,
)
from services.preprocess.templates.normalize_messages import check_arguments
from services.preprocess.templates.roles import is_empty, merged, with_system
from services.preprocess.templates.turns import Turn, joined, plain_text, reasoning_of, united

_NOT_PLAIN = frozenset(("tool_calls", *STANDARD_FIELDS))
_EMPTY_SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


class Fitted(NamedTuple):
    """A conversation as the template can show it.

    Attributes:
        turns: its messages.
        tools: the definitions of tools.
        notes: what is shown in another place or form than the client's, because the template would lose it.
    """

    turns: list[Turn]
    tools: list[Tool] | None
    notes: tuple[str, ...]


def is_plain(messages: list[Message], tools: list[Tool] | None, known: TemplateCapabilities | None) -> bool:
    """Returns whether the template shows a conversation as it is: texts of user and assistant in turns.

    Args:
        known: what the template shows; None: not known yet.
    """
    if tools and (known is None or _lacks_fields(known)):
        return False
    before = ""
    for message in messages:
        role = message["role"]
        if role == before or "content" not in message or not message["content"]:
            return False
        if role == "assistant":
            if not before or not _NOT_PLAIN.isdisjoint(message):
                return False
        elif role != "user" and (role != "system" or before or known is None or not known.system):
            return False
        before = role
    return True


def fit(messages: list[Message], tools: list[Tool] | None, known: TemplateCapabilities) -> Fitted:
    """Returns a conversation in the form that the template shows without loss.

    Args:
        messages: checked OpenAI messages.
        tools: checked OpenAI tools.

    Raises:
        SluiceError: INVALID_ARGUMENT for arguments of calls with too many values.
    """
    check_arguments(messages)
    notes: dict[str, None] = {}
    turns = [Turn(index, message) for index, message in enumerate(messages)]
    turns = with_ids(turns, known)
    turns = with_system(turns, known, notes)
    if known.arguments == HIDDEN or not known.tool_results:
        turns = [without_calls(turn, known, notes) for turn in turns]
    if not known.empty_assistant:
        turns = [turn for turn in turns if not is_empty(turn.message, known)] or turns
    turns = merged(turns, known, notes)
    fitted = _fit_assistants(turns, known, notes)
    if not known.parallel_calls:
        fitted = one_call_a_turn(fitted)
    return Fitted(fitted, _filled(tools, known), tuple(notes))


def _fit_assistants(turns: list[Turn], known: TemplateCapabilities, notes: dict[str, None]) -> list[Turn]:
    """Returns the turns; an assistant's with its calls, text and reasoning in the form of the template."""
    last_answer = -1
    if not known.past_text_with_calls:
        last_answer = max((at for at, turn in enumerate(turns) if _answers(turn.message)), default=-1)
    fitted: list[Turn] = []
    waiting: list[Turn] = []  # texts of turns with calls, for the answer after them
    place = 0  # where they are shown without one
    for at, turn in enumerate(turns):
        message = turn.message
        if message["role"] == "user" and waiting:
            fitted.insert(place, _as_one(waiting))
            waiting = []
        if message["role"] != "assistant":
            fitted.append(turn)
            continue
        message = {**message, "content": message.get("content") or ""}
        if not message.get("tool_calls"):
            if waiting:
                message["content"] = joined(_as_one(waiting).message["content"], message["content"])
                waiting = []
        elif plain_text(message["content"]) != "" and _is_apart(known, at < last_answer):
            apart = turn._replace(message={"role": "assistant", "content": message["content"]})
            message["content"] = ""
            if known.text_with_calls == AFTER:
                place = place if waiting else len(fitted)
                waiting.append(apart)
            else:
                fitted.append(apart)
        fitted.append(turn._replace(message=_with_calls(_with_reasoning(message, known), known, notes)))
    if waiting:
        fitted.insert(place, _as_one(waiting))
    return fitted


def _is_apart(known: TemplateCapabilities, past: bool) -> bool:
    return known.text_with_calls != TOGETHER or (past and not known.past_text_with_calls)


def _as_one(turns: list[Turn]) -> Turn:
    return turns[0]._replace(message=united(turn.message for turn in turns))


def _answers(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _with_reasoning(message: Message, known: TemplateCapabilities) -> Message:
    """Returns an assistant's message with its reasoning under the names that the template reads."""
    reasoning = reasoning_of(message)
    if not reasoning:
        return message
    content = message["content"]
    if message.get("tool_calls") and known.reasoning and not known.reasoning_with_text and plain_text(content):
        reasoning, content = joined(reasoning, content), ""
    names = (*STANDARD_FIELDS, *known.reasoning) if known.reasoning else REASONING_FIELDS
    return {**message, **dict.fromkeys(names, reasoning), "content": content}


def _with_calls(message: Message, known: TemplateCapabilities, notes: dict[str, None]) -> Message:
    """Returns an assistant's message with its calls in the form of the template."""
    if not (calls := message.get("tool_calls")):
        return message
    if not message["content"] and known.null_content:
        message["content"] = None
    message["tool_calls"] = [{**call, "function": with_arguments(call["function"], known, notes)} for call in calls]
    return message


def _lacks_fields(known: TemplateCapabilities) -> bool:
    """Returns whether there are tools that the template cannot show."""
    return known.tool_description or known.tool_parameters or known.tool_properties or not known.tool_nulls


def _filled(tools: list[Tool] | None, known: TemplateCapabilities) -> list[Tool] | None:
    """Returns the tools with the fields that the template cannot do without."""
    if not tools or not _lacks_fields(known):
        return tools
    return [{**tool, "function": _filled_function(tool["function"], known)} for tool in tools]


def _filled_function(function: dict[str, Any], known: TemplateCapabilities) -> dict[str, Any]:
    added: dict[str, Any] = {}
    if not known.tool_nulls:
        function = {name: value for name, value in function.items() if value is not None}
    if known.tool_description and function.get("description") is None:
        added["description"] = ""
    parameters = function.get("parameters")
    if parameters is None:
        if known.tool_parameters or known.tool_properties:
            added["parameters"] = _EMPTY_SCHEMA
    elif known.tool_properties and parameters.get("properties") is None:
        added["parameters"] = {**parameters, "properties": {}}
    return {**function, **added} if added else function
