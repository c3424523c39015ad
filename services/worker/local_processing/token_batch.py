"""Tokens of several requests, as engines push them during a step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.worker.contract.generation import PositionLogprobs
from services.worker.local_processing.text_sink import TextSink


@dataclass(slots=True)
class StepTokens:
    """Row i is the next `counts[i]` of `token_ids`, beside the sink they came to and their log-probabilities."""

    rows: list[tuple[TextSink, Sequence[PositionLogprobs]]] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("I"))
    token_ids: array[int] = field(default_factory=lambda: array("I"))

    def add(self, sink: TextSink, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs]) -> None:
        """One more row."""
        self.rows.append((sink, logprobs))
        self.counts.append(len(token_ids))
        self.token_ids.extend(token_ids)

    def extend(self, later: StepTokens) -> None:
        """The rows of another one after these."""
        self.rows += later.rows
        self.counts += later.counts
        self.token_ids += later.token_ids

    def parted(self, apart: Callable[[int], bool]) -> tuple[StepTokens, StepTokens]:
        """The rows whose slots are `apart`, and the others, each in order."""
        found = StepTokens(), StepTokens()
        for sink, token_ids, logprobs in self:
            found[not apart(sink.slot)].add(sink, token_ids, logprobs)
        return found

    def __iter__(self) -> Iterator[tuple[TextSink, array[int], Sequence[PositionLogprobs]]]:
        end = 0
        for (sink, logprobs), count in zip(self.rows, self.counts, strict=True):
            start, end = end, end + count
            yield sink, self.token_ids[start:end], logprobs
