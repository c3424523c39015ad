"""A sink that bridges pushed tokens to an async iterator of deltas."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence

from services.common.base.errors import SluiceError
from services.worker.contract.engine import Sink
from services.worker.contract.generation import Delta, FinishReason, PositionLogprobs, Usage
from services.worker.contract.text_delta import TextUpdate


class DeltaStream(Sink):
    """Collects the output of one request; tokens pushed while the reader is busy are merged into one delta.

    Memory is bounded by the context length: an engine pushes no more tokens than that.

    Attributes:
        prompt_token_ids: included in the next delta.
    """

    def __init__(self) -> None:
        self._token_ids = array("I")
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: Sequence[PositionLogprobs] = ()
        self._cached_tokens: int | None = None
        self._cached_later = False
        self._text: TextUpdate | None = None
        self.prompt_token_ids: Sequence[int] = ()
        self._terminal: Delta | None = None
        self._ready = asyncio.Event()

    def begin(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self._cached_tokens, self._cached_later = cached_tokens or 0, cached_tokens is None
        self._prompt_logprobs = prompt_logprobs

    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ready.set()

    def finish(
        self,
        reason: FinishReason,
        usage: Usage,
        *,
        stop_token_id: int | None = None,
        error: SluiceError | None = None,
        handoff: bytes = b"",
    ) -> None:
        self.end(Delta(finish_reason=reason, usage=usage, stop_token_id=stop_token_id, error=error, handoff=handoff))

    def push_text(self, text: TextUpdate) -> None:
        """Adds text produced from the tokens."""
        if self._text is None:
            self._text = text
        else:
            self._text.add(text)
        self._ready.set()

    def end(self, terminal: Delta) -> None:
        """Ends the stream with this terminal delta."""
        self._terminal = terminal
        self._ready.set()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yields tokens and text as they arrive, then the terminal delta by itself."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._token_ids or self._text is not None:
                yield self._take_tokens()
            if self._terminal is not None and not self._token_ids and self._text is None:
                yield self._terminal
                return

    def take(self) -> Iterator[Delta]:
        """Yields what has arrived, without waiting: tokens and text, then the terminal delta by itself."""
        if self._token_ids or self._text is not None:
            yield self._take_tokens()
        if self._terminal is not None:
            yield self._terminal

    def _take_tokens(self) -> Delta:
        delta = Delta(
            token_ids=self._token_ids,
            cached_tokens=self._cached_tokens,
            cached_later=self._cached_later,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self.prompt_token_ids,
            text=self._text,
        )
        self._token_ids, self._logprobs = array("I"), []
        self._cached_tokens, self._cached_later = None, False
        self._prompt_logprobs, self.prompt_token_ids, self._text = (), (), None
        return delta
