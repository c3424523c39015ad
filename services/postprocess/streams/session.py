"""Many streams on one session: columns of tokens in, columns of text out."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from services.common.errors import ErrorKind, SluiceError, invalid, overloaded, unavailable
from services.postprocess.detokenize.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.metrics import Metrics
from services.postprocess.parsers.events import Degraded
from services.postprocess.parsers.isolated.remote import RemoteStream
from services.postprocess.streams.factory import AnyParsed, AnyStream, StreamFactory, waiting
from services.postprocess.streams.output_batch import Batch, OutputBatch
from services.postprocess.streams.parser_selection import ParserSelection
from services.postprocess.streams.pending import PendingStream, PendingStreams
from services.postprocess.streams.resume import Remainder, Resume, mismatch
from services.postprocess.streams.slots import Slots
from services.postprocess.streams.vocabulary_registry import VocabularyRegistry


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; see the settings of the same names."""

    stream: Limits = field(default_factory=Limits)
    max_streams: int = 16_384
    max_message_tokens: int = 1 << 20
    max_row_tokens: int = 1 << 16
    max_waiting_tokens: int = 1 << 16
    max_backlog: int = 1 << 20


class PostSession:
    """The streams of one caller.

    Everything here runs on the event loop and nothing waits, except for models that are still loading.

    Args:
        library: the models.
        limits: what the caller may ask for.
        metrics: where to count.
        wake: says that `drain` has something.
        on_death: a background task of the session failed.
        opener: begins streams.
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
        self._parsed_news = asyncio.Event()
        self._waiting = PendingStreams(
            library, self._stream_factory, limits.max_waiting_tokens, self._begun, self._not_begun, on_death
        )
        self._slots = Slots(metrics)
        self._remainders: dict[int, Remainder] = {}  # of resumed streams with a parser
        self._answers = OutputBatch()
        self._backlog = 0
        self._draining = False
        self.drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams) + len(self._parsed) + len(self._waiting)

    def open(
        self,
        slot: int,
        request_id: str,
        options: StreamOptions,
        parent: Mapping[str, str],
        resume: Resume | None = None,
    ) -> None:
        """Begins a stream, or goes on with one that began elsewhere; one that cannot be is answered with an error in
        its slot.

        A slot in use ends both streams: the caller could not tell their texts apart.
        """
        self._took(1 + (len(resume.token_ids) if resume is not None else 0))
        try:
            self._admit(slot)
            vocabulary = self._library.ready(options.model)
            waiting = PendingStream(options, request_id or secrets.token_hex(12), resume)
            plan = None if vocabulary is None else self._stream_factory.plan(options, vocabulary, waiting.identity)
            if vocabulary is None or plan is None or not self._stream_factory.ready(plan) or waiting.long:
                self._waiting.add(slot, waiting)
                self._slots.take(slot, request_id, options.model, parent)
            else:
                stream = self._stream_factory.begin(options, vocabulary, plan)
                self._slots.take(slot, request_id, options.model, parent)
                text = stream.feed(resume.token_ids) if resume is not None else None
                self._join(slot, stream, plan, resume, text or "")
        except SluiceError as error:
            self.refuse(slot, error)

    def _admit(self, slot: int) -> None:
        if slot in self._streams or slot in self._parsed or slot in self._waiting:
            raise invalid(f"Slot {slot} is in use.", param="slot", code="slot_in_use")
        if self._draining:
            raise unavailable("This replica is shutting down.", code="draining")
        if len(self) >= self._limits.max_streams:
            raise overloaded(f"The session has {len(self)} streams, which is its limit.")

    def _join(self, slot: int, stream: AnyStream, plan: ParserSelection, resume: Resume | None, text: str) -> None:
        """A stream takes part; what a resumed one said so far goes out as far as its caller has not got it.

        Args:
            text: what a plain one said so far.
        """
        if stream.recorder is not None:
            stream.recorder.known = resume.tokens_sent if resume is not None else 0
            self._answers.watch(slot, stream.recorder)
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
            self._answers.say(slot, remainder.text(text))
            if remainder.text_left:
                raise mismatch()
            if stream.finish is not None:
                self._finished(slot, stream.finish)

    def refuse(self, slot: int, error: SluiceError) -> None:
        """Answers a stream with an error; a live one in the slot ends with it."""
        stream = self._streams.get(slot) or self._parsed.get(slot)
        self._finished(slot, Finish(FinishReason.ERROR, stream.tokens_seen if stream else 0, error=error))

    def _begun(self, slot: int, waiting: PendingStream, stream: AnyStream, plan: ParserSelection, text: str) -> None:
        """A stream that waited takes part, and gets what came meanwhile."""
        try:
            self._join(slot, stream, plan, waiting.resume, text)
            self._feed_any(slot, waiting.tokens)
            if waiting.end is not None:
                self.end(slot, *waiting.end)
        except SluiceError as error:
            self.refuse(slot, error)
        self._wake()

    def _not_begun(self, slot: int, error: SluiceError) -> None:
        self.refuse(slot, error)
        self._wake()

    def feed(self, slots: array[int], counts: array[int], tokens: array[int]) -> None:
        """Applies token columns: row i is the next `counts[i]` tokens of `slots[i]`.

        Raises:
            SluiceError: INVALID_ARGUMENT when the columns do not fit together, TOO_LARGE for too many tokens at once,
                OVERLOADED when the caller does not read its answers. The session is of no use after that.
        """
        if len(slots) != len(counts) or sum(counts) != len(tokens):
            raise invalid("The columns slots, counts and token_ids do not fit together.", param="tokens")
        if len(tokens) > self._limits.max_message_tokens:
            raise SluiceError(
                ErrorKind.TOO_LARGE, f"{len(tokens)} tokens in one message are too many.", param="tokens.token_ids"
            )
        self._took(len(tokens))
        self._metrics.took(len(tokens))
        streams, texts = self._streams, self._answers.texts
        end, most = 0, self._limits.max_row_tokens
        for slot, count in zip(slots, counts, strict=True):
            start, end = end, end + count
            stream = streams.get(slot)
            if count > most and slot in self._slots.live:
                self.refuse(slot, _too_many(count, most))
                continue
            if stream is None:
                self._feed_any(slot, tokens[start:end])
                continue
            text = stream.feed_one(tokens[start]) if count == 1 else stream.feed(tokens[start:end])
            if text:
                texts[slot] = texts.get(slot, "") + text
            if stream.finish is not None:
                self._finished(slot, stream.finish)

    def _feed_any(self, slot: int, tokens: array[int]) -> None:
        if (parsed := self._parsed.get(slot)) is not None:
            parsed.feed(tokens)
            self._parsed_changed(slot, parsed)
        elif (stream := self._streams.get(slot)) is not None:
            self._answers.say(slot, stream.feed(tokens))
            if stream.finish is not None:
                self._finished(slot, stream.finish)
        else:
            try:
                if slot in self._waiting:
                    self._waiting.hold(slot, tokens)
                elif tokens:
                    self._slots.check_late(slot)
            except SluiceError as error:
                self.refuse(slot, error)

    def _remote_changed(self, slot: int, stream: RemoteStream) -> None:
        self._parsed_changed(slot, stream)
        self._parsed_news.set()
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
                self._answers.tell(slot, events)
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def _degraded(self, slot: int, reason: str) -> None:
        self._metrics.degraded(reason)
        self._answers.tell(slot, [Degraded(reason)])

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """The engine has ended a stream; an unknown slot is ignored, its stream ended before."""
        if slot in self._waiting:
            self._waiting.end(slot, reason, stop_token_id)
        if (parsed := self._parsed.get(slot)) is not None:
            parsed.end(reason, stop_token_id)
            self._parsed_changed(slot, parsed)
        stream = self._streams.get(slot)
        if stream is None:
            return
        self._answers.say(slot, stream.end(reason, stop_token_id))
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def lags(self, slot: int) -> bool:
        """What a stream says comes later than its tokens: it waits to begin, or its parser is in another process."""
        return slot in self._waiting or isinstance(self._parsed.get(slot), RemoteStream)

    def behind(self, slot: int) -> bool:
        """Something is still to be said about the tokens that came."""
        parsed = self._parsed.get(slot)
        return slot in self._waiting or (isinstance(parsed, RemoteStream) and parsed.behind)

    def close(self, slots: Iterable[int]) -> None:
        """Forgets streams without an answer; unknown slots are ignored."""
        gone = set(slots)
        for slot in gone:
            self._forget(slot)
        if gone:
            self._answers.forget(gone)

    def _finished(self, slot: int, finish: Finish) -> None:
        if finish.error is not None:
            self._slots.fail(slot, finish.error.message)
        self._answers.release(slot)
        self._forget(slot)
        self._answers.finish(slot, finish)
        self._metrics.finished(finish)

    def _forget(self, slot: int) -> None:
        if (parsed := self._parsed.pop(slot, None)) is not None:
            parsed.close()
            self._remainders.pop(slot, None)
        self._streams.pop(slot, None)
        self._waiting.forget(slot)
        self._slots.free(slot)

    def _took(self, amount: int) -> None:
        self._backlog += amount
        if self._backlog > self._limits.max_backlog + self._limits.max_message_tokens:
            raise overloaded("The caller does not read its answers.")

    def drain(self) -> Batch | None:
        """What is ready, None when nothing is; call it when everything before has been written."""
        self._backlog = 0
        batch = self._answers.take()
        if batch is None and self._draining and not len(self):
            self.drained.set()
        return batch

    def leave(self) -> None:
        """Says that this replica leaves; streams go on and still may be opened."""
        self._answers.leave()
        self._wake()

    def start_draining(self) -> None:
        """Takes no more streams; `drained` is set when the last one has been answered."""
        self._draining = True
        self._wake()

    async def settle(self) -> None:
        """Waits until no stream waits for its model, and none that has ended for its parser."""
        await self._waiting.settled()
        while waiting(self._parsed.values()):
            await self._parsed_news.wait()
            self._parsed_news.clear()

    async def aclose(self) -> None:
        """The caller is gone: forgets everything."""
        await self._waiting.aclose()
        self.close(self._slots.live)


def _too_many(count: int, most: int) -> SluiceError:
    said = f"{count} tokens of one stream at once are too many; the limit is {most}."
    return SluiceError(ErrorKind.TOO_LARGE, said, param="tokens.counts")
