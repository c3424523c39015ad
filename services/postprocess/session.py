"""Many streams on one session: columns of tokens in, columns of text out."""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from opentelemetry.trace import Span

from services.common import telemetry
from services.common.errors import ErrorKind, SluiceError, invalid, overloaded, unavailable
from services.common.tasks import TaskOwner
from services.postprocess.library import VocabularyLibrary
from services.postprocess.metrics import Metrics
from services.postprocess.opening import NO_PARSERS, AnyParsed, Opener, waiting
from services.postprocess.parsers.events import Degraded, Event, merge
from services.postprocess.parsers.remote import RemoteStream
from services.postprocess.stream import Finish, FinishReason, Limits, Stream, StreamOptions
from services.postprocess.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session; see the settings of the same names."""

    stream: Limits = field(default_factory=Limits)
    max_streams: int = 16_384
    max_message_tokens: int = 1 << 20
    max_waiting_tokens: int = 1 << 16
    max_backlog: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Batch:
    """What became ready together: row i is `text_lengths[i]` code points for `slots[i]`, then what parsers found, then
    the ended streams."""

    slots: array[int]
    text_lengths: array[int]
    text: str
    finishes: list[tuple[int, Finish]]
    events: list[tuple[int, list[Event]]] = field(default_factory=list)


class _Waiting:
    """A stream whose model is still loading, with what came for it meanwhile."""

    def __init__(self, options: StreamOptions, identity: str) -> None:
        self.options = options
        self.identity = identity
        self.tokens: array[int] = array("I")
        self.end: tuple[FinishReason, int | None] | None = None


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
        library: VocabularyLibrary,
        limits: SessionLimits,
        metrics: Metrics,
        wake: Callable[[], None],
        on_death: Callable[[str, BaseException], None] | None = None,
        opener: Opener | None = None,
    ) -> None:
        self._library = library
        self._limits = limits
        self._metrics = metrics
        self._wake = wake
        self._tasks = TaskOwner(on_death)
        self._settling: set[asyncio.Task[None]] = set()
        self._streams: dict[int, Stream] = {}
        self._parsed: dict[int, AnyParsed] = {}
        self._opener = opener or Opener(limits.stream)
        self._parsed_news = asyncio.Event()
        self._waiting: dict[int, _Waiting] = {}
        self._spans: dict[int, Span] = {}
        self._texts: dict[int, str] = {}
        self._events: dict[int, list[Event]] = {}
        self._finishes: list[tuple[int, Finish]] = []
        self._backlog = 0
        self._draining = False
        self.drained = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams) + len(self._parsed) + len(self._waiting)

    def open(self, slot: int, request_id: str, options: StreamOptions, parent: Mapping[str, str]) -> None:
        """Begins a stream; one that cannot be begun is answered with an error in its slot.

        A slot in use ends both streams: the caller could not tell their texts apart.
        """
        self._took(1)
        try:
            self._admit(slot)
            vocabulary = self._library.ready(options.model)
            identity = request_id or secrets.token_hex(12)
            if vocabulary is None:
                waiting = self._waiting[slot] = _Waiting(options, identity)
                settling = self._tasks.spawn(self._settle(slot, waiting), f"postprocess stream {slot}")
                self._settling.add(settling)
                settling.add_done_callback(self._settling.discard)
            else:
                self._begin(slot, options, vocabulary, identity)
        except SluiceError as error:
            self.refuse(slot, error)
            return
        self._metrics.lives(+1)
        span = telemetry.start_span("postprocess.stream", parent, request_id=request_id, model=options.model)
        if span is not None:
            self._spans[slot] = span

    def _begin(self, slot: int, options: StreamOptions, vocabulary: Vocabulary, identity: str) -> None:
        plan = self._opener.plan(options, vocabulary, identity)
        if plan.names == NO_PARSERS:
            self._streams[slot] = self._opener.plain(options, vocabulary)
        else:
            stream = self._parsed[slot] = self._opener.parsed(options, vocabulary, plan)
            if isinstance(stream, RemoteStream):
                stream.changed = partial(self._remote_changed, slot, stream)
        if plan.degraded:
            self._tell(slot, [Degraded(plan.degraded)])

    def _admit(self, slot: int) -> None:
        if slot in self._streams or slot in self._parsed or slot in self._waiting:
            raise invalid(f"Slot {slot} is in use.", param="slot", code="slot_in_use")
        if self._draining:
            raise unavailable("This replica is shutting down.", code="draining")
        if len(self) >= self._limits.max_streams:
            raise overloaded(f"The session has {len(self)} streams, which is its limit.")

    def refuse(self, slot: int, error: SluiceError) -> None:
        """Answers a stream with an error; a live one in the slot ends with it."""
        stream = self._streams.get(slot) or self._parsed.get(slot)
        self._finished(slot, Finish(FinishReason.ERROR, stream.tokens_seen if stream else 0, error=error))

    async def _settle(self, slot: int, waiting: _Waiting) -> None:
        """Begins a stream when its model is there, with what came meanwhile."""
        try:
            vocabulary = await self._library.get(waiting.options.model)
            if self._waiting.get(slot) is not waiting:
                return
            self._begin(slot, waiting.options, vocabulary, waiting.identity)
            del self._waiting[slot]
            if (parsed := self._parsed.get(slot)) is not None:
                self._feed_parsed(slot, parsed, waiting.tokens)
            else:
                self._feed_stream(slot, self._streams[slot], waiting.tokens)
            if waiting.end is not None:
                self.end(slot, *waiting.end)
        except SluiceError as error:
            if self._waiting.get(slot) is waiting:
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
        streams, texts = self._streams, self._texts
        end = 0
        for slot, count in zip(slots, counts, strict=True):
            start, end = end, end + count
            stream = streams.get(slot)
            if stream is None:
                if (parsed := self._parsed.get(slot)) is not None:
                    self._feed_parsed(slot, parsed, tokens[start:end])
                elif self._waiting:
                    self._hold(slot, tokens[start:end])
                continue
            text = stream.feed_one(tokens[start]) if count == 1 else stream.feed(tokens[start:end])
            if text:
                texts[slot] = texts.get(slot, "") + text
            if stream.finish is not None:
                self._finished(slot, stream.finish)

    def _feed_stream(self, slot: int, stream: Stream, tokens: array[int]) -> None:
        self._say(slot, stream.feed(tokens))
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def _feed_parsed(self, slot: int, stream: AnyParsed, tokens: array[int]) -> None:
        stream.feed(tokens)
        self._parsed_changed(slot, stream)

    def _remote_changed(self, slot: int, stream: RemoteStream) -> None:
        self._parsed_changed(slot, stream)
        self._parsed_news.set()
        self._wake()

    def _parsed_changed(self, slot: int, stream: AnyParsed) -> None:
        if stream.events:
            self._tell(slot, stream.take_events())
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def _tell(self, slot: int, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Degraded):
                self._metrics.degraded(event.reason)
        if (waiting := self._events.get(slot)) is None:
            self._events[slot] = events
        else:
            waiting += events

    def _hold(self, slot: int, tokens: array[int]) -> None:
        waiting = self._waiting.get(slot)
        if waiting is None:
            return
        if len(waiting.tokens) + len(tokens) > self._limits.max_waiting_tokens:
            self.refuse(slot, overloaded(f"Model {waiting.options.model} is still loading; too many tokens wait."))
        else:
            waiting.tokens.extend(tokens)

    def end(self, slot: int, reason: FinishReason, stop_token_id: int | None) -> None:
        """The engine has ended a stream; an unknown slot is ignored, its stream ended before."""
        if waiting := self._waiting.get(slot):
            waiting.end = (reason, stop_token_id)
        if (parsed := self._parsed.get(slot)) is not None:
            parsed.end(reason, stop_token_id)
            self._parsed_changed(slot, parsed)
        stream = self._streams.get(slot)
        if stream is None:
            return
        self._say(slot, stream.end(reason, stop_token_id))
        if stream.finish is not None:
            self._finished(slot, stream.finish)

    def close(self, slots: Iterable[int]) -> None:
        """Forgets streams without an answer; unknown slots are ignored."""
        gone = set(slots)
        for slot in gone:
            self._forget(slot)
            self._texts.pop(slot, None)
            self._events.pop(slot, None)
        if gone and self._finishes:
            self._finishes = [(slot, finish) for slot, finish in self._finishes if slot not in gone]

    def _say(self, slot: int, text: str) -> None:
        if text:
            self._texts[slot] = self._texts.get(slot, "") + text

    def _finished(self, slot: int, finish: Finish) -> None:
        if finish.error is not None and slot in self._spans:
            telemetry.fail_span(self._spans[slot], finish.error.message)
        self._forget(slot)
        self._finishes.append((slot, finish))
        self._metrics.finished(finish)

    def _forget(self, slot: int) -> None:
        if (parsed := self._parsed.pop(slot, None)) is not None:
            parsed.close()
        plain = self._streams.pop(slot, None) or self._waiting.pop(slot, None)
        if parsed is not None or plain is not None:
            self._metrics.lives(-1)
        if span := self._spans.pop(slot, None):
            span.end()

    def _took(self, amount: int) -> None:
        self._backlog += amount
        if self._backlog > self._limits.max_backlog + self._limits.max_message_tokens:
            raise overloaded("The caller does not read its answers.")

    def drain(self) -> Batch | None:
        """What is ready, None when nothing is; call it when everything before has been written."""
        self._backlog = 0
        texts, finishes = self._texts, self._finishes
        events = self._events
        if not texts and not finishes and not events:
            if self._draining and not len(self):
                self.drained.set()
            return None
        self._texts, self._finishes, self._events = {}, [], {}
        told = [(slot, merge(found)) for slot, found in events.items()]
        return Batch(array("I", texts), array("I", map(len, texts.values())), "".join(texts.values()), finishes, told)

    def start_draining(self) -> None:
        """Takes no more streams; `drained` is set when the last one has been answered."""
        self._draining = True
        self._wake()

    async def settle(self) -> None:
        """Waits until no stream waits for its model, and none that has ended for its parser."""
        while self._settling:
            await asyncio.wait(self._settling)
        while waiting(self._parsed.values()):
            await self._parsed_news.wait()
            self._parsed_news.clear()

    async def aclose(self) -> None:
        """The caller is gone: forgets everything."""
        await self._tasks.close()
        self.close([*self._streams, *self._parsed, *self._waiting])
