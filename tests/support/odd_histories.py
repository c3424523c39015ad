"""Odd but legal conversations whose texts are recognized in a prompt, and what a prompt has lost of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypothesis import strategies as st

from services.preprocess.contract.tokenizer import Message, Tool

SCHEMA = {"type": "object", "properties": {"q": {"type": "string", "description": "a word"}}}
TOOLS: dict[str, list[Tool] | None] = {
    "none": None,
    "full": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}],
    "bare": [{"type": "function", "function": {"name": "look"}}],
    "undescribed": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}],
    "no_properties": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "null": [{"type": "function", "function": {"name": "look", "description": None, "parameters": None}}],
}
ARGUMENTS = ("object", "mapping", "cut", "null", "empty", "blank", "list", "number", "string", "missing")
IDS = ("foreign", "native", "short", "missing")


@dataclass
class History:
    """A conversation.

    Attributes:
        marks: its texts.
        thoughts: reasoning of turns with calls that no user turn and no final answer follows (gpt-oss drops it then).
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Tool] | None = None
    marks: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def lost(self, prompt: str, thoughts: bool = False) -> list[str]:
        """Returns the texts that a prompt lacks.

        Args:
            thoughts: whether the template shows reasoning.
        """
        return [mark for mark in (*self.marks, *(self.thoughts if thoughts else ())) if mark not in prompt]


class _Writer:
    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.history = History()
        self._marks = (f"q{number}z" for number in count(1))
        self._calls = count()

    def mark(self) -> str:
        mark = next(self._marks)
        self.history.marks.append(mark)
        return mark

    def add(self, role: str, content: Any, **fields: Any) -> None:
        self.history.messages.append({"role": role, "content": content, **fields})

    def content(self) -> Any:
        text = self.mark()
        return self.draw(st.sampled_from([text, [{"type": "text", "text": text}]]))

    def instructions(self, most: int) -> None:
        for _ in range(self.draw(st.integers(0, most))):
            self.add(self.draw(st.sampled_from(["system", "developer"])), self.content())

    def arguments(self) -> Any:
        kind = self.draw(st.sampled_from(ARGUMENTS))
        if kind in ("null", "empty", "blank", "missing"):
            return {"null": "null", "empty": "", "blank": " ", "missing": None}[kind]
        value = self.mark()
        if kind == "mapping":
            return {"q": value}
        whole = {"list": [value], "number": int(value[1:-1]) + 10**6, "string": value}.get(kind, {"q": value})
        if kind == "number":
            self.history.marks[-1] = str(whole)
        return f'{{"q": "{value}' if kind == "cut" else json.dumps(whole)

    def call_id(self, index: int) -> str | None:
        kind = self.draw(st.sampled_from(IDS))
        native = f"functions.look:{index}"
        return {"foreign": f"toolu_{index:04d}aB-c_d", "native": native, "short": f"abcde{index:04d}"}.get(kind)

    def assistant(self) -> None:
        fields: dict[str, Any] = {}
        content: Any = self.draw(st.sampled_from(["", [], "text", "text"]))
        content = self.content() if content == "text" else content
        if self.draw(st.booleans()):
            thought = next(self._marks)
            fields[self.draw(st.sampled_from(["reasoning", "reasoning_content"]))] = thought
        calls = []
        for _ in range(self.draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
            name = next(self._marks).replace("q", "look")
            self.history.marks.append(name)
            arguments = self.arguments()
            function = {"name": name, "arguments": arguments}
            if arguments is None:
                del function["arguments"]
            call: dict[str, Any] = {"id": self.call_id(next(self._calls)), "type": "function", "function": function}
            calls.append({key: value for key, value in call.items() if value is not None})
        if calls:
            fields["tool_calls"] = calls
            content = None if content == "" and self.draw(st.booleans()) else content
            self.history.thoughts += [thought] if "reasoning" in fields or "reasoning_content" in fields else []
        else:
            self.history.thoughts.clear()
        self.add("assistant", content, **fields)
        for call in calls:
            answered: dict[str, Any] = {"tool_call_id": call["id"]} if "id" in call else {}
            self.add("tool", self.content(), **answered)

    def user(self) -> None:
        self.history.thoughts.clear()
        self.add("user", self.content())


@st.composite
def histories(draw: Any, tools: bool = True) -> History:
    """Legal conversations that begin with instructions or a user.

    Args:
        tools: whether chats may be without tools.
    """
    writer = _Writer(draw)
    writer.instructions(3)
    writer.user()
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.sampled_from(["assistant", "assistant", "user", "instructions"]))
        if step == "assistant":
            writer.assistant()
        elif step == "user":
            writer.user()
        else:
            writer.instructions(2)
            writer.history.thoughts.clear()
    if writer.history.messages[-1]["role"] == "assistant":
        writer.user()
    names = [name for name in TOOLS if tools or TOOLS[name]]
    writer.history.tools = TOOLS[draw(st.sampled_from(names))]
    return writer.history
