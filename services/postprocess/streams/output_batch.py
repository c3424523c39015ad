"""What a session has to say and has not said yet."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.postprocess.detokenize.stream import Finish
from services.postprocess.detokenize.token_texts import TokenRecorder, TokenTexts
from services.postprocess.parsers.events import Event, merge


@dataclass(frozen=True, slots=True)
class Batch:
    """What became ready together: row i is `text_lengths[i]` code points for `slots[i]`, then what tokens stand for,
    then what parsers found, then the ended streams.

    Attributes:
        draining: this replica leaves; said once.
    """

    slots: array[int]
    text_lengths: array[int]
    text: str
    finishes: list[tuple[int, Finish]]
    events: list[tuple[int, list[Event]]] = field(default_factory=list)
    tokens: list[tuple[int, TokenTexts]] = field(default_factory=list)
    draining: bool = False


class OutputBatch:
    """Collects answers until they are taken together.

    Attributes:
        texts: plain text by slot.
    """

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self._events: dict[int, list[Event]] = {}
        self._recorders: dict[int, TokenRecorder] = {}
        self._tokens: list[tuple[int, TokenTexts]] = []
        self._finishes: list[tuple[int, Finish]] = []
        self._leaving = False

    def say(self, slot: int, text: str) -> None:
        """Text of a plain stream."""
        if text:
            self.texts[slot] = self.texts.get(slot, "") + text

    def tell(self, slot: int, events: list[Event]) -> None:
        """What a parser found."""
        if (waiting := self._events.get(slot)) is None:
            self._events[slot] = events
        else:
            waiting += events

    def watch(self, slot: int, recorder: TokenRecorder) -> None:
        """A stream whose tokens are told."""
        self._recorders[slot] = recorder

    def release(self, slot: int) -> None:
        """The slot's stream is over; what it said still goes out."""
        if self._recorders and (recorder := self._recorders.pop(slot, None)) is not None:
            self._take_tokens(slot, recorder)

    def finish(self, slot: int, finish: Finish) -> None:
        """How a stream ended."""
        self._finishes.append((slot, finish))

    def forget(self, slots: set[int]) -> None:
        """Nobody wants to hear of these any more."""
        for slot in slots:
            self.texts.pop(slot, None)
            self._events.pop(slot, None)
            self._recorders.pop(slot, None)
        self._finishes = [(slot, finish) for slot, finish in self._finishes if slot not in slots]
        self._tokens = [(slot, tokens) for slot, tokens in self._tokens if slot not in slots]

    def leave(self) -> None:
        """Says once that this replica leaves."""
        self._leaving = True

    def take(self) -> Batch | None:
        """All of it; None when there is nothing."""
        for slot, recorder in self._recorders.items():
            self._take_tokens(slot, recorder)
        texts, finishes, events = self.texts, self._finishes, self._events
        if not (texts or finishes or events or self._tokens or self._leaving):
            return None
        tokens, leaving = self._tokens, self._leaving
        self.texts, self._finishes, self._events, self._tokens, self._leaving = {}, [], {}, [], False
        told = [(slot, merge(found)) for slot, found in events.items()]
        lengths = array("I", map(len, texts.values()))
        return Batch(array("I", texts), lengths, "".join(texts.values()), finishes, told, tokens, leaving)

    def _take_tokens(self, slot: int, recorder: TokenRecorder) -> None:
        if tokens := recorder.take():
            self._tokens.append((slot, tokens))
