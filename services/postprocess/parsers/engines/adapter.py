"""Interface to an engine's parsers: they receive tokens with their texts and return events."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Event

_HEX = re.compile(r"[0-9a-f]{16,}")
_LETTERS = re.compile(r"[0-9A-Za-z]{9}")


PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object", "properties": {}}}}
"""A tool with which parsers are tried when they are loaded."""


def chat_body(context: ParserContext) -> dict[str, Any]:
    """Returns a chat completion request with the fields of a context that affect parsing."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": ""}], "stream": True}
    if context.tools:
        body |= {"tools": list(context.tools), "parallel_tool_calls": not context.single, "tool_choice": "auto"}
        if context.required:
            body["tool_choice"] = "required"
        if context.only:
            body["tool_choice"] = {"type": "function", "function": {"name": context.only}}
    return body


@dataclass(frozen=True)
class Facts:
    """Properties of a model's parsers that are needed before a stream starts.

    Attributes:
        keeps_special: the parsers need special tokens in the text of requests with tools.
        keeps_special_always: the same for requests without tools.
    """

    keeps_special: bool
    keeps_special_always: bool


class Engine(Protocol):
    """An engine's package, imported in this process.

    Attributes:
        version: of the package.
        tool, reasoning: names of its parsers.
    """

    version: str
    tool: Sequence[str]
    reasoning: Sequence[str]

    def load(self, source: str, tool: str, reasoning: str) -> Facts:
        """Loads a model's tokenizer and a pair of parsers; raises ValueError if they are incompatible.

        Args:
            source: the model's folder, or its tokenizer file.
            tool, reasoning: names of parsers; empty for none.
        """
        ...

    def sources(self) -> Collection[str]:
        """Returns the sources of the loaded models."""
        ...

    def forget(self, source: str) -> None:
        """Unloads a model; ignores unknown ones."""
        ...

    def open(self, tool: str, reasoning: str, context: ParserContext) -> EngineParser:
        """Returns the parser of one stream of a loaded model."""
        ...


class EngineParser(Parser):
    """Parser of one stream that uses an engine's code.

    The engine receives one token at a time with the text it completed, so the events do not depend on batching.
    """

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._unparsed = ""
        self._text = ""
        self._numbers: dict[int, int] = {}
        self._nameless: dict[int, str] = {}

    def feed(self, text: str) -> list[Event]:
        """See Parser; for text without a token."""
        return self.feed_token(text, None)

    def feed_token(self, text: str, token: int | None) -> list[Event]:
        """Parses the next token and the text it completed, possibly empty; None for text without a token."""
        self._unparsed += text
        if self.context.tools:
            self._text += text
        events = self.step(text, [] if token is None else [token], last=False)
        if events:
            self._unparsed = ""
        return events

    def finish_with(self, text: str, token: int | None) -> list[Event]:
        """Ends the stream with the last text and the token that ended it."""
        self._unparsed += text
        return self.step(text, [] if token is None else [token], last=True)

    def finish(self) -> list[Event]:
        return self.finish_with("", None)

    @abstractmethod
    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        """Passes text and tokens to the engine; returns its events."""

    @property
    def held(self) -> str:
        """See Parser; the text since the engine's last event."""
        return self._unparsed

    def call(self, index: int, call_id: str, name: str | None, arguments: str | None) -> list[Event]:
        """Returns the events for a piece of a call.

        Some engine parsers return arguments before the name of their call, or skip an index. The returned calls have
        names and consecutive numbers; arguments of a call that never receives a name are dropped.
        """
        events: list[Event] = []
        if name and index not in self._numbers:
            number = self._numbers[index] = len(self._numbers)
            events.append(CallStart(number, self._own_id(number, call_id), name))
            arguments = self._nameless.pop(index, "") + (arguments or "")
        if arguments:
            if index in self._numbers:
                events.append(CallArguments(self._numbers[index], arguments))
            else:
                self._nameless[index] = self._nameless.get(index, "") + arguments
        return events

    def _own_id(self, index: int, call_id: str) -> str:
        """Returns an id in the engine's format that is reproducible, unlike the engine's random ids.

        An id written by the model is kept.
        """
        if not call_id:
            return "call_" + self.context.token(index, 24)
        if call_id in self._text:
            return call_id
        if _LETTERS.fullmatch(call_id):
            return self.context.token(index, 9)
        return _HEX.sub(lambda found: self.context.hex(index, len(found[0])), call_id)
