"""Parsers of calls without markers: output that begins like a call is one."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection
from typing import ClassVar

from services.postprocess.parsers.base import ParserContext
from services.postprocess.parsers.calls.parser import Body, CallParser
from services.postprocess.parsers.events import Event, PlainKind
from services.postprocess.parsers.scanning.markers import TextBuffer

_SPACES = re.compile(r"\s*").match
_SEPARATORS = (";", ",")


class UnmarkedCallParser(CallParser):
    """A CallParser that also accepts calls without markers, at the beginning of the output or after another call.

    Output that begins like a call but is not one is content, and not marked as degraded.

    Attributes:
        opening: first character of an unmarked call.
    """

    marked = False
    opening: ClassVar[str]

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._fresh = True  # an unmarked call may follow
        self._lead = TextBuffer()  # white space, and one separator after a call, before a possible unmarked call
        self._separated = False

    @abstractmethod
    def bare_body(self) -> Body:
        """Returns the body parser of an unmarked call."""

    @property
    def known(self) -> Collection[str] | None:
        """The names that make unmarked output a call; None for any, also after a call."""
        return None if self._calls.count else self.context.names or None

    def _scan(self, events: list[Event]) -> bool:
        if not self._fresh:
            return super()._scan(events)
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
        self._buffer = self._unread()
        return super()._scan(events)

    def plain(self, text: str) -> PlainKind:
        return None if self._fresh else super().plain(text)

    def _skip_lead(self) -> None:
        """Moves text that may precede an unmarked call out of the buffer, so that it is not scanned again."""
        at = _end_of_spaces(self._buffer, 0)
        if self._calls.count and not self._separated and self._buffer.startswith(_SEPARATORS, at):
            self._separated = True
            at = _end_of_spaces(self._buffer, at + 1)
        self._lead.add(self._buffer[:at])
        self._buffer = self._buffer[at:]

    def _unread(self) -> str:
        self._separated = False
        return self._lead.take() + self._buffer

    def _begin(self, marker: str, events: list[Event]) -> None:
        super()._begin(marker, events)
        self._fresh = False

    def _complete(self, events: list[Event]) -> None:
        super()._complete(events)
        self._fresh = True

    @property
    def held(self) -> str:
        return self._gate.held + self._opened + self._raw.text + self._lead.text + self._buffer

    @property
    def held_size(self) -> int:
        held = len(self._gate.held) + len(self._opened) + self._raw.size
        return held + self._lead.size + len(self._buffer)


def _end_of_spaces(text: str, at: int) -> int:
    found = _SPACES(text, at)
    assert found is not None
    return found.end()
