"""Events that parsers return, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """Next text of the content."""

    text: str


class Reasoning(NamedTuple):
    """Next text of the reasoning."""

    text: str


class CallStart(NamedTuple):
    """Start of a tool call; `call` is its index in the message, from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """Next piece of a call's arguments, JSON as the model wrote it."""

    call: int
    text: str


class Degraded(NamedTuple):
    """A fallback was used; `reason` is a stable identifier such as `tool_call_malformed`."""

    reason: str


Event = Content | Reasoning | CallStart | CallArguments | Degraded

PlainKind = type[Content] | type[Reasoning] | None
"""The type of the only event of a text; None: the text needs parsing."""


def merge(events: Iterable[Event]) -> list[Event]:
    """Returns the events with adjacent ones of a kind merged, and each Degraded reason once."""
    merged: list[Event] = []
    reasons: set[str] = set()
    run: list[str] = []  # texts of the last event of `merged`, joined when the run ends
    for event in events:
        if merged and type(event) is type(merged[-1]) and isinstance(event, (Content, Reasoning)):
            run.append(event.text)
            continue
        if isinstance(event, Degraded):
            if event.reason in reasons:
                continue
            reasons.add(event.reason)
        last = merged[-1] if merged else None
        if isinstance(event, (CallStart, Degraded)) or not _continues(last, event):
            _close(merged, run)
            merged.append(event)
        if not isinstance(event, (CallStart, Degraded)):
            run.append(event.text)
    _close(merged, run)
    return merged


def _continues(last: Event | None, event: Event) -> bool:
    if isinstance(event, CallArguments):
        return isinstance(last, CallArguments) and last.call == event.call
    return type(last) is type(event)


def _close(merged: list[Event], run: list[str]) -> None:
    if len(run) > 1:
        last = merged[-1]
        assert not isinstance(last, (CallStart, Degraded))
        merged[-1] = last._replace(text="".join(run))
    run.clear()
