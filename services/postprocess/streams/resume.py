"""Resumed streams: rebuilt from their tokens, so that only output that the caller lacks is returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.base.errors import SluiceError, invalid
from services.postprocess.parsers.events import CallArguments, CallStart, Content, Event, Reasoning


@dataclass(frozen=True, slots=True)
class Resume:
    """Tokens of a stream on another replica, and the output that the caller received; see `sluice.v1.StreamResume`.

    Attributes:
        token_ids: all tokens of the stream so far.
        text_sent: code points of content.
        reasoning_sent: code points of reasoning.
        calls: code points of arguments by index of each started call.
        tokens_sent: tokens whose texts were sent.
    """

    token_ids: Sequence[int]
    text_sent: int = 0
    reasoning_sent: int = 0
    calls: Mapping[int, int] = field(default_factory=dict)
    tokens_sent: int = 0


def mismatch() -> SluiceError:
    """Returns the error for a resumed stream whose caller claims more output than its tokens produce."""
    return invalid(
        "The tokens of the resumed stream produce less text than text_sent; send all its tokens.",
        code="resume_mismatch",
    )


class Remainder:
    """Omits output that the caller has received.

    The output of a stream does not depend on batching, and the output sent is a prefix of it. So skipping as many code
    points of each kind as were sent leaves exactly the rest, in order.
    """

    __slots__ = ("_calls", "_reasoning", "_started", "_text")

    def __init__(self, resume: Resume) -> None:
        self._text = resume.text_sent
        self._reasoning = resume.reasoning_sent
        self._calls = dict(resume.calls)
        self._started = frozenset(resume.calls)

    @property
    def text_left(self) -> int:
        """Code points of content still to be skipped."""
        return self._text

    def text(self, text: str) -> str:
        """Returns the new part of the next content."""
        known, self._text = self._text, max(self._text - len(text), 0)
        return text[known:] if known else text

    def events(self, events: Sequence[Event]) -> list[Event]:
        """Returns the new part of the next events."""
        return [rest for event in events if (rest := self._rest(event)) is not None]

    def _rest(self, event: Event) -> Event | None:
        if isinstance(event, Content):
            text = self.text(event.text)
        elif isinstance(event, Reasoning):
            known, self._reasoning = self._reasoning, max(self._reasoning - len(event.text), 0)
            text = event.text[known:]
        elif isinstance(event, CallArguments):
            known = self._calls.get(event.call, 0)
            self._calls[event.call] = max(known - len(event.text), 0)
            text = event.text[known:]
        elif isinstance(event, CallStart) and event.call in self._started:
            return None
        else:
            return event
        return event._replace(text=text) if text else None
