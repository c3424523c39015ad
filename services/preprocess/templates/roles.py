"""Gives system messages, empty turns and repeated roles the places where a template shows them."""

from __future__ import annotations

from services.preprocess.contract.tokenizer import Message
from services.preprocess.templates.capabilities import TemplateCapabilities
from services.preprocess.templates.turns import (
    SYSTEM_AS_USER,
    USER_IN_RESULT,
    Turn,
    joined,
    plain_text,
    reasoning_of,
    united,
)


def with_system(turns: list[Turn], known: TemplateCapabilities, notes: dict[str, None]) -> list[Turn]:
    """Returns the turns with system and developer messages where, and under the role that, the template shows them."""
    roles = [turn.message["role"] for turn in turns]
    plain = "developer" not in roles and roles.count("system") == (roles[0] == "system") and known.system_with_result
    if plain and (known.system or roles[0] != "system"):
        return turns
    if not known.developer:
        turns = [
            turn._replace(message={**turn.message, "role": "system"}) if turn.message["role"] == "developer" else turn
            for turn in turns
        ]
    system = known.system and (known.system_with_result or not _ends_with_result(turns, known))
    count = next((at for at, turn in enumerate(turns) if not _instructs(turn.message)), len(turns))
    lead, rest = turns[:count], turns[count:]
    if len(lead) > 1 and not known.second_system:
        lead = [lead[0]._replace(message=united(turn.message for turn in lead))]
    if not system:
        rest, lead = [*lead, *rest], []
    if not known.late_system or not system:
        rest = _in_user_turns(rest, notes)
    return [*lead, *rest]


def _ends_with_result(turns: list[Turn], known: TemplateCapabilities) -> bool:
    """Returns whether the last turn will be a tool's result, to which the text of users behind it may be joined."""
    for turn in reversed(turns):
        role = turn.message["role"]
        if role == "tool" or role == "assistant" or known.user_after_tool:
            return bool(role == "tool")
    return False


def _instructs(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _in_user_turns(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """Returns the turns with system texts in the user turn beside them: the one before, else the one after.

    A text between a call and its result moves behind the result.
    """
    placed: list[Turn] = []
    waiting: list[Turn] = []
    open_user = False  # whether the last turn is a system text as a user's turn, which the next user turn continues
    for turn in turns:
        message = turn.message
        if _instructs(message):
            notes[SYSTEM_AS_USER] = None
            waiting.append(turn._replace(message={"role": "user", "content": message["content"]}))
            if placed and placed[-1].message["role"] == "assistant" and placed[-1].message.get("tool_calls"):
                continue
        elif message["role"] == "tool":
            placed.append(turn)
            open_user = False
            continue
        for late in waiting:
            open_user = _append_user(placed, late, join=True) or open_user
        waiting.clear()
        if _instructs(message):
            continue
        if message["role"] == "user":
            _append_user(placed, turn, join=open_user)
        else:
            placed.append(turn)
        open_user = False
    for late in waiting:
        _append_user(placed, late, join=True)
    return placed


def _append_user(turns: list[Turn], turn: Turn, join: bool) -> bool:
    """Appends a user turn, or joins it to the last one; returns whether it was appended."""
    if join and turns and turns[-1].message["role"] == "user":
        last = turns[-1]
        content = joined(last.message["content"], turn.message["content"])
        turns[-1] = last._replace(message={**last.message, "content": content})
        return False
    turns.append(turn)
    return True


def is_empty(message: Message, known: TemplateCapabilities) -> bool:
    return (
        message["role"] == "assistant"
        and not message.get("tool_calls")
        and not (known.reasoning and reasoning_of(message))
        and plain_text(message.get("content")) == ""
    )


def merged(turns: list[Turn], known: TemplateCapabilities, notes: dict[str, None]) -> list[Turn]:
    """Returns the turns with neighbours of one role united where the template refuses them."""
    if known.repeated_user and known.repeated_assistant and known.user_after_tool:
        return turns
    merged: list[Turn] = []
    for turn in turns:
        before, message = merged[-1].message if merged else {"role": ""}, turn.message
        pair = before["role"], message["role"]
        if pair == ("tool", "user") and not known.user_after_tool:
            notes[USER_IN_RESULT] = None
        elif not (
            (pair == ("user", "user") and not known.repeated_user)
            or (pair == ("assistant", "assistant") and not known.repeated_assistant and not before.get("tool_calls"))
        ):
            merged.append(turn)
            continue
        united = {**before, **message, "role": before["role"], "content": joined(before["content"], message["content"])}
        if pair == ("assistant", "assistant") and reasoning_of(before) and reasoning_of(message):
            united["reasoning_content"] = joined(reasoning_of(before), reasoning_of(message))
            united["reasoning"] = united["reasoning_content"]
        merged[-1] = merged[-1]._replace(message=united)
    return merged
