"""Adapts a custom postprocess stage to the interface of `PostLink`."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.base.errors import SluiceError, internal
from services.common.base.packing import unpack_u32
from services.common.base.sendable_text import sendable
from services.common.base.shared_steps import shared_step
from services.gateway.backends.rpc.postprocess_link import TextEvents
from services.gateway.core.request import Finish, FinishReason
from services.gateway.pipeline.stages import CustomStream, PostprocessStage, TextDelta
from services.gateway.streams.stream import GenerationStream

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenStream:
    """A stream of the custom stage, and the number of tokens it has received."""

    stream: CustomStream
    request_id: str
    token_count: int = 0


class CustomPostprocessAdapter:
    """Runs a custom postprocess stage in place of the link to a postprocess replica."""

    leaving = False

    def __init__(self, stage: PostprocessStage, events: TextEvents) -> None:
        self.streams: dict[int, GenerationStream] = {}
        self._stage = stage
        self._events = events
        self._open: dict[int, _OpenStream] = {}

    def adopt(self, stream: GenerationStream) -> None:
        """Assigns a stream to the stage."""
        self.streams[stream.slot] = stream

    def release(self, stream: GenerationStream) -> None:
        """Removes a stream, which has moved or ended."""
        self.streams.pop(stream.slot, None)

    def open(self, stream: GenerationStream) -> None:
        """Opens a stream and feeds it the tokens generated so far."""
        opened = self._call_stage(
            stream.slot, stream.request_id, lambda: self._stage.open(stream.request, stream.prompt)
        )
        if opened is None:
            return
        self._open[stream.slot] = _OpenStream(opened, stream.request_id)
        if stream.tokens:
            self._feed(stream.slot, stream.tokens)

    @shared_step("gateway.custom_text")
    def feed(self, slots: bytes, counts: bytes, token_ids: bytes) -> None:
        """Feeds token columns to their streams."""
        ids, start = unpack_u32(token_ids), 0
        for slot, number in zip(unpack_u32(slots), unpack_u32(counts), strict=True):
            self._feed(slot, ids[start : start + number])
            start += number

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """Ends a stream after its engine has finished."""
        opened = self._open.get(slot)
        if opened is None:
            return
        delta = self._call_stage(slot, opened.request_id, lambda: _checked(opened.stream.end(reason, stop_token_id)))
        if delta is not None:
            self._emit(slot, delta)
            self._finish(slot, Finish(reason, stop_token_id=stop_token_id, completion_tokens=opened.token_count))

    def close_stream(self, slot: int) -> None:
        """Closes a stream without emitting events."""
        self._open.pop(slot, None)

    def _feed(self, slot: int, token_ids: array[int]) -> None:
        opened = self._open.get(slot)
        if opened is None:
            return
        opened.token_count += len(token_ids)
        delta = self._call_stage(slot, opened.request_id, lambda: _checked(opened.stream.feed(token_ids)))
        if delta is None:
            return
        self._emit(slot, delta)
        if delta.stopped:
            self._finish(slot, Finish(FinishReason.STOP, completion_tokens=opened.token_count))

    def _emit(self, slot: int, delta: TextDelta) -> None:
        stream = self.streams.get(slot)
        if stream is None:
            return
        try:
            if delta.reasoning:
                self._events.on_reasoning(stream, delta.reasoning)
            if delta.text:
                self._events.on_text(stream, delta.text)
        except Exception as error:
            self._events.on_broken(stream, error)

    def _finish(self, slot: int, finish: Finish) -> None:
        self._open.pop(slot, None)
        if (stream := self.streams.get(slot)) is not None:
            self._events.on_finished(stream, finish)

    def _call_stage(self, slot: int, request_id: str, call: Callable[[], Any]) -> Any:
        """Returns the result of the stage; if it raises, fails the stream and returns None."""
        try:
            return call()
        except SluiceError as error:
            self._fail(slot, error)
        except Exception:
            log.exception("custom postprocess stage failed", extra={"request": request_id})
            self._fail(
                slot, internal("The postprocess stage of this gateway failed; see the gateway's log for details.")
            )
        return None

    def _fail(self, slot: int, error: SluiceError) -> None:
        self._open.pop(slot, None)
        if (stream := self.streams.get(slot)) is not None:
            self._events.on_text_failed(stream, error)


def _checked(delta: TextDelta) -> TextDelta:
    """Returns what a stage has produced, with sendable texts; raises TypeError or AttributeError for anything else."""
    if not isinstance(delta.text, str) or not isinstance(delta.reasoning, str):
        raise TypeError(f"{type(delta).__name__} has texts of the wrong type")
    return TextDelta(sendable(delta.text), sendable(delta.reasoning), bool(delta.stopped))
