"""Text, reasoning and tool calls produced from tokens, on the way to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.postprocess.detokenize.stream import Finish
from services.postprocess.detokenize.token_texts import TokenTexts
from services.postprocess.parsers.events import Content, Event
from services.postprocess.streams.output_batch import Batch


@dataclass(slots=True)
class TextUpdate:
    """A part of one request's text.

    Attributes:
        events: text, reasoning and tool calls, in order.
        tokens: the text of each token, if requested.
        finish: how the text ended; None except in the last part.
    """

    events: list[Event] = field(default_factory=list)
    tokens: TokenTexts | None = None
    finish: Finish | None = None

    def add(self, later: TextUpdate) -> None:
        """Appends the following part."""
        self.events += later.events
        self.finish = later.finish or self.finish
        if self.tokens is None:
            self.tokens = later.tokens
        elif later.tokens is not None:
            self.tokens.lengths.extend(later.tokens.lengths)
            self.tokens.pieces += later.tokens.pieces
            self.tokens.offsets.extend(later.tokens.offsets)


def by_slot(batch: Batch | None) -> dict[int, TextUpdate]:
    """Groups the output of a postprocess session by slot; empty for None."""
    deltas: dict[int, TextUpdate] = {}
    if batch is None:
        return deltas
    end = 0
    for slot, length in zip(batch.slots, batch.text_lengths, strict=True):
        start, end = end, end + length
        deltas[slot] = TextUpdate([Content(batch.text[start:end])])
    for slot, events in batch.events:
        deltas.setdefault(slot, TextUpdate()).events += events
    for slot, tokens in batch.tokens:
        deltas.setdefault(slot, TextUpdate()).add(TextUpdate(tokens=tokens))
    for slot, finish in batch.finishes:
        deltas.setdefault(slot, TextUpdate()).finish = finish
    return deltas
