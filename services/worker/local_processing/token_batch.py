"""Tokens of several requests, pushed by the engine during one step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.worker.contract.generation import PositionLogprobs
from services.worker.local_processing.text_sink import TextSink


@dataclass(slots=True)
class StepTokens:
    """Rows of tokens in columns.

    Attributes:
        rows: sink and log-probabilities of each row.
        counts: tokens of each row.
        token_ids: tokens of all rows, concatenated.
    """

    rows: list[tuple[TextSink, Sequence[PositionLogprobs]]] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("I"))
    token_ids: array[int] = field(default_factory=lambda: array("I"))

    def add(self, sink: TextSink, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        """Appends a row whole, or not at all when an id is invalid, because all requests share the columns."""
        if len(token_ids) == 1:
            self.token_ids.append(token_ids[0])
        else:
            self.token_ids += array("I", token_ids)
        self.rows.append((sink, logprobs))
        self.counts.append(len(token_ids))

    def extend(self, later: StepTokens) -> None:
        """Appends the rows of another step."""
        self.rows += later.rows
        self.counts += later.counts
        self.token_ids += later.token_ids

    def partition(self, matches: Callable[[int], bool]) -> tuple[StepTokens, StepTokens]:
        """Returns the rows whose slots match, and the others, each in order."""
        groups = StepTokens(), StepTokens()
        for sink, token_ids, logprobs in self:
            groups[not matches(sink.slot)].add(sink, token_ids, logprobs)
        return groups

    def __iter__(self) -> Iterator[tuple[TextSink, array[int], Sequence[PositionLogprobs]]]:
        end = 0
        for (sink, logprobs), count in zip(self.rows, self.counts, strict=True):
            start, end = end, end + count
            yield sink, self.token_ids[start:end], logprobs
