"""What a parser finds in a text, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Content(NamedTuple):
    """The next text for the user."""

    text: str


class Reasoning(NamedTuple):
    """The next text of the model's thinking."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; `call` counts the calls of the message from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next piece of a call's arguments, JSON text as the model wrote it."""

    call: int
    text: str


class Degraded(NamedTuple):
    """A fallback was taken; `reason` is a stable word such as `tool_call_malformed`."""

    reason: str


Event = Content | Reasoning | CallStart | CallArguments | Degraded


def merge(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of a kind as one, and every reason once."""
    merged: list[Event] = []
    reasons: set[str] = set()
    run: list[str] = []  # texts of the last event of `merged`, joined once the run is over
    for event in events:
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
