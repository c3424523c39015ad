"""Calls in reasoning that never ends: models leave the closing tag out before a call.

A call in the reasoning is held, and becomes reasoning if a closing tag follows, because models also write calls that
they only consider.
"""

from __future__ import annotations

from services.postprocess.parsers.base import Chain, Parser
from services.postprocess.parsers.calls.parser import MAX_HEAD, CallParser
from services.postprocess.parsers.events import CallStart, Content, Event, PlainKind, Reasoning
from services.postprocess.parsers.scanning.markers import TextBuffer


class UnclosedReasoningChain(Chain):
    """Chain that finds calls of known tools in unclosed reasoning.

    A held call is one at the end of the output, or when more than MAX_HEAD characters are held.

    Args:
        first: parser of the reasoning.
        second: parser of calls that begin with a marker.
    """

    def __init__(self, first: Parser, second: CallParser) -> None:
        super().__init__(first, second)
        self._scout = second.scout()
        self._seen = TextBuffer()  # reasoning that the scout did not return
        self._found = False  # `_seen` begins with a call
        self._ended = False  # the reasoning ended in a call

    def feed(self, text: str) -> list[Event]:
        events = super().feed(text)
        if not self.reasoning and self._seen.size:
            self._release(events)
        return events

    def plain(self, text: str) -> PlainKind:
        kind = self._first.plain(text)
        if kind is Reasoning:
            return kind if not self._seen.size and not self._ended and self._scout.plain(text) is Content else None
        return self._second.plain(text) if kind is Content and not self._seen.size else None

    def finish(self) -> list[Event]:
        events = self._forward(self._end_first())
        if self._found and self._first.reasoning:
            events += self._second.feed(self._seen.take())
        self._release(events)
        return events + self._second.finish()

    def _forward(self, found: list[Event]) -> list[Event]:
        events: list[Event] = []
        for event in found:
            if isinstance(event, Reasoning):
                self._look(event.text, events)
            elif isinstance(event, Content):
                self._release(events)
                events += self._second.feed(event.text)
            else:
                events.append(event)
        return events

    def _look(self, text: str, events: list[Event]) -> None:
        """Looks for a call in the next reasoning."""
        if self._ended:
            events += self._second.feed(text)
            return
        self._seen.add(text)
        if not self._found:
            passed = 0
            for event in self._scout.feed(text):
                if isinstance(event, CallStart):
                    self._found = True
                    break
                passed += len(event.text) if isinstance(event, Content) else 0
            if passed:
                seen = self._seen.take()
                events.append(Reasoning(seen[:passed]))
                self._seen.add(seen[passed:])
        if self._found and self._seen.size > MAX_HEAD:
            self._ended = True
            events += self._second.feed(self._seen.take())

    def _release(self, events: list[Event]) -> None:
        """Returns what is held as reasoning, which is complete."""
        if self._seen.size:
            events.append(Reasoning(self._seen.take()))

    @property
    def held(self) -> str:
        return self._second.held + self._seen.text + self._first.held

    @property
    def held_size(self) -> int:
        return self._second.held_size + self._seen.size + self._first.held_size
