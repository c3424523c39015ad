"""Output of a session that has not been sent yet."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.base.shared_steps import shared_step
from services.postprocess.detokenize.stream import Finish
from services.postprocess.detokenize.token_texts import TokenRecorder, TokenTexts
from services.postprocess.parsers.events import Event, merge


@dataclass(frozen=True, slots=True)
class Batch:
    """Output of many streams in one message: row i has `text_lengths[i]` code points of `text` for `slots[i]`.

    Attributes:
        finishes: ended streams.
        events: events of parsers by slot.
        tokens: token texts by slot.
        draining: announces once that this replica leaves.
    """

    slots: array[int]
    text_lengths: array[int]
    text: str
    finishes: list[tuple[int, Finish]]
    events: list[tuple[int, list[Event]]] = field(default_factory=list)
    tokens: list[tuple[int, TokenTexts]] = field(default_factory=list)
    draining: bool = False


class OutputBatch:
    """Collects output until it is taken as one batch.

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

    def add_text(self, slot: int, text: str) -> None:
        """Adds text of a plain stream."""
        if text:
            self.texts[slot] = self.texts.get(slot, "") + text

    def has_events(self, slot: int) -> bool:
        """Returns whether the batch has events of a stream, which its further text must follow."""
        return slot in self._events

    def add_events(self, slot: int, events: list[Event]) -> None:
        """Adds events of a parser."""
        if (pending := self._events.get(slot)) is None:
            self._events[slot] = events
        else:
            pending += events

    def add_recorder(self, slot: int, recorder: TokenRecorder) -> None:
        """Adds the recorder of a stream that returns token texts."""
        self._recorders[slot] = recorder

    def release(self, slot: int) -> None:
        """Detaches an ended stream; its output is kept."""
        if self._recorders and (recorder := self._recorders.pop(slot, None)) is not None:
            self._take_tokens(slot, recorder)

    def finish(self, slot: int, finish: Finish) -> None:
        """Adds the finish of a stream."""
        self._finishes.append((slot, finish))

    def forget(self, slots: set[int]) -> None:
        """Drops the output of closed streams."""
        for slot in slots:
            self.texts.pop(slot, None)
            self._events.pop(slot, None)
            self._recorders.pop(slot, None)
        self._finishes = [(slot, finish) for slot, finish in self._finishes if slot not in slots]
        self._tokens = [(slot, tokens) for slot, tokens in self._tokens if slot not in slots]

    def leave(self) -> None:
        """Announces in the next batch that this replica leaves."""
        self._leaving = True

    @shared_step("postprocess.take_output")
    def take(self, on_broken: Callable[[int, Exception], None]) -> Batch | None:
        """Returns all output as a batch; None if there is none.

        Args:
            on_broken: called with the slot whose output cannot be taken, which is dropped, and the exception. It may
                add the finish of that slot's stream.
        """
        if not (self.texts or self._events or self._recorders or self._tokens or self._finishes or self._leaving):
            return None
        broken: list[tuple[int, Exception]] = []
        merged: list[tuple[int, list[Event]]] = []
        for slot, recorder in self._recorders.items():
            try:
                self._take_tokens(slot, recorder)
            except Exception as error:
                broken.append((slot, error))
        for slot, found in self._events.items():
            try:
                merged.append((slot, merge(found)))
            except Exception as error:
                broken.append((slot, error))
        if broken:
            slots = {slot for slot, _ in broken}
            self.forget(slots)
            merged = [(slot, found) for slot, found in merged if slot not in slots]
            for slot, reason in broken:
                on_broken(slot, reason)
        texts, finishes, tokens, leaving = self.texts, self._finishes, self._tokens, self._leaving
        if not (texts or finishes or merged or tokens or leaving):
            return None
        self.texts, self._finishes, self._events, self._tokens, self._leaving = {}, [], {}, [], False
        lengths = array("I", map(len, texts.values()))
        return Batch(array("I", texts), lengths, "".join(texts.values()), finishes, merged, tokens, leaving)

    def _take_tokens(self, slot: int, recorder: TokenRecorder) -> None:
        if tokens := recorder.take():
            self._tokens.append((slot, tokens))
