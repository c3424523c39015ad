"""What an engine's parsers look like from here: tokens and their texts in, events out."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Event

_HEX = re.compile(r"[0-9a-f]{16,}")
_LETTERS = re.compile(r"[0-9A-Za-z]{9}")


@dataclass(frozen=True)
class Facts:
    """What the service must know about a model's parsers before a stream begins.

    Attributes:
        keeps_special: the parsers read special tokens as text when a request has tools.
        keeps_special_always: and when it has none.
    """

    keeps_special: bool
    keeps_special_always: bool


class Engine(Protocol):
    """One engine's package in this process.

    Attributes:
        version: of the package.
        tool, reasoning: the names it has.
    """

    version: str
    tool: Sequence[str]
    reasoning: Sequence[str]

    def load(self, source: str, tool: str, reasoning: str) -> Facts:
        """Gets a model's tokenizer and a pair of parsers ready; ValueError says why they do not go together.

        Args:
            source: the model's folder, or its tokenizer's file.
            tool, reasoning: names of parsers; empty for none.
        """
        ...

    def sources(self) -> Collection[str]:
        """The models that are loaded, as `load` was told their files."""
        ...

    def forget(self, source: str) -> None:
        """Gives back what is loaded for a model; unknown ones are ignored."""
        ...

    def open(self, tool: str, reasoning: str, context: ParserContext) -> EngineParser:
        """The parser of one stream, for a model that was loaded."""
        ...


class EngineParser(Parser):
    """One stream, parsed by an engine's own code.

    The engine gets one token at a time with the text that the token completed, so that its answer does not depend on
    how tokens come in batches.
    """

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._untold = ""
        self._text = ""
        self._numbers: dict[int, int] = {}
        self._nameless: dict[int, str] = {}

    def feed(self, text: str) -> list[Event]:
        """See Parser; text that no token came with."""
        return self.feed_token(text, None)

    def feed_token(self, text: str, token: int | None) -> list[Event]:
        """The next token and the text it completed, which may be empty; None for text without a token."""
        self._untold += text
        if self.context.tools:
            self._text += text
        events = self.step(text, [] if token is None else [token], last=False)
        if events:
            self._untold = ""
        return events

    def finish_with(self, text: str, token: int | None) -> list[Event]:
        """The end, with the last text and the token that ended it."""
        self._untold += text
        return self.step(text, [] if token is None else [token], last=True)

    def finish(self) -> list[Event]:
        """See Parser."""
        return self.finish_with("", None)

    @abstractmethod
    def step(self, text: str, tokens: list[int], last: bool) -> list[Event]:
        """Asks the engine."""

    @property
    def held(self) -> str:
        """See Parser; what the engine took since it last said something."""
        return self._untold

    def call(self, index: int, call_id: str, name: str | None, arguments: str | None) -> list[Event]:
        """The events of a piece of a call; a name begins it once.

        Some of the engines' parsers speak of arguments before they know whose they are, or leave a number out. Clients
        hear of calls with names, numbered without holes; arguments that never get a name are nobody's.
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
        """The id in the engine's form, but the same whenever the stream is parsed again: engines draw them by lot. One
        that the model wrote itself stays."""
        if not call_id:
            return "call_" + self.context.token(index, 24)
        if call_id in self._text:
            return call_id
        if _LETTERS.fullmatch(call_id):
            return self.context.token(index, 9)
        return _HEX.sub(lambda found: self.context.hex(index, len(found[0])), call_id)
