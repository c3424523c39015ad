"""Combines log-probabilities and token bytes of three sources for a choice that shows its tokens.

The worker sends log-probabilities, postprocess the bytes and offsets of the chosen tokens, and the bytes of
alternatives are fetched the first time each token occurs. Calls that arrive meanwhile are queued, to preserve order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from services.common.base.errors import SluiceError, internal
from services.common.base.tasks import TaskOwner
from services.gateway.backends.rpc.token_bytes import TokenPieces
from services.gateway.core.request import Finish, FinishReason, PositionLogprobs
from services.gateway.operations.logprobs import TokenText

log = logging.getLogger(__name__)


class TokenSink(Protocol):
    """A sink that shows its tokens; see Sink for the other methods."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Called once, first."""

    def shown(self, tokens: Sequence[TokenText]) -> None:
        """Receives the next tokens, before their text."""

    def shown_prompt(self, tokens: Sequence[TokenText]) -> None:
        """Receives the prompt's tokens, before any output."""

    def text(self, piece: str) -> None: ...

    def reasoning(self, piece: str) -> None: ...

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None: ...

    def finish(self, finish: Finish) -> None: ...

    def fail(self, error: SluiceError) -> None: ...


class LogprobsAssembler:
    """Sits between a generation and a choice that shows its tokens.

    Args:
        choice: receives all calls, in order.
        pieces: fetches and caches the bytes of tokens.
        model: the model of the tokens.
        tasks: owns the fetches.
        prompt_logprobs: log-probabilities of the prompt are requested.
        prompt_only: drop the generated output.
    """

    def __init__(
        self,
        choice: TokenSink,
        pieces: TokenPieces,
        model: str,
        tasks: TaskOwner,
        prompt_logprobs: bool = False,
        prompt_only: bool = False,
    ) -> None:
        self._choice = choice
        self._pieces = pieces
        self._model = model
        self._tasks = tasks
        self._prompt_due = prompt_logprobs
        self._prompt_only = prompt_only
        self._positions: deque[PositionLogprobs] = deque()
        self._queue: deque[tuple[Callable[[], None], Iterable[int]]] = deque()
        self._blocked = True  # until `begin`, and during fetches
        self._echo = ""
        self._token_ids: Sequence[int] = ()
        self._prompt_ids: Sequence[int] = ()
        self._shown = 0

    def echo(self, text: str) -> None:
        """Puts the prompt's text before the output."""
        self._echo = text
        if not self._prompt_due:
            self._forward(lambda: self._choice.text(text))

    def begin(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> None:
        """Starts forwarding, with the calls queued so far.

        Args:
            token_ids: the generated token ids; grows during the generation.
        """
        self._token_ids, self._prompt_ids = token_ids, prompt_ids
        self._choice.begin(prompt_ids)
        self._blocked = False
        self._drain()

    def discard(self) -> None:
        """Drops all queued calls, because the generation was not started."""
        self._queue.clear()

    def logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink."""
        self._positions.extend(positions)

    def tokens(self, pieces: Sequence[bytes], offsets: Sequence[int]) -> None:
        """See Sink."""
        rows = [
            (piece, offset, self._positions.popleft() if self._positions else None)
            for piece, offset in zip(pieces, offsets, strict=True)
        ]
        alternatives = [other.token_id for _, _, position in rows if position is not None for other in position.top]
        self._forward_output(lambda: self._show(rows), alternatives)

    def _show(self, rows: list[tuple[bytes, int, PositionLogprobs | None]]) -> None:
        ids = self._token_ids[self._shown : self._shown + len(rows)]
        self._shown += len(rows)
        before = len(self._echo)
        self._choice.shown(
            [
                TokenText(token_id, piece, offset + before, position)
                for token_id, (piece, offset, position) in zip(ids, rows, strict=True)
            ]
        )

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink."""
        alternatives = [other.token_id for position in positions for other in position.top]
        self._forward_prompt(positions, alternatives)

    def _forward_prompt(self, positions: Sequence[PositionLogprobs], alternatives: Iterable[int]) -> None:
        """Forwards the prompt's tokens and, if echoed, its text; only the first call has an effect."""
        if not self._prompt_due:
            return
        self._prompt_due = False

        def ids() -> Iterable[int]:
            return chain(self._prompt_ids, alternatives)

        self._forward(lambda: self._choice.shown_prompt(self._prompt_tokens(positions)), _LazyIds(ids))
        if self._echo:
            self._forward(lambda: self._choice.text(self._echo))

    def text(self, piece: str) -> None:
        """See Sink."""
        self._forward_output(lambda: self._choice.text(piece))

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        self._forward_output(lambda: self._choice.reasoning(piece))

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self._forward_output(lambda: self._choice.tool_call(call, call_id, name, arguments))

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._forward_prompt((), ())
        if self._prompt_only:
            finish = replace(finish, reason=FinishReason.LENGTH, stop_string="", stop_token_id=None)
        self._forward(lambda: self._choice.finish(finish))

    def fail(self, error: SluiceError) -> None:
        """See Sink."""
        self._forward(lambda: self._choice.fail(error))

    def _forward_output(self, call: Callable[[], None], token_ids: Iterable[int] = ()) -> None:
        self._forward_prompt((), ())
        if not self._prompt_only:
            self._forward(call, token_ids)

    def _forward(self, call: Callable[[], None], token_ids: Iterable[int] = ()) -> None:
        self._queue.append((call, token_ids))
        self._drain()

    def _drain(self) -> None:
        pieces = self._pieces.of(self._model)
        while self._queue and not self._blocked:
            call, token_ids = self._queue[0]
            missing = [token_id for token_id in token_ids if token_id not in pieces]
            if missing:
                self._blocked = True
                self._tasks.spawn(self._fetch(missing), "token-pieces")
                return
            self._queue.popleft()
            call()

    async def _fetch(self, token_ids: list[int]) -> None:
        try:
            await self._pieces.learn(self._model, token_ids)
            self._blocked = False
            self._drain()
        except SluiceError as error:
            self._fail_now(error)
        except Exception:
            log.exception("fetching token bytes failed")
            self._fail_now(internal("Unexpected failure in the gateway; its log has the details."))

    def _fail_now(self, error: SluiceError) -> None:
        self._blocked = True  # nothing may follow a failure
        self._queue.clear()
        self._choice.fail(error)

    def _prompt_tokens(self, positions: Sequence[PositionLogprobs]) -> list[TokenText]:
        """Returns the prompt's tokens with their offsets in its text; tokens that are not in the text have no length.

        The first token has no log-probabilities, whether or not the engine reports an entry for it.
        """
        pieces, text = self._pieces.of(self._model), self._echo.encode()
        known_positions = positions[-(len(self._prompt_ids) - 1) :] if len(self._prompt_ids) > 1 else ()
        first = len(self._prompt_ids) - len(known_positions)
        start = characters = 0
        shown = []
        for index, token_id in enumerate(self._prompt_ids):
            piece = pieces[token_id]
            inside = start < len(text) and _continues(text[start])
            position = known_positions[index - first] if index >= first else None
            shown.append(TokenText(token_id, piece, characters - inside, position))
            length = _length_in(text, start, piece)
            characters += sum(not _continues(byte) for byte in text[start : start + length])
            start += length
        return shown


class _LazyIds:
    """Token ids that are computed when they are iterated."""

    def __init__(self, ids: Callable[[], Iterable[int]]) -> None:
        self._ids = ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids())


def _length_in(text: bytes, start: int, piece: bytes) -> int:
    if text.startswith(piece, start):
        return len(piece)
    # Some tokenizers add a space before every text.
    return len(piece) - 1 if piece.startswith(b" ") and text.startswith(piece[1:], start) else 0


def _continues(byte: int) -> bool:
    """Returns whether a byte is a UTF-8 continuation byte."""
    return byte & 0xC0 == 0x80
