"""Parsers as users write them: good ones and bad ones."""

from __future__ import annotations

import os
import time

from services.postprocess.parsers.base import Parser, ParserContext
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Event, Reasoning


class Shouting(Parser):
    """Content in capitals; `!name!` is a call without arguments; misbehaves on demand."""

    markers = frozenset(("[TOOL_CALLS]",))

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._held = ""
        self._calls = 0
        self._hoard: list[bytearray] = []

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self._misbehave(self._held + text)
        *whole, self._held = (self._held + text).split(" ")
        return [event for word in whole for event in self._word(word + " ")]

    def _word(self, word: str) -> list[Event]:
        name = word.strip()
        if len(name) > 2 and name[0] == name[-1] == "!":
            self._calls += 1
            call = self._calls - 1
            return [CallStart(call, self.context.token(call, 9), name[1:-1]), CallArguments(call, "{}")]
        self.reasoning = name.startswith("?")
        return [Reasoning(word)] if self.reasoning else [Content(word.upper())]

    def _misbehave(self, text: str) -> None:
        if "RAISE" in text:
            raise RuntimeError("as asked")
        while "LOOP" in text:
            time.sleep(0.01)
        while "GROW" in text:
            self._hoard.append(bytearray(1 << 20))
        if "DIE" in text:
            os._exit(3)

    def finish(self) -> list[Event]:
        """See Parser."""
        return self._word(self._held) if self._held else []

    @property
    def held(self) -> str:
        """See Parser."""
        return self._held


class Broken:
    """No parser at all."""
