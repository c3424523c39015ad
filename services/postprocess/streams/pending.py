"""Streams of a session that cannot start yet: their model or parser is loading, or they replay many tokens."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.base.errors import SluiceError, internal, overloaded
from services.common.base.tasks import TaskOwner
from services.postprocess.detokenize.stream import FinishReason, StreamOptions
from services.postprocess.streams.factory import AnyStream, StreamFactory, fed
from services.postprocess.streams.parser_selection import ParserSelection
from services.postprocess.streams.resume import Resume
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry

log = logging.getLogger(__name__)


@dataclass
class PendingStream:
    """A stream that waits to start, with its buffered input.

    Attributes:
        identity: ids of its tool calls derive from it.
        resume: progress on another replica, for a resumed stream.
        tokens: received since it was opened.
        end: finish reason and stop token id of the engine, if it has ended.
    """

    options: StreamOptions
    identity: str
    resume: Resume | None
    tokens: array[int] = field(default_factory=lambda: array("I"))
    end: tuple[FinishReason, int | None] | None = None


Begun = Callable[[int, PendingStream, AnyStream, ParserSelection, str], None]


class PendingStreams:
    """Pending streams of one session by slot.

    Args:
        library: vocabularies of the models.
        stream_factory: creates streams.
        max_tokens: maximum tokens buffered per stream.
        begun: called with a started stream and the text of its replayed tokens; may raise.
        refused: called with the error of a stream that cannot start.
        on_death: called if a background task fails.
    """

    def __init__(
        self,
        library: VocabularyRegistry,
        stream_factory: StreamFactory,
        max_tokens: int,
        begun: Begun,
        refused: Callable[[int, SluiceError], None],
        on_death: Callable[[str, BaseException], None] | None,
    ) -> None:
        self._library = library
        self._stream_factory = stream_factory
        self._max_tokens = max_tokens
        self._begun = begun
        self._refused = refused
        self._tasks = TaskOwner(on_death)
        self._streams: dict[int, PendingStream] = {}
        self._starting: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, slot: int) -> bool:
        return slot in self._streams

    def add(self, slot: int, stream: PendingStream) -> None:
        """Starts a stream as soon as possible."""
        self._streams[slot] = stream
        starting = self._tasks.spawn(self._start(slot, stream), f"postprocess stream {slot}")
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    def hold(self, slot: int, tokens: array[int]) -> None:
        """Buffers tokens; raises SluiceError (OVERLOADED) beyond the limit."""
        stream = self._streams[slot]
        if len(stream.tokens) + len(tokens) > self._max_tokens:
            raise overloaded(
                f"Model {stream.options.model} is still loading and too many tokens are buffered; retry later."
            )
        stream.tokens.extend(tokens)

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """Records that the engine has ended the stream."""
        self._streams[slot].end = (reason, stop_token_id)

    def forget(self, slot: int) -> None:
        """Drops a closed stream; ignores unknown slots."""
        self._streams.pop(slot, None)

    async def _start(self, slot: int, pending: PendingStream) -> None:
        """Starts or refuses a stream; no error of a stream may end the service."""
        try:
            stream, plan, text = await self._create(pending)
        except Exception as error:
            if self._streams.get(slot) is pending:
                self._refused(slot, _public_error(error, pending))
            return
        if self._streams.get(slot) is not pending:
            stream.close()
            return
        del self._streams[slot]
        try:
            self._begun(slot, pending, stream, plan, text)
        except Exception as error:
            stream.close()
            self._refused(slot, _public_error(error, pending))

    async def _create(self, pending: PendingStream) -> tuple[AnyStream, ParserSelection, str]:
        """Returns the stream, and the text of its replayed tokens."""
        vocabulary = await self._library.get(pending.options.model)
        plan = self._stream_factory.plan(pending.options, vocabulary, pending.identity)
        await self._stream_factory.prepare(plan)
        stream = self._stream_factory.begin(pending.options, vocabulary, plan)
        try:
            text = await fed(stream, pending.resume.token_ids if pending.resume is not None else ())
        except BaseException:
            stream.close()
            raise
        return stream, plan, text

    async def settled(self) -> None:
        """Waits until every stream has started or was refused."""
        while self._starting:
            await asyncio.wait(self._starting)

    async def aclose(self) -> None:
        """Drops all streams."""
        await self._tasks.close()
        self._streams.clear()


def _public_error(error: Exception, pending: PendingStream) -> SluiceError:
    """Returns the error for the caller; logs the details of an unexpected one."""
    if isinstance(error, SluiceError):
        return error
    log.error("cannot start a stream", extra={"model": pending.options.model}, exc_info=error)
    return internal("The stream cannot start; see the log of postprocess.")
