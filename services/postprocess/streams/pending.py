"""Streams of a session that cannot begin yet: their model, their parser or their own past is still being loaded."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from services.common.errors import SluiceError, internal, overloaded
from services.common.tasks import TaskOwner
from services.postprocess.detokenize.stream import FinishReason, StreamOptions
from services.postprocess.streams.factory import INLINE_TOKENS, AnyStream, StreamFactory, fed
from services.postprocess.streams.parser_selection import ParserSelection
from services.postprocess.streams.resume import Resume
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry

log = logging.getLogger(__name__)


@dataclass
class PendingStream:
    """One of them, with what came for it meanwhile.

    Attributes:
        identity: ids of its tool calls are made of it.
        resume: what another replica was given.
        tokens: that came since it was opened.
        end: how the engine has ended it.
    """

    options: StreamOptions
    identity: str
    resume: Resume | None
    tokens: array[int] = field(default_factory=lambda: array("I"))
    end: tuple[FinishReason, int | None] | None = None

    @property
    def long(self) -> bool:
        """So many tokens of it came elsewhere that giving it those takes a while."""
        return self.resume is not None and len(self.resume.token_ids) > INLINE_TOKENS


Begun = Callable[[int, PendingStream, AnyStream, ParserSelection, str], None]


class PendingStreams:
    """Those of one session, by slot.

    Args:
        library: the models.
        opener: begins streams.
        max_tokens: that one stream may hold.
        begun: called with a stream that has begun, and with the text that its past gave. It may raise.
        refused: called with the error of one that cannot begin.
        on_death: a background task failed.
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
        self._settling: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, slot: int) -> bool:
        return slot in self._streams

    def add(self, slot: int, stream: PendingStream) -> None:
        """Begins the stream as soon as that is possible."""
        self._streams[slot] = stream
        settling = self._tasks.spawn(self._settle(slot, stream), f"postprocess stream {slot}")
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    def hold(self, slot: int, tokens: array[int]) -> None:
        """Keeps tokens; SluiceError(OVERLOADED) when they are too many."""
        stream = self._streams[slot]
        if len(stream.tokens) + len(tokens) > self._max_tokens:
            raise overloaded(f"Model {stream.options.model} is still loading; too many tokens wait.")
        stream.tokens.extend(tokens)

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """The engine has ended the stream."""
        self._streams[slot].end = (reason, stop_token_id)

    def forget(self, slot: int) -> None:
        """Nobody wants to hear of it any more; unknown slots are ignored."""
        self._streams.pop(slot, None)

    async def _settle(self, slot: int, waiting: PendingStream) -> None:
        """Begins the stream, or refuses it: whatever is wrong with one of them must not end the service."""
        try:
            stream, plan, text = await self._made(waiting)
        except Exception as error:
            if self._streams.get(slot) is waiting:
                self._refused(slot, _told(error, waiting))
            return
        if self._streams.get(slot) is not waiting:
            stream.close()
            return
        del self._streams[slot]
        try:
            self._begun(slot, waiting, stream, plan, text)
        except Exception as error:
            stream.close()
            self._refused(slot, _told(error, waiting))

    async def _made(self, waiting: PendingStream) -> tuple[AnyStream, ParserSelection, str]:
        """The stream, and the text that its past gave."""
        vocabulary = await self._library.get(waiting.options.model)
        plan = self._stream_factory.plan(waiting.options, vocabulary, waiting.identity)
        await self._stream_factory.prepare(plan)
        stream = self._stream_factory.begin(waiting.options, vocabulary, plan)
        try:
            text = await fed(stream, waiting.resume.token_ids if waiting.resume is not None else ())
        except BaseException:
            stream.close()
            raise
        return stream, plan, text

    async def settled(self) -> None:
        """Waits until none waits any more."""
        while self._settling:
            await asyncio.wait(self._settling)

    async def aclose(self) -> None:
        """Forgets all of them."""
        await self._tasks.close()
        self._streams.clear()


def _told(error: Exception, waiting: PendingStream) -> SluiceError:
    """What the caller hears; the log hears the rest."""
    if isinstance(error, SluiceError):
        return error
    log.error("a stream cannot begin", extra={"model": waiting.options.model}, exc_info=error)
    return internal("The stream cannot begin; the log of this service says why.")
