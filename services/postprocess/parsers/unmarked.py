"""Calls that no marker announces: the whole answer is one, if its beginning looks like one."""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import ClassVar

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls import Body, CallParser
from services.postprocess.parsers.events import Event
from services.postprocess.parsers.markers import TextBuffer

_SPACES = re.compile(r"\s*").match
_SEPARATORS = (";", ",")


class UnmarkedCallParser(CallParser):
    """A CallParser whose calls may also stand at the beginning of the answer, or after another call, without a marker.

    What begins like one and turns out to be none is an ordinary answer, not a degraded one.

    Attributes:
        opening: the character that a bare call begins with.
    """

    opening: ClassVar[str]

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._fresh = True  # a bare call may come
        self._lead = TextBuffer()  # white space, and one separator after a call, before what may be a bare call
        self._separated = False

    @abstractmethod
    def bare_body(self) -> Body:
        """What reads a bare call."""

    def _look(self, events: list[Event]) -> bool:
        if not self._fresh:
            return super()._look(events)
        self._skip_lead()
        if not self._buffer:
            return False
        if self._buffer[0] == self.opening:
            self._body, self._marked = self.bare_body(), False
            self._raw, self._lead = self._lead, TextBuffer()
            self._separated = self._fresh = False
            return True
        before, marker, rest = self._outside.split(self._buffer)
        if before or not (marker or rest):
            self._fresh = False
        elif not marker:
            return False
        self._restore_lead()
        return super()._look(events)

    def _skip_lead(self) -> None:
        """Moves what may stand before a bare call out of the buffer, so that no later piece reads it again."""
        at = _end_of_spaces(self._buffer, 0)
        if self._calls.count and not self._separated and self._buffer.startswith(_SEPARATORS, at):
            self._separated = True
            at = _end_of_spaces(self._buffer, at + 1)
        self._lead.add(self._buffer[:at])
        self._buffer = self._buffer[at:]

    def _restore_lead(self) -> None:
        self._buffer = self._lead.take() + self._buffer
        self._separated = False

    def _begin(self, marker: str) -> None:
        super()._begin(marker)
        self._fresh = False

    def _complete(self) -> None:
        super()._complete()
        self._fresh = True

    def finish(self) -> list[Event]:
        """See Parser."""
        self._restore_lead()
        return super().finish()

    @property
    def held(self) -> str:
        """See Parser."""
        return self._gate.held + self._raw.text + self._lead.text + self._buffer

    @property
    def held_size(self) -> int:
        """See Parser."""
        return len(self._gate.held) + self._raw.size + self._lead.size + len(self._buffer)


def _end_of_spaces(text: str, at: int) -> int:
    found = _SPACES(text, at)
    assert found is not None
    return found.end()
