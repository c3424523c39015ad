"""Requests whose text comes later than their tokens, because a parser in another process makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.worker.generation.text_delta import TextDelta
from services.worker.local_processing.token_batch import StepTokens


@dataclass
class _Lag:
    """One of them: tokens that its parser was given, what it said about them so far, and tokens that came meanwhile.

    `resumes` while the first are an earlier worker's, whose caller has both.
    """

    resumes: bool
    tokens: StepTokens = field(default_factory=StepTokens)
    text: TextDelta = field(default_factory=TextDelta)
    later: StepTokens = field(default_factory=StepTokens)


class PendingParses:
    """Keeps their tokens and texts together: a caller has both or neither, so that another worker can go on from there.

    Args:
        behind: whether something is still to be said about a slot's tokens; it gets no more of them until then.
    """

    def __init__(self, behind: Callable[[int], bool]) -> None:
        self._behind = behind
        self._lags: dict[int, _Lag] = {}

    def __len__(self) -> int:
        return len(self._lags)

    def add(self, slot: int, resumes: bool) -> None:
        """A request is one of them from now on."""
        self._lags[slot] = _Lag(resumes)

    def forget(self, slot: int) -> None:
        """It is over; unknown ones are ignored."""
        self._lags.pop(slot, None)

    def busy(self, slot: int) -> bool:
        """Whether this is one of them, and its parser has been given tokens that are not answered."""
        return slot in self._lags and self._behind(slot)

    def given(self, tokens: StepTokens) -> None:
        """Their parsers were given these."""
        for sink, token_ids, logprobs in tokens:
            self._lags[sink.slot].tokens.add(sink, token_ids, logprobs)

    def due(self, tokens: StepTokens) -> StepTokens:
        """Of tokens that came now, those that parsers can be given, after those that waited for it."""
        held, tokens = tokens.parted(self.busy)
        for sink, token_ids, logprobs in held:
            self._lags[sink.slot].later.add(sink, token_ids, logprobs)
        found = StepTokens()
        for slot, lag in self._lags.items():
            if lag.later.rows and not self._behind(slot):
                found.extend(lag.later)
                lag.later = StepTokens()
        found.extend(tokens)
        return found

    def hear(self, slot: int, text: TextDelta) -> None:
        """What was said about one of them; others are ignored."""
        if (lag := self._lags.get(slot)) is not None:
            lag.text.add(text)

    def answered(self) -> list[tuple[int, StepTokens, TextDelta]]:
        """Those that are not behind any more and were: their tokens, and the text of these."""
        found = []
        for slot, lag in self._lags.items():
            if self._behind(slot):
                continue
            tokens, text = lag.tokens, lag.text
            if lag.resumes:
                text = TextDelta(finish=text.finish)
            lag.tokens, lag.text, lag.resumes = StepTokens(), TextDelta(), False
            if tokens.rows or text != TextDelta():
                found.append((slot, tokens, text))
        return found
