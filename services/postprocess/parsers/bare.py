"""Calls that no marker announces: the whole answer is one, if its beginning looks like one."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from services.postprocess.parsers.calls import Body, CallParser
from services.postprocess.parsers.contract import ParserContext
from services.postprocess.parsers.events import Event

_SPACES = re.compile(r"\s*").match
_BETWEEN = re.compile(r"\s*(?:[;,]\s*)?").match


class BareCallParser(CallParser):
    """A CallParser whose calls may also stand at the beginning of the answer, or after another call, without a marker.

    What begins like one and turns out to be none is an ordinary answer, not a degraded one.

    Attributes:
        opening: the character that a bare call begins with.
    """

    opening: ClassVar[str]

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._fresh = True  # a bare call may come

    @abstractmethod
    def bare_body(self) -> Body:
        """What reads a bare call."""

    def _look(self, events: list[Event]) -> bool:
        if not self._fresh:
            return super()._look(events)
        found = (_BETWEEN if self._calls.count else _SPACES)(self._buffer)
        assert found is not None
        at = found.end()
        if at == len(self._buffer):
            return False
        if self._buffer[at] == self.opening:
            self._body, self._marked = self.bare_body(), False
            self._raw, self._buffer = self._buffer[:at], self._buffer[at:]
            self._fresh = False
            return True
        before, marker, rest = self._outside.split(self._buffer[at:])
        if before or not (marker or rest):
            self._fresh = False
        elif not marker:
            return False
        return super()._look(events)

    def _begin(self, marker: str) -> None:
        super()._begin(marker)
        self._fresh = False

    def _complete(self) -> None:
        super()._complete()
        self._fresh = True
