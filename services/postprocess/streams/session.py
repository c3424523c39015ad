"""Sessions, which multiplex many streams: columns of tokens in, columns of text out."""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from services.common.base.errors import ErrorKind, SluiceError, internal, invalid, overloaded, unavailable
from services.common.base.shared_steps import shared_step
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.events import Content, Degraded, Event
from services.postprocess.parsers.remote import RemoteStream
from services.postprocess.streams.factory import INLINE_TOKENS, AnyParsed, AnyStream, StreamFactory, parsing
from services.postprocess.streams.output_batch import Batch, OutputBatch
from services.postprocess.streams.parsed import ParsedStream
from services.postprocess.streams.parser_selection import ParserSelection
from services.postprocess.streams.pending import PendingStream, PendingStreams
from services.postprocess.streams.resume import Remainder, Resume, mismatch
from services.postprocess.streams.slots import Slots, one_row_each
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one session.

    Attributes:
        stream: limits of each of its streams.
        max_streams: open streams.
        max_message_tokens: tokens of one message.
        max_row_tokens: tokens of one stream in a message; a row is converted without a pause for other streams.
        max_waiting_tokens: tokens buffered for a stream while its model is loading.
        max_backlog: tokens and results buffered while the caller does not read.
    """

    stream: Limits = field(default_factory=Limits)
    max_streams: int = 16_384
    max_message_tokens: int = 1 << 20
    max_row_tokens: int = 1 << 16
    max_waiting_tokens: int = 1 << 16
    max_backlog: int = 1 << 20


class PostSession:
    """Streams of one caller.

    Runs on the event loop without waiting, except for models and parsers that are loading.

    Args:
        library: vocabularies of the models.
        limits: bounds of requests.
        wake: called when `drain` has output.
        on_death: called if a background task of the session fails.
        stream_factory: creates streams.
    """

    def __init__(
        self,
        library: VocabularyRegistry,
        limits: SessionLimits,
        metrics: Metrics,
        wake: Callable[[], None],
        on_death: Callable[[str, BaseException], None] | None = None,
        stream_factory: StreamFactory | None = None,
    ) -> None:
        self._library = library
        self._limits = limits
        self._metrics = metrics
        self._wake = wake
        self._streams: dict[int, Stream] = {}
        self._parsed: dict[int, AnyParsed] = {}
        self._stream_factory = stream_factory or StreamFactory(limits.stream)
        self._parsed_progress = asyncio.Event()
        self._pending = PendingStreams(
            library, self._stream_factory, limits.max_waiting_tokens, self._begun, self._not_begun, on_death
        )
        self._slots = Slots(metrics)
        self._remainders: dict[int, Remainder] = {}  # of resumed streams with a parser
        self._output = OutputBatch()
        self._backlog = 0
        self._draining = False
        self.drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams) + len(self._parsed) + len(self._pending)

    def open(
        self,
        slot: int,
        request_id: str,
        options: StreamOptions,
        parent: Mapping[str, str],
        resume: Resume | None = None,
    ) -> None:
        """Opens or resumes a stream; an invalid one finishes with an error in its slot.

        Opening a slot in use ends both streams, because the caller could not tell their texts apart.
        """
        self._add_backlog(1 + (len(resume.token_ids) if resume is not None else 0))
        try:
            self._admit(slot)
            vocabulary = self._library.ready(options.model)
            identity = request_id or secrets.token_hex(12)
            plan = None if vocabulary is None else self._stream_factory.plan(options, vocabulary, identity)
            long = resume is not None and len(resume.token_ids) > INLINE_TOKENS
            if vocabulary is None or plan is None or not self._stream_factory.ready(plan) or long:
                self._pending.add(slot, PendingStream(options, identity, resume))
                self._slots.take(slot, request_id, options.model, parent)
            else:
                stream = self._stream_factory.begin(options, vocabulary, plan)
                self._slots.take(slot, request_id, options.model, parent)
                text = stream.feed(resume.token_ids) if resume is not None else None
                self._join(slot, stream, plan, resume, text or "")
        except Exception as error:
            self.fail(slot, error)

    def _admit(self, slot: int) -> None:
        if slot in self._streams or slot in self._parsed or slot in self._pending:
            raise invalid(
                f"Slot {slot} is in use; close it first or use another one.", param="slot", code="slot_in_use"
            )
        if self._draining:
            raise unavailable("This replica is shutting down; use another one.", code="draining")
        if len(self) >= self._limits.max_streams:
            raise overloaded(f"The session has {len(self)} streams, which is its limit; open another session.")

    def _join(self, slot: int, stream: AnyStream, plan: ParserSelection, resume: Resume | None, text: str) -> None:
        """Adds a started stream; of a resumed one, sends the output that the caller lacks.

        Args:
            text: text so far of a resumed plain stream.
        """
        if stream.recorder is not None:
            stream.recorder.known = resume.tokens_sent if resume is not None else 0
            self._output.add_recorder(slot, stream.recorder)
        if plan.degraded:
            self._degraded(slot, plan.degraded)
        remainder = None if resume is None else Remainder(resume)
        if not isinstance(stream, Stream):
            self._parsed[slot] = stream
            if remainder is not None:
                self._remainders[slot] = remainder
            if isinstance(stream, RemoteStream):
                stream.changed = partial(self._remote_changed, slot, stream)
            self._parsed_changed(slot, stream)
            return
        self._streams[slot] = stream
        if remainder is not None:
            self._output.add_text(slot, remainder.text(text))
            if remainder.text_left:
                raise mismatch()
            if stream.finish is not None:
                self._finished(slot, stream.finish)

    def refuse(self, slot: int, error: SluiceError) -> None:
        """Finishes the stream in a slot with an error."""
        stream = self._streams.get(slot) or self._parsed.get(slot)
        self._finished(slot, Finish(FinishReason.ERROR, stream.tokens_seen if stream else 0, error=error))

    def fail(self, slot: int, error: Exception) -> None:
        """Finishes the stream in a slot with what processing it has raised."""
        if not isinstance(error, SluiceError):
            log.error("processing a stream failed", extra={"slot": slot}, exc_info=error)
            error = internal("The text of this stream cannot be produced; see the log of postprocess.")
        self.refuse(slot, error)

    def _begun(self, slot: int, pending: PendingStream, stream: AnyStream, plan: ParserSelection, text: str) -> None:
        """Adds a stream that was pending, and processes its buffered input."""
        try:
            self._join(slot, stream, plan, pending.resume, text)
            self._feed_any(slot, pending.tokens)
            if pending.end is not None:
                self.end(slot, *pending.end)
        except Exception as error:
            self.fail(slot, error)
        self._wake()

    def _not_begun(self, slot: int, error: SluiceError) -> None:
        self.refuse(slot, error)
        self._wake()

    @shared_step("postprocess.feed")
    def feed(self, slots: array[int], counts: array[int], tokens: array[int]) -> None:
        """Processes token columns: row i has the next `counts[i]` tokens of `slots[i]`.

        Raises:
            SluiceError: INVALID_ARGUMENT for inconsistent columns, TOO_LARGE for too many tokens, OVERLOADED if the
                caller does not read its output. The session must end then.
        """
        if len(slots) != len(counts) or sum(counts) != len(tokens):
            raise invalid(
                "The columns slots, counts and token_ids are inconsistent; send one count per slot and all tokens.",
                param="tokens",
            )
        if len(tokens) > self._limits.max_message_tokens:
            raise SluiceError(
                ErrorKind.TOO_LARGE,
                f"{len(tokens)} tokens in one message are too many; send at most {self._limits.max_message_tokens}.",
                param="tokens.token_ids",
            )
        self._add_backlog(len(tokens))
        self._metrics.took(len(tokens))
        streams, parsed_streams, texts = self._streams, self._parsed, self._output.texts
        end, most = 0, self._limits.max_row_tokens
        if len(set(slots)) < len(slots) and len(tokens) <= most:
            slots, counts, tokens = one_row_each(slots, counts, tokens)
        for slot, count in zip(slots, counts, strict=True):
            start, end = end, end + count
            try:
                stream = streams.get(slot)
                if count > most and slot in self._slots.live:
                    message = f"{count} tokens of one stream in one message are too many; send at most {most}."
                    self.refuse(slot, SluiceError(ErrorKind.TOO_LARGE, message, param="tokens.counts"))
                    continue
                if stream is None:
                    parsed = parsed_streams.get(slot)
                    if type(parsed) is ParsedStream:
                        self._feed_parsed(slot, parsed, tokens[start:end])
                    else:
                        self._feed_any(slot, tokens[start:end])
                    continue
                text = stream.feed_one(tokens[start]) if count == 1 else stream.feed(tokens[start:end])
                if text:
                    texts[slot] = texts.get(slot, "") + text
                if stream.finish is not None:
                    self._finished(slot, stream.finish)
            except Exception as error:
                self.fail(slot, error)

    def _feed_parsed(self, slot: int, stream: ParsedStream, tokens: array[int]) -> None:
        """Feeds a row; content without markup goes to the text column unless an event precedes it."""
        if (found := stream.feed_plain(tokens)) is None:
            stream.parse(tokens)
            self._parsed_changed(slot, stream)
            return
        kind, text = found
        if kind is Content and not self._remainders and not self._output.has_events(slot):
            self._output.add_text(slot, text)
            return
        events: list[Event] = [kind(text)]
        if self._remainders and (remainder := self._remainders.get(slot)) is not None:
            events = remainder.events(events)
        if events:
            self._output.add_events(slot, events)

    def _feed_any(self, slot: int, tokens: array[int]) -> None:
        if (parsed := self._parsed.get(slot)) is not None:
            parsed.feed(tokens)
            self._parsed_changed(slot, parsed)
        elif (stream := self._streams.get(slot)) is not None:
            self._output.add_text(slot, stream.feed(tokens))
            if stream.finish is not None:
                self._finished(slot, stream.finish)
        else:
            try:
                if slot in self._pending:
                    self._pending.hold(slot, tokens)
                elif tokens:
                    self._slots.check_late(slot)
            except SluiceError as error:
                self.refuse(slot, error)

    def _remote_changed(self, slot: int, stream: RemoteStream) -> None:
        try:
            self._parsed_changed(slot, stream)
        except Exception as error:
            self.fail(slot, error)
        self._parsed_progress.set()
        self._wake()

    def _parsed_changed(self, slot: int, stream: AnyParsed) -> None:
        if stream.events:
            events = stream.take_events()
            if self._remainders and (remainder := self._remainders.get(slot)) is not None:
                events = remainder.events(events)
            for event in events:
                if isinstance(event, Degraded):
                    self._metrics.degraded(event.reason)
            if events:
                self._output.add_events(slot, events)
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def _degraded(self, slot: int, reason: str) -> None:
        self._metrics.degraded(reason)
        self._output.add_events(slot, [Degraded(reason)])

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """Ends a stream as the engine did; ignores slots whose stream has ended."""
        try:
            self._end(slot, reason, stop_token_id)
        except Exception as error:
            self.fail(slot, error)

    def _end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        if slot in self._pending:
            self._pending.end(slot, reason, stop_token_id)
        if (parsed := self._parsed.get(slot)) is not None:
            parsed.end(reason, stop_token_id)
            self._parsed_changed(slot, parsed)
        stream = self._streams.get(slot)
        if stream is None:
            return
        self._output.add_text(slot, stream.end(reason, stop_token_id))
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def lags(self, slot: int) -> bool:
        """Returns whether the output of a stream is delayed: it is pending, or its parser is in another process."""
        return slot in self._pending or isinstance(self._parsed.get(slot), RemoteStream)

    def behind(self, slot: int) -> bool:
        """Returns whether output for received tokens is outstanding."""
        parsed = self._parsed.get(slot)
        return slot in self._pending or (isinstance(parsed, RemoteStream) and parsed.behind)

    def close(self, slots: Iterable[int]) -> None:
        """Closes streams without a finish; ignores unknown slots."""
        closed = set(slots)
        for slot in closed:
            self._forget(slot)
        if closed:
            self._output.forget(closed)

    def _finished(self, slot: int, finish: Finish) -> None:
        if finish.error is not None:
            self._slots.fail(slot, finish.error.message)
        self._output.release(slot)
        self._forget(slot)
        self._output.finish(slot, finish)
        self._metrics.finished(finish)

    def _forget(self, slot: int) -> None:
        if (parsed := self._parsed.pop(slot, None)) is not None:
            parsed.close()
            self._remainders.pop(slot, None)
        self._streams.pop(slot, None)
        self._pending.forget(slot)
        self._slots.free(slot)

    def _add_backlog(self, amount: int) -> None:
        self._backlog += amount
        if self._backlog > self._limits.max_backlog + self._limits.max_message_tokens:
            raise overloaded("The caller does not read its output; read the session's messages.")

    def drain(self) -> Batch | None:
        """Returns the output that is ready, None if there is none; call it once all earlier output has been written."""
        self._backlog = 0
        batch = self._output.take(self.fail)
        if batch is None and self._draining and not len(self):
            self.drained.set()
        return batch

    def leave(self) -> None:
        """Announces that this replica leaves; streams continue and can still be opened."""
        self._output.leave()
        self._wake()

    def start_draining(self) -> None:
        """Rejects new streams; `drained` is set when the last one has finished."""
        self._draining = True
        self._wake()

    async def settle(self) -> None:
        """Waits until no stream is pending and the parsers of all ended streams have finished."""
        await self._pending.settled()
        while parsing(self._parsed.values()):
            await self._parsed_progress.wait()
            self._parsed_progress.clear()

    async def aclose(self) -> None:
        """Closes all streams after the caller disconnected."""
        await self._pending.aclose()
        self.close(self._slots.live)
