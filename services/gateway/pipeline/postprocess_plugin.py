"""A postprocess stage of the user's own, where the link to a replica stands: same columns in, same events out."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

from services.common.errors import SluiceError, internal
from services.common.packing import unpack_u32
from services.gateway.clients.postprocess_link import Sent, TextEvents
from services.gateway.core.request import Finish, FinishReason, GenerationRequest, TokenizedPrompt
from services.gateway.pipeline.stages import CustomStream, PostprocessStage, TextDelta
from services.gateway.streams.stream import GenerationStream

log = logging.getLogger(__name__)


class _Open:
    """A stream of the stage, whose it is, and the tokens it has seen."""

    __slots__ = ("request_id", "seen", "stream")

    def __init__(self, stream: CustomStream, request_id: str) -> None:
        self.stream = stream
        self.request_id = request_id
        self.seen = 0


class CustomPostprocessAdapter:
    """Stands where the link to a postprocess replica stands."""

    connected = True
    retired = False
    leaving = False
    address = "own stage"

    def __init__(self, stage: PostprocessStage, events: TextEvents) -> None:
        self.streams: dict[int, GenerationStream] = {}
        self._stage = stage
        self._events = events
        self._open: dict[int, _Open] = {}

    @property
    def live(self) -> int:
        """Streams whose text the stage makes."""
        return len(self.streams)

    def adopt(self, stream: GenerationStream) -> None:
        """From now on the stage makes this stream's text."""
        self.streams[stream.slot] = stream

    def release(self, stream: GenerationStream) -> None:
        """The stream's text is made elsewhere, or the stream is over."""
        self.streams.pop(stream.slot, None)

    def open(
        self,
        slot: int,
        request_id: str,
        request: GenerationRequest,
        prompt: TokenizedPrompt,
        trace: Any,
        max_tokens: int,
        tokens: array[int] | None = None,
        sent: Sent | None = None,
    ) -> None:
        """Opens a stream and feeds it the tokens that are there already."""
        opened = self._guarded(slot, request_id, lambda: self._stage.open(request, prompt))
        if opened is None:
            return
        self._open[slot] = _Open(opened, request_id)
        if tokens:
            self._feed(slot, tokens)

    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Gives each stream its tokens."""
        ids, start = unpack_u32(token_ids), 0
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            self._feed(slot, ids[start : start + number])
            start += number

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """The engine is done."""
        opened = self._open.get(slot)
        if opened is None:
            return
        said = self._guarded(slot, opened.request_id, lambda: opened.stream.end(reason, stop_token_id))
        if said is not None:
            self._say(slot, said)
            self._finish(slot, Finish(reason, stop_token_id=stop_token_id, completion_tokens=opened.seen))

    def close_stream(self, slot: int) -> None:
        """Forgets a stream without an answer."""
        self._open.pop(slot, None)

    def abandon(self) -> None:
        """Forgets every stream."""
        self._open.clear()

    def _feed(self, slot: int, token_ids: array[int]) -> None:
        opened = self._open.get(slot)
        if opened is None:
            return
        opened.seen += len(token_ids)
        said = self._guarded(slot, opened.request_id, lambda: opened.stream.feed(token_ids))
        if said is None:
            return
        self._say(slot, said)
        if said.stopped:
            self._finish(slot, Finish(FinishReason.STOP, completion_tokens=opened.seen))

    def _say(self, slot: int, said: TextDelta) -> None:
        stream = self.streams.get(slot)
        if stream is None:
            return
        try:
            if said.reasoning:
                self._events.on_reasoning(stream, said.reasoning)
            if said.text:
                self._events.on_text(stream, said.text)
        except Exception as error:
            self._events.on_broken(stream, error)

    def _finish(self, slot: int, finish: Finish) -> None:
        self._open.pop(slot, None)
        if (stream := self.streams.get(slot)) is not None:
            self._events.on_finished(stream, finish)

    def _guarded(self, slot: int, request_id: str, call: Callable[[], Any]) -> Any:
        """What the stage answers; None, and the stream has failed, when it raises."""
        try:
            return call()
        except SluiceError as error:
            self._fail(slot, error)
        except Exception:
            log.exception("the postprocess stage failed", extra={"request": request_id})
            self._fail(slot, internal("The postprocess stage of this gateway failed; its log has the details."))
        return None

    def _fail(self, slot: int, error: SluiceError) -> None:
        self._open.pop(slot, None)
        if (stream := self.streams.get(slot)) is not None:
            self._events.on_text_failed(stream, error)
