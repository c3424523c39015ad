"""What tokens became, on its way to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.postprocess.detokenize.stream import Finish
from services.postprocess.detokenize.token_texts import TokenTexts
from services.postprocess.parsers.events import Content, Event
from services.postprocess.streams.output_batch import Batch


@dataclass(slots=True)
class TextDelta:
    """The next part of one request's text.

    Attributes:
        events: text, reasoning and tool calls, in order.
        tokens: what each token stands for, where the caller asked for it.
        finish: how the text ended; on the last part.
    """

    events: list[Event] = field(default_factory=list)
    tokens: TokenTexts | None = None
    finish: Finish | None = None

    def add(self, later: TextDelta) -> None:
        """Appends the part that comes after this one."""
        self.events += later.events
        self.finish = later.finish or self.finish
        if self.tokens is None:
            self.tokens = later.tokens
        elif later.tokens is not None:
            self.tokens.lengths.extend(later.tokens.lengths)
            self.tokens.pieces += later.tokens.pieces
            self.tokens.offsets.extend(later.tokens.offsets)


def by_slot(batch: Batch | None) -> dict[int, TextDelta]:
    """What a session said, by slot; nothing for None."""
    said: dict[int, TextDelta] = {}
    if batch is None:
        return said
    end = 0
    for slot, length in zip(batch.slots, batch.text_lengths, strict=True):
        start, end = end, end + length
        said[slot] = TextDelta([Content(batch.text[start:end])])
    for slot, events in batch.events:
        said.setdefault(slot, TextDelta()).events += events
    for slot, tokens in batch.tokens:
        said.setdefault(slot, TextDelta()).add(TextDelta(tokens=tokens))
    for slot, finish in batch.finishes:
        said.setdefault(slot, TextDelta()).finish = finish
    return said
