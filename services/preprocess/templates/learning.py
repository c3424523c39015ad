"""Learns what a chat template can show, by rendering short conversations whose texts are recognized in the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from services.preprocess.contract.tokenizer import Message, Tool
from services.preprocess.templates.capabilities import (
    AFTER,
    ANY,
    BEFORE,
    HIDDEN,
    MAPPING,
    NAMED,
    REASONING_FIELDS,
    SHORT,
    STANDARD_FIELDS,
    TEXT,
    TOGETHER,
    TemplateCapabilities,
)

Render = Callable[[list[Message], list[Tool] | None], str | None]
"""Renders a conversation as it is; returns None if the template fails on it."""


class CannotProbe(Exception):
    """The template may not be rendered again: it hangs or exceeds its memory."""


_S1, _S2, _U1, _U2, _A1, _A2, _R1 = "sysaq1", "sysbq2", "userq3", "userq4", "asstq5", "asstq6", "resultq7"
_NAME, _VALUE, _VALUE2, _R2, _THOUGHT, _ROLE = "lookq8", "valueq9", "valueq0", "resultqb", "thoughtqc", "roleqd"
_SHORT_ID, _SHORT_ID2, _LONG_ID = "abcdef012", "bcdefa123", "toolu_01AbCdEfGhIjKlMnOpQr"
_CUT = f'{{"q": "{_VALUE}'
_SCHEMA = {"type": "object", "properties": {"q": {"type": "string", "description": "a word"}}, "required": ["q"]}


def learn(render: Render) -> TemplateCapabilities:
    """Returns what is learned until a probe may no longer be rendered, with defaults for the rest."""
    learner = _Learner(render)
    try:
        learner.learn()
    except CannotProbe:
        pass
    return TemplateCapabilities(**learner.known)


def _turn(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def _system(text: str) -> Message:
    return _turn("system", text)


def _user(text: str = _U1) -> Message:
    return _turn("user", text)


def _assistant(text: str = _A1) -> Message:
    return _turn("assistant", text)


def _tool(**fields: Any) -> Tool:
    return {"type": "function", "function": {"name": _NAME, **fields}}


class _Learner:
    """The probes in an order in which later ones can use the findings of earlier ones.

    Attributes:
        known: findings by the name of the capability.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._tools: list[Tool] | None = None
        self._tool = _tool(description="Looks.", parameters=_SCHEMA)
        self.known: dict[str, Any] = {}

    def learn(self) -> None:
        if not self._shows([_user()]):
            self._tools = [self._tool]  # some templates are only for chats with tools
            if not self._shows([_user()]):
                return
        self._learn_roles()
        self._learn_turns()
        self._learn_tools()
        self._learn_calls()
        self._learn_reasoning()

    def _shows(self, messages: list[Message], *further: str, tools: Iterable[Tool] | None = None) -> bool:
        """Returns whether a conversation is rendered with all its texts, and those of `further`."""
        text = self._render(messages, self._tools if tools is None else list(tools))
        marks = [*further, *(message["content"] for message in messages if message["content"])]
        return text is not None and all(mark in text for mark in marks)

    def _learn_roles(self) -> None:
        known = self.known
        known["system"] = self._shows([_system(_S1), _user()])
        known["developer"] = self._knows("developer")
        pairs = [[_system(_S1), _turn(role, _S2), _user()] for role in self._instructing()]
        known["second_system"] = known["system"] and all(map(self._shows, pairs))
        late = [
            [*lead, _user(), _assistant(), *turns]
            for lead in ([_system(_S1)], [])
            for turns in ([_user(_U2), _system(_S2)], [_system(_S2), _user(_U2)])
        ]
        known["late_system"] = known["system"] and all(map(self._shows, late))

    def _instructing(self) -> tuple[str, ...]:
        return ("system", "developer") if self.known["developer"] else ("system",)

    def _knows(self, role: str) -> bool:
        """Returns whether a role has a meaning: templates that print any role would print an unknown one, too."""
        text = self._render([_turn(role, _S1), _user()], self._tools)
        if text is None or _S1 not in text or _U1 not in text:
            return False
        other = self._render([_turn(_ROLE, _S1), _user()], self._tools)
        return other is None or other.replace(_ROLE, role) != text

    def _learn_turns(self) -> None:
        known = self.known
        known["empty_assistant"] = self._shows([_user(), _assistant(""), _user(_U2)])
        known["repeated_user"] = self._shows([_user(), _user(_U2)])
        known["repeated_assistant"] = self._shows([_user(), _assistant(), _assistant(_A2), _user(_U2)])

    def _learn_tools(self) -> None:
        known = self.known
        known["tools"] = self._shows([_user()], _NAME, tools=[self._tool])
        fails = self._render([_user()], [self._tool]) is None
        lacking = {
            "tool_description": _tool(parameters=_SCHEMA),
            "tool_parameters": _tool(description="Looks."),
            "tool_properties": _tool(description="Looks.", parameters={"type": "object"}),
        }
        for name, tool in lacking.items():
            known[name] = not fails and self._render([_user()], [tool]) is None
        nulls = self._render([_user()], [_tool(description=None, parameters=None)])
        known["tool_nulls"] = fails or nulls is not None or self._render([_user()], [_tool()]) is None

    def _call(self, arguments: Any, **fields: Any) -> dict[str, Any]:
        return {**fields, "type": "function", "function": {"name": _NAME, "arguments": arguments}}

    def _argument(self, value: str = _VALUE) -> Any:
        return {"q": value} if self.known.get("arguments") == MAPPING else f'{{"q": "{value}"}}'

    def _history(self, call: dict[str, Any], content: Any = "", **fields: Any) -> list[Message]:
        """Returns a conversation with a call and its result."""
        if content == "" and self.known.get("null_content"):
            content = None
        answered = {"tool_call_id": call["id"]} if "id" in call else {}
        return [
            _user(),
            _turn("assistant", content, tool_calls=[call], **fields),
            _turn("tool", _R1, name=_NAME, **answered),
        ]

    def _with_tools(self, messages: list[Message], *further: str) -> bool:
        """Returns whether a conversation is shown, with and without definitions of tools."""
        return self._shows(messages, *further, tools=[self._tool])

    def _learn_calls(self) -> None:
        known = self.known
        for content, null in (("", False), (None, True)):
            for form, arguments in ((MAPPING, {"q": _VALUE}), (TEXT, f'{{"q": "{_VALUE}"}}')):
                history = self._history(self._call(arguments, id=_SHORT_ID), content)
                if self._with_tools(history, _NAME, _VALUE):  # the name may be part of an id
                    known.update(arguments=form, null_content=null, tool_results=True)
                    self._learn_forms_of_calls()
                    return
        known["arguments"] = HIDDEN
        known["tool_results"] = self._with_tools([_user(), _assistant(), _turn("tool", _R1, name=_NAME)])
        after = "tool" if known["tool_results"] else "user"
        known["user_after_tool"] = self._with_tools([_user(), _assistant(), _turn(after, _R1), _user(_U2)])

    def _learn_forms_of_calls(self) -> None:
        known = self.known
        known["call_ids"] = self._ids()
        first = self._call(self._argument(), id=self._id(0))
        history = self._history(first)
        known["user_after_tool"] = self._with_tools([*history, _user(_U2)])
        cut = self._history(self._call(_CUT, id=self._id(0)))
        known["loose_arguments"] = self._with_tools(cut, _VALUE)
        self._learn_text_with_calls(first)
        second = self._call(self._argument(_VALUE2), id=self._id(1))
        both = [
            history[0],
            {**history[1], "tool_calls": [first, second]},
            history[2],
            _turn("tool", _R2, name=_NAME, tool_call_id=self._id(1)),
        ]
        known["parallel_calls"] = self._with_tools(both, _VALUE, _VALUE2)

    def _learn_text_with_calls(self, call: dict[str, Any]) -> None:
        known = self.known
        beside, later = self._history(call, _A1), [_assistant(_A2), _user(_U2)]
        user, *answered = self._history(call)
        if self._with_tools(beside, _VALUE):
            known["text_with_calls"] = TOGETHER
            known["past_text_with_calls"] = self._with_tools([*beside, *later], _VALUE)
        else:
            apart = [user, _assistant(), *answered, *later]
            known["text_with_calls"] = BEFORE if self._with_tools(apart, _VALUE) else AFTER
        known["system_with_result"] = not known["system"] or self._with_tools([_system(_S1), user, *answered])

    def _id(self, index: int) -> str:
        if self.known["call_ids"] == NAMED:
            return f"functions.{_NAME}:{index}"
        return (_SHORT_ID, _SHORT_ID2)[index]

    def _ids(self) -> str:
        arguments = self._argument()
        named = self._history(self._call(arguments, id=f"functions.{_NAME}:0"))
        plain = self._history(self._call(arguments, id=_LONG_ID))
        for message in (*named, *plain):
            message.pop("name", None)
        if not self._names_call(plain) and self._names_call(named):
            return NAMED
        return ANY if self._with_tools(plain, _VALUE) else SHORT

    def _names_call(self, history: list[Message]) -> bool:
        """Returns whether the name of a call is shown where no definition of the tool shows it."""
        text = self._render(history, None)
        return text is not None and _NAME in text

    def _learn_reasoning(self) -> None:
        known = self.known
        marks = {name: f"{_THOUGHT}{index}" for index, name in enumerate(REASONING_FIELDS)}
        histories = [[_user(), {**_assistant(), **marks}, _user(_U2)], [_user(), {**_assistant(), **marks}]]
        shown = known.get("arguments") != HIDDEN
        if shown:
            histories.append(self._history(self._call(self._argument(), id=self._id(0)), **marks))
        texts = [self._render(history, self._tools) or "" for history in histories]
        known["reasoning"] = tuple(name for name, mark in marks.items() if any(mark in text for text in texts))
        same = {**_assistant(""), **dict.fromkeys(STANDARD_FIELDS, _THOUGHT)}
        if not known["reasoning"] and _THOUGHT in (self._render([_user(), same, _user(_U2)], self._tools) or ""):
            known["reasoning"] = STANDARD_FIELDS  # where different values are refused
        if shown and known["reasoning"]:
            fields = dict.fromkeys(known["reasoning"], _THOUGHT)
            alone = self._history(self._call(self._argument(), id=self._id(0)), **fields)
            beside = self._history(self._call(self._argument(), id=self._id(0)), _A1, **fields)
            if self._with_tools(alone, _VALUE, _THOUGHT) and known["text_with_calls"] == TOGETHER:
                known["reasoning_with_text"] = self._with_tools(beside, _VALUE, _THOUGHT)
