"""What tokens stand for, brought together from three places for a choice that shows it.

The worker tells log-probabilities, postprocess the bytes and places of the chosen tokens, and what other tokens stand
for is asked for the first time each is seen. Whatever the choice hears meanwhile waits, so that the order stays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from services.common.errors import SluiceError, internal
from services.common.tasks import TaskOwner
from services.gateway.apis.openai.logprobs import ShownToken
from services.gateway.clients.token_bytes import TokenPieces
from services.gateway.core.request import Finish, FinishReason, PositionLogprobs

log = logging.getLogger(__name__)


class TokenSink(Protocol):
    """A choice that shows its tokens; the rest is as in Sink."""

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Once, first."""

    def shown(self, tokens: Sequence[ShownToken]) -> None:
        """The next tokens, before their text."""

    def shown_prompt(self, tokens: Sequence[ShownToken]) -> None:
        """The prompt's tokens, before anything else of the answer."""

    def text(self, piece: str) -> None: ...

    def reasoning(self, piece: str) -> None: ...

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None: ...

    def finish(self, finish: Finish) -> None: ...

    def fail(self, error: SluiceError) -> None: ...


class LogprobsAssembler:
    """Stands between a generation and a choice that shows its tokens.

    Args:
        choice: hears everything, in order.
        pieces: what tokens stand for.
        model: whose tokens they are.
        tasks: owns the questions.
        prompt_logprobs: those of the prompt were asked for.
        only_prompt: the client wants to hear of its prompt only; what is generated is kept from it.
    """

    def __init__(
        self,
        choice: TokenSink,
        pieces: TokenPieces,
        model: str,
        tasks: TaskOwner,
        prompt_logprobs: bool = False,
        only_prompt: bool = False,
    ) -> None:
        self._choice = choice
        self._pieces = pieces
        self._model = model
        self._tasks = tasks
        self._prompt_due = prompt_logprobs
        self._only_prompt = only_prompt
        self._positions: deque[PositionLogprobs] = deque()
        self._waiting: deque[tuple[Callable[[], None], Iterable[int]]] = deque()
        self._blocked = True  # until it begins, and while it learns
        self._echo = ""
        self._token_ids: Sequence[int] = ()
        self._prompt_ids: Sequence[int] = ()
        self._shown = 0

    def echo(self, text: str) -> None:
        """The answer begins with the text of its prompt."""
        self._echo = text
        if not self._prompt_due:
            self._pass(lambda: self._choice.text(text))

    def begin(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> None:
        """The generation runs; what it said until now comes out.

        Args:
            token_ids: of the answer, all that came so far; grows while it is read.
        """
        self._token_ids, self._prompt_ids = token_ids, prompt_ids
        self._choice.begin(prompt_ids)
        self._blocked = False
        self._tell_what_can_be_told()

    def forget(self) -> None:
        """The generation never runs: what waits to be said is not."""
        self._waiting.clear()

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
        self._answer(lambda: self._show(rows), alternatives)

    def _show(self, rows: list[tuple[bytes, int, PositionLogprobs | None]]) -> None:
        ids = self._token_ids[self._shown : self._shown + len(rows)]
        self._shown += len(rows)
        before = len(self._echo)
        self._choice.shown(
            [
                ShownToken(token_id, piece, offset + before, position)
                for token_id, (piece, offset, position) in zip(ids, rows, strict=True)
            ]
        )

    def prompt_logprobs(self, positions: Sequence[PositionLogprobs]) -> None:
        """See Sink."""
        alternatives = [other.token_id for position in positions for other in position.top]
        self._say_prompt(positions, alternatives)

    def _say_prompt(self, positions: Sequence[PositionLogprobs], alternatives: Iterable[int]) -> None:
        """The prompt's tokens and, if it is echoed, its text."""
        if not self._prompt_due:
            return
        self._prompt_due = False

        def ids() -> Iterable[int]:
            return chain(self._prompt_ids, alternatives)

        self._pass(lambda: self._choice.shown_prompt(self._prompt_tokens(positions)), _Late(ids))
        if self._echo:
            self._pass(lambda: self._choice.text(self._echo))

    def text(self, piece: str) -> None:
        """See Sink."""
        self._answer(lambda: self._choice.text(piece))

    def reasoning(self, piece: str) -> None:
        """See Sink."""
        self._answer(lambda: self._choice.reasoning(piece))

    def tool_call(self, call: int, call_id: str, name: str, arguments: str) -> None:
        """See Sink."""
        self._answer(lambda: self._choice.tool_call(call, call_id, name, arguments))

    def finish(self, finish: Finish) -> None:
        """See Sink."""
        self._say_prompt((), ())
        if self._only_prompt:
            finish = replace(finish, reason=FinishReason.LENGTH, stop_string="", stop_token_id=None)
        self._pass(lambda: self._choice.finish(finish))

    def fail(self, error: SluiceError) -> None:
        """See Sink."""
        self._pass(lambda: self._choice.fail(error))

    def _answer(self, tell: Callable[[], None], token_ids: Iterable[int] = ()) -> None:
        self._say_prompt((), ())
        if not self._only_prompt:
            self._pass(tell, token_ids)

    def _pass(self, tell: Callable[[], None], token_ids: Iterable[int] = ()) -> None:
        self._waiting.append((tell, token_ids))
        self._tell_what_can_be_told()

    def _tell_what_can_be_told(self) -> None:
        known = self._pieces.of(self._model)
        while self._waiting and not self._blocked:
            tell, token_ids = self._waiting[0]
            unknown = [token_id for token_id in token_ids if token_id not in known]
            if unknown:
                self._blocked = True
                self._tasks.spawn(self._learn(unknown), "token-pieces")
                return
            self._waiting.popleft()
            tell()

    async def _learn(self, token_ids: list[int]) -> None:
        try:
            await self._pieces.learn(self._model, token_ids)
            self._blocked = False
            self._tell_what_can_be_told()
        except SluiceError as error:
            self._fail_now(error)
        except Exception:
            log.exception("tokens could not be shown")
            self._fail_now(internal("Unexpected failure in the gateway; its log has the details."))

    def _fail_now(self, error: SluiceError) -> None:
        self._blocked = True  # nothing may come after a failure
        self._waiting.clear()
        self._choice.fail(error)

    def _prompt_tokens(self, positions: Sequence[PositionLogprobs]) -> list[ShownToken]:
        """The prompt's tokens and where in its text they begin; those that are not in the text have no length.

        The first token follows nothing, so that nothing is known of it, whether the engine says so or not.
        """
        pieces, text = self._pieces.of(self._model), self._echo.encode()
        known = positions[-(len(self._prompt_ids) - 1) :] if len(self._prompt_ids) > 1 else ()
        first = len(self._prompt_ids) - len(known)
        place = characters = 0
        shown = []
        for index, token_id in enumerate(self._prompt_ids):
            piece = pieces[token_id]
            inside = place < len(text) and _continues(text[place])
            position = known[index - first] if index >= first else None
            shown.append(ShownToken(token_id, piece, characters - inside, position))
            length = _length_in(text, place, piece)
            characters += sum(not _continues(byte) for byte in text[place : place + length])
            place += length
        return shown


class _Late:
    """Ids that are known only when they are looked at."""

    def __init__(self, ids: Callable[[], Iterable[int]]) -> None:
        self._ids = ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids())


def _length_in(text: bytes, place: int, piece: bytes) -> int:
    if text.startswith(piece, place):
        return len(piece)
    # Some tokenizers write a space before every text.
    return len(piece) - 1 if piece.startswith(b" ") and text.startswith(piece[1:], place) else 0


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character."""
    return byte & 0xC0 == 0x80
