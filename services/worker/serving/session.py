"""A session of one caller: concurrent requests, identified by slot, that share one outbox."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.common.base.errors import SluiceError, internal, invalid
from services.common.base.shared_steps import shared_step
from services.worker.contract.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    MediaItem,
    MediaSpan,
    PositionLogprobs,
    Usage,
)
from services.worker.contract.text_delta import TextUpdate
from services.worker.generation.response_sink import BEGUN, ContractViolation, ResponseSink
from services.worker.media.uploads import IncomingMedia, MediaPart
from services.worker.serving.outbox import PAGE_TOKENS, Outbox
from services.worker.serving.worker import Worker

log = logging.getLogger(__name__)


class SessionResponseSink(ResponseSink):
    """A sink that adds rows to the session's outbox."""

    def __init__(self, slot: int, outbox: Outbox, on_close: Callable[[int], None]) -> None:
        super().__init__()
        self.slot = slot
        self.detached = False
        self._outbox = outbox
        self._on_close = on_close

    def deliver_first(self, cached_tokens: int | None, prompt_logprobs: Sequence[PositionLogprobs]) -> None:
        self._deliver(
            Delta(
                cached_tokens=cached_tokens or 0,
                cached_later=cached_tokens is None,
                prompt_logprobs=prompt_logprobs,
                prompt_token_ids=self.prepared_prompt,
            )
        )

    @shared_step("worker.columns")
    def push(self, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()) -> None:
        try:
            count = len(token_ids)
            plain = count == 1 and not logprobs and not self._traced
            # Hot path, run for every token: a single plain token is checked here, every other push in `admits`.
            if not (plain and self._state == BEGUN and 0 <= token_ids[0] < self._vocab_size) and not self.admits(
                token_ids, logprobs
            ):
                return
            outbox = self._outbox
            page = outbox.page
            # First what may raise: a row is added whole or not at all, because all requests share the columns.
            if count == 1:
                page.token_ids.append(token_ids[0])
            else:
                page.token_ids += array("I", token_ids)
        except ContractViolation:
            raise
        except Exception:
            self.undeliverable()
            return
        if plain and page.slots and page.slots[-1] == self.slot:
            page.counts[-1] += 1
        else:
            page.slots.append(self.slot)
            page.counts.append(count)
        self.delivered += count
        if logprobs:
            page.extras.append((self.slot, Delta(logprobs=logprobs)))
        if not outbox.woken or len(page.token_ids) >= PAGE_TOKENS:
            outbox.ready()

    def deliver_text(self, text: TextUpdate) -> None:
        if self.detached:
            return
        texts = self._outbox.page.texts
        if (pending := texts.get(self.slot)) is None:
            texts[self.slot] = text
        else:
            pending.add(text)
        self._outbox.ready()

    def deliver_terminal(self, delta: Delta) -> None:
        self._on_close(self.slot)
        self._deliver(delta)

    def _deliver(self, delta: Delta) -> None:
        if not self.detached:
            self._outbox.page.extras.append((self.slot, delta))
            self._outbox.ready()


class WorkerSession:
    """Runs the requests of one session.

    Args:
        wake: called when `take` has a message.
        on_overflow: called when the caller does not read; must end the session.

    Attributes:
        take: returns the next message to send; None when there is none.
    """

    def __init__(self, worker: Worker, wake: Callable[[], None], on_overflow: Callable[[], None]) -> None:
        self._worker = worker
        self._outbox = Outbox(wake, on_overflow)
        self.take = self._outbox.take
        self._open: dict[int, SessionResponseSink] = {}
        self._pins: dict[int, list[bytes]] = {}
        self._uploads = IncomingMedia(worker.media, worker.max_media_bytes, self._report_drop)

    async def flush(self) -> None:
        """Returns when all pending output has been sent; the caller sets the deadline."""
        await self._outbox.flush()

    def receive(self, part: MediaPart) -> None:
        """Adds a part of a media file; ignored if the engine takes no media."""
        if self._worker.takes_media:
            self._uploads.receive(part)

    def find_media(self, spans: Sequence[MediaSpan]) -> tuple[MediaItem, ...]:
        """Returns the media items of a prompt with their files.

        Raises:
            SluiceError: the engine does not take them, or the worker does not have a file.
        """
        self._worker.require_media(spans)
        return self._uploads.items(spans)

    def start(self, slot: int, request: GenerateRequest, trace: Mapping[str, str] | None = None) -> None:
        """Starts a request in a slot; an error ends that slot only."""
        if slot in self._open:
            self._end_ambiguous(slot)
            return
        sink = SessionResponseSink(slot, self._outbox, self._close_slot)
        self._open[slot] = sink
        if request.media:
            self._pins[slot] = [item.file.hash for item in request.media]
            self._worker.media.pin(self._pins[slot])
        try:
            self._worker.submit(request, sink, trace)
        except SluiceError as error:
            self._close_slot(slot)
            self.refuse(slot, error)

    def break_off(self, slot: int) -> SluiceError:
        """Ends a slot whose output cannot be sent.

        Returns:
            The error to send in place of the output; the request's own end is not sent.
        """
        error = internal("The engine returned output that cannot be sent; see the worker's log.")
        if (sink := self._open.get(slot)) is not None:
            sink.detached = True
            self._worker.fail(sink, error)
        return error

    def refuse(self, slot: int, error: SluiceError) -> None:
        """Ends a slot whose request never started."""
        self._outbox.page.extras.append((slot, Delta(finish_reason=FinishReason.ERROR, usage=Usage(), error=error)))
        self._outbox.ready()

    def cancel(self, slots: Iterable[int]) -> None:
        """Cancels requests; unknown and ended slots are ignored."""
        for slot in slots:
            if sink := self._open.get(slot):
                self._worker.cancel(sink)

    def close(self) -> None:
        """Cancels all requests without output, because the caller has disconnected."""
        for sink in tuple(self._open.values()):
            sink.detached = True
            self._worker.cancel(sink)
        self._open.clear()
        self._uploads.close()

    def _end_ambiguous(self, slot: int) -> None:
        """Ends both requests of a slot with one error, because the caller cannot distinguish their output."""
        error = invalid(f"Slot {slot} is in use; wait for its terminal delta before using it again.", param="slot")
        self._worker.fail(self._open[slot], error)

    def _close_slot(self, slot: int) -> None:
        self._open.pop(slot, None)
        if pins := self._pins.pop(slot, None):
            self._worker.media.unpin(pins)

    def _report_drop(self, content: bytes) -> None:
        self._outbox.page.dropped_media += content
        self._outbox.ready()


async def wait_flushed(sessions: Iterable[WorkerSession], timeout_s: float) -> None:
    """Waits at most `timeout_s` seconds for the sessions to send their pending output."""
    try:
        async with asyncio.timeout(timeout_s):
            for session in sessions:
                await session.flush()
    except TimeoutError:
        log.warning("a caller did not read its last tokens in time", extra={"seconds": timeout_s})
