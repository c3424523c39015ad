"""Where an engine puts the tokens of a request whose text is made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.worker.contract.generation import Delta, PositionLogprobs, Usage
from services.worker.generation.response_sink import ResponseSink
from services.worker.generation.text_delta import TextDelta


class TextSink(ResponseSink):
    """Holds the engine to its word, as every delivery, and hands what it says to the desk.

    Args:
        slot: on the desk.
        target: the caller's delivery.
        stop: ends the request in the engine.
        before: tokens of the text that an earlier worker made.
        put: takes tokens.
        end: called when the engine has ended the request.

    Attributes:
        terminal: what the engine said last; None while it runs.
    """

    def __init__(
        self,
        slot: int,
        target: ResponseSink,
        stop: Callable[[], None],
        before: int,
        put: Callable[[TextSink, Sequence[int], Sequence[PositionLogprobs]], None],
        end: Callable[[TextSink], None],
    ) -> None:
        super().__init__()
        self.slot = slot
        self.target = target
        self.stop = stop
        self.before = before
        self.terminal: Delta | None = None
        self._put = put
        self._on_terminal = end

    def deliver_first(self, cached_tokens: int, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        self.target.begin(cached_tokens, prompt_logprobs)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        if self.admits(token_ids, logprobs):
            self.delivered += len(token_ids)
            self._put(self, token_ids, logprobs)

    def deliver_text(self, text: TextDelta) -> None:
        self.target.deliver_text(text)

    def deliver_terminal(self, delta: Delta) -> None:
        self.terminal = delta
        self._on_terminal(self)

    def usage(self) -> Usage:
        """Of the tokens that the caller got: the engine's own count where that is all of them."""
        tokens, said = self.target.delivered, self.terminal.usage if self.terminal is not None else None
        if said is None:
            return Usage(self._prompt_tokens, tokens, self._cached_tokens)
        return said if tokens == self.delivered else replace(said, completion_tokens=tokens)
