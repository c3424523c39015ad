"""Conversations that no API has written yet: turns, the tools that may be called, and the options of the prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

TEXTS = (
    "What is the weather in Paris today?",
    "Grüße, привет, 你好 😀 👨‍👩‍👧",
    "  spaces at both ends  ",
    "two\n\nlines\n",
    "e\u0301 ﬁ \u200b \u00a0 1234567",
    '{"a": [1, 2]} and `code` & <b>tags</b> \'q\' "Q" \\n',
    "def main() -> None:\n    return",
    "\ttabs\tand\r\nreturns",
    "5 < 6",
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"city": "Zürich 🌧️", "days": 3},
    {"city": "Paris", "metric": True, "tags": ["a", "b\n"]},
    {"city": 'a "quoted"\n\\ name', "days": -1, "metric": False},
    {"city": ""},
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place, “now”.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "days": {"type": "integer", "description": "How many"},
                    "metric": {"type": "boolean", "description": "Units"},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "Any"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}},
                "required": [],
            },
        },
    },
)
BARE_TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
)
"""Without a description, as the API allows."""
OWN_IDS = ("call_1a2b3c4d5e6f7g8h9i0j{}", "a1b2c3d4{}")
FOREIGN_IDS = (
    "toolu_01A09q90qw90lq917835lq{}",
    "functions.get_weather:{}",
    "fc_{}",
    "3f6c2b1e-0000-4000-8000-00000000000{}",
)


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is JSON text that may be cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One message: its texts are the parts of its content; `answers` is the id of the call that a tool answers."""

    role: str
    texts: tuple[str, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""
    images: int = 0


@dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
        number: of its seed; the same number, feature and seed give the same conversation.
        feature: what it is about, one of FEATURES.
        turns: its messages.
        tools: in OpenAI's form.
        thinking: the client's switch; None when not sent.
        effort: of reasoning; empty when not sent.
        continues: the model continues the last turn, which is the assistant's.
        schema: what the answer must satisfy; None for any answer.
    """

    number: int
    feature: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    effort: str = ""
    continues: bool = False
    schema: dict[str, Any] | None = None

    @property
    def thoughts(self) -> frozenset[str]:
        """Words of thoughts, which many templates do not show of earlier turns."""
        return frozenset(word for turn in self.turns for word in words_in(turn.reasoning))

    @property
    def words(self) -> frozenset[str]:
        """Words that occur once in the conversation, one in each of its texts and calls: what has none of them is "
        "lost."""
        texts = (
            text
            for turn in self.turns
            for text in (*turn.texts, turn.reasoning, *(call.arguments for call in turn.calls))
        )
        return frozenset(word for text in texts for word in words_in(text))


@dataclass
class _Writer:
    """Draws the texts of one conversation; each has a word of its own."""

    draw: random.Random
    turns: list[Turn] = field(default_factory=list)
    count: int = 0

    def text(self) -> str:
        self.count += 1
        pieces = [self.draw.choice(TEXTS) for _ in range(self.draw.randint(0, 2))]
        pieces.insert(self.draw.randint(0, len(pieces)), f"w{self.count}q")
        return self.draw.choice((" ", "\n", "")).join(pieces)

    def say(self, role: str, **others: Any) -> None:
        self.turns.append(Turn(role, (self.text(),), **others))

    def exchange(self, **others: Any) -> None:
        self.say("user")
        self.say("assistant", **others)

    def call(self, count: int, ids: tuple[str, ...] = OWN_IDS, text: bool | None = None, cut: bool = False) -> None:
        """An assistant's turn with calls, and the answers of the tools."""
        form, start = self.draw.choice(ids), self.draw.randint(0, 3)
        calls = []
        for place in range(count):
            self.count += 1
            drawn = self.draw.choice(ARGUMENTS) if place != 1 else {"city": ""}
            arguments = json.dumps({**drawn, "city": f"{drawn['city']} w{self.count}q"}, ensure_ascii=False)
            calls.append(Call(form.format(start + place), "now" if place == 1 else "get_weather", arguments))
        if cut:
            calls[-1] = replace(calls[-1], arguments=f'{{"city": "Par w{self.count}q')
        said = self.draw.random() < 0.5 if text is None else text
        self.turns.append(Turn("assistant", (self.text(),) if said else (), calls=tuple(calls)))
        self.turns += [Turn("tool", (self.text(),), answers=call.id) for call in calls]


def words_in(text: str) -> set[str]:
    """The words of texts that occur in a text."""
    return {f"w{rest.split('q')[0]}q" for rest in text.split("w")[1:] if "q" in rest and rest.split("q")[0].isdigit()}


def _plain(writer: _Writer) -> dict[str, Any]:
    for _ in range(writer.draw.randint(0, 3)):
        writer.exchange()
    writer.say("user")
    return {}


def _parts(writer: _Writer) -> dict[str, Any]:
    _plain(writer)
    place = writer.draw.choice([place for place, turn in enumerate(writer.turns) if turn.role == "user"])
    texts = tuple(writer.text() for _ in range(writer.draw.randint(2, 3)))
    writer.turns[place] = replace(writer.turns[place], texts=texts)
    return {}


def _system(writer: _Writer) -> dict[str, Any]:
    writer.say("system")
    return _plain(writer)


def _developer(writer: _Writer) -> dict[str, Any]:
    writer.say("developer")
    return _plain(writer)


def _two_systems(writer: _Writer) -> dict[str, Any]:
    writer.say("system")
    return _system(writer)


def _late_system(writer: _Writer) -> dict[str, Any]:
    writer.exchange()
    return _system(writer)


def _tools(writer: _Writer) -> dict[str, Any]:
    if writer.draw.random() < 0.5:
        writer.say("system")
    writer.say("user")
    for _ in range(writer.draw.randint(0, 2)):
        writer.call(1)
    if writer.draw.random() < 0.5 and len(writer.turns) > 2:
        writer.say("assistant")
        writer.say("user")
    return {"tools": TOOLS}


def _bare_tools(writer: _Writer) -> dict[str, Any]:
    _plain(writer)
    return {"tools": BARE_TOOLS}


def _parallel(writer: _Writer) -> dict[str, Any]:
    writer.say("user")
    writer.call(writer.draw.randint(2, 3))
    return {"tools": TOOLS}


def _foreign(writer: _Writer) -> dict[str, Any]:
    writer.say("user")
    writer.call(writer.draw.randint(1, 2), FOREIGN_IDS)
    return {"tools": TOOLS}


def _without_tools(writer: _Writer) -> dict[str, Any]:
    _foreign(writer)
    return {}


def _reasoning(writer: _Writer) -> dict[str, Any]:
    writer.exchange(reasoning=writer.text())
    writer.say("user")
    if writer.draw.random() < 0.5:
        writer.call(1)
        writer.turns[-2] = replace(writer.turns[-2], reasoning=writer.text())
        return {"tools": TOOLS}
    return {}


def _thinking(writer: _Writer) -> dict[str, Any]:
    _plain(writer)
    return {"thinking": writer.draw.random() < 0.5}


def _effort(writer: _Writer) -> dict[str, Any]:
    _plain(writer)
    return {"effort": writer.draw.choice(("low", "medium", "high"))}


def _structured(writer: _Writer) -> dict[str, Any]:
    _plain(writer)
    properties = {"city": {"type": "string"}, "days": {"type": "integer", "minimum": writer.draw.randint(0, 3)}}
    return {"schema": {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}}


def _continued(writer: _Writer) -> dict[str, Any]:
    writer.exchange()
    if writer.draw.random() < 0.3:
        writer.turns[-1] = replace(writer.turns[-1], texts=(f"{writer.text().rstrip()} so ",))
    return {"continues": True}


def _cut(writer: _Writer) -> dict[str, Any]:
    """What a client sends back after an answer that ended too early: only thoughts, half a call, nothing."""
    writer.say("user")
    kind = writer.draw.randrange(3)
    if kind == 0:
        writer.turns.append(Turn("assistant", (), reasoning=writer.text()))
    elif kind == 1:
        writer.call(1, cut=True)
    else:
        writer.turns.append(Turn("assistant", ("",)))
    writer.say("user")
    return {"tools": TOOLS} if kind == 1 else {}


def _images(writer: _Writer) -> dict[str, Any]:
    writer.say("user", images=writer.draw.randint(1, 2))
    return {}


FEATURES: dict[str, Callable[[_Writer], dict[str, Any]]] = {
    "plain": _plain,
    "text parts": _parts,
    "system": _system,
    "developer": _developer,
    "two systems": _two_systems,
    "late system": _late_system,
    "tools": _tools,
    "bare tools": _bare_tools,
    "parallel calls": _parallel,
    "foreign ids": _foreign,
    "calls without tools": _without_tools,
    "reasoning": _reasoning,
    "thinking switch": _thinking,
    "effort": _effort,
    "structured output": _structured,
    "continued turn": _continued,
    "cut turn": _cut,
}


def conversation(feature: str, number: int, seed: int = 0) -> Conversation:
    """The conversation with this number about a feature."""
    writer = _Writer(random.Random(f"{seed}/{feature}/{number}"))
    options = FEATURES[feature](writer)
    return Conversation(number, feature, tuple(writer.turns), **options)
