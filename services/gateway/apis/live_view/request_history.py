"""Request history for the live view: running totals, running requests, and the last completed ones.

A request costs a few assignments at its start and end, and a token costs nothing: progress is read from the streams
once a second.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from time import perf_counter

from services.common.types.media.spans import items_within
from services.gateway.streams.interfaces import StreamEnd
from services.gateway.streams.stream import GenerationStream

MAX_RECENT = 512
"""Completed requests that the live view remembers; the oldest is forgotten."""
MAX_NEW = 20
"""Completed requests in one update of the live view; further ones are only counted."""
MAX_REASONS = 32
"""Reasons of fallbacks counted between two updates; further reasons are not counted."""


@dataclass(frozen=True, slots=True)
class Finished:
    """One completed choice of a request; its four stages follow each other without gaps.

    Attributes:
        id: id of the response; choices after the first have the suffix `-N`.
        workers: ids of its workers in order; several after a migration or handoff.
        tokenize_ms: time for template, token ids and block hashes.
        route_ms: time for the routing decision and the start on the worker.
        first_ms: time until the first text.
        rest_ms: time from there to the end.
        outcome: "finished", "cancelled" or the error.
        media: number of media items of the prompt.
        cached_media: number of those whose tokens were all cached on the worker.
        encoder_tokens: work of the encoder for all of them, in tokens of the prompt.
    """

    id: str
    model: str
    workers: tuple[str, ...]
    began_unix_ms: int
    tokenize_ms: float
    route_ms: float
    first_ms: float
    rest_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    outcome: str
    degraded: tuple[str, ...]
    migrations: int
    media: int = 0
    cached_media: int = 0
    encoder_tokens: int = 0


@dataclass(slots=True)
class Totals:
    """Totals since the start of the process."""

    tokenized: int = 0
    decisions: int = 0
    requests: int = 0
    ended: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    characters: int = 0


@dataclass(slots=True)
class _Live:
    stream: GenerationStream
    began_unix_ms: int
    workers: tuple[str, ...]
    tokens: int = 0
    characters: int = 0


@dataclass(slots=True)
class WorkerTotals:
    """Totals of one worker's requests from this gateway."""

    requests: int = 0
    output_tokens: int = 0


@dataclass
class RequestHistory:
    """Totals and recent requests of a gateway, all bounded in size.

    Attributes:
        recent: last completed requests, oldest first.
        new: those completed since `take_new`, up to `MAX_NEW`.
        degraded: fallbacks by reason since `take_degraded`.
        failures: failed calls by service since `take_failures`.
    """

    totals: Totals = field(default_factory=Totals)
    workers: dict[str, WorkerTotals] = field(default_factory=dict)
    recent: deque[Finished] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    new: list[Finished] = field(default_factory=list)
    degraded: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    _live: dict[int, _Live] = field(default_factory=dict)

    def on_started(self, stream: GenerationStream) -> None:
        """See StreamObserver; counted once a worker is assigned."""

    def on_assigned(self, stream: GenerationStream, worker_id: str) -> None:
        """See StreamObserver."""
        self._totals_of(worker_id).requests += 1
        live = self._live.get(stream.slot)
        if live is None:
            self.totals.requests += 1
            self.totals.prompt_tokens += stream.prompt_tokens
            self._live[stream.slot] = _Live(stream, int(time.time() * 1000), (worker_id,))
        else:
            self._meter(stream.slot)
            live.workers = (*live.workers, worker_id)

    def on_ended(self, stream: GenerationStream, end: StreamEnd) -> None:
        """See StreamObserver; does nothing for a stream that never had a worker."""
        self._meter(stream.slot)
        live = self._live.pop(stream.slot, None)
        if live is None:
            return
        self.totals.ended += 1
        self.totals.failed += end.error is not None
        self.totals.cached_tokens += stream.cached_tokens
        for reason in (*stream.degraded, *(("migrated",) if stream.migrations else ())):
            if reason in self.degraded or len(self.degraded) < MAX_REASONS:
                self.degraded[reason] += 1
        finished = _finished(live, end.outcome)
        self.recent.append(finished)
        if len(self.new) < MAX_NEW:
            self.new.append(finished)

    def meter(self) -> None:
        """Updates the totals with the progress of all running streams."""
        for slot in self._live:
            self._meter(slot)

    def retain_workers(self, worker_ids: set[str]) -> None:
        """Removes the totals of all other workers."""
        for worker_id in self.workers.keys() - worker_ids:
            del self.workers[worker_id]

    def take_new(self) -> list[Finished]:
        """Returns the requests completed since the last call, up to `MAX_NEW`."""
        new, self.new = self.new, []
        return new

    def take_degraded(self) -> Counter[str]:
        """Returns the fallbacks since the last call, by reason."""
        degraded, self.degraded = self.degraded, Counter()
        return degraded

    def take_failures(self) -> Counter[str]:
        """Returns the failed calls since the last call, by service."""
        failures, self.failures = self.failures, Counter()
        return failures

    def _totals_of(self, worker_id: str) -> WorkerTotals:
        return self.workers.setdefault(worker_id, WorkerTotals())

    def _meter(self, slot: int) -> None:
        live = self._live.get(slot)
        if live is None:
            return
        stream = live.stream
        tokens, characters = len(stream.tokens), stream.text_sent + stream.sent.reasoning
        self._totals_of(live.workers[-1]).output_tokens += tokens - live.tokens
        self.totals.output_tokens += tokens - live.tokens
        self.totals.characters += characters - live.characters
        live.tokens, live.characters = tokens, characters


def _finished(live: _Live, outcome: str) -> Finished:
    stream, now = live.stream, perf_counter()
    times = stream.context.prompt_times
    first = stream.first_text_at or now
    spans = [item.span for item in stream.prompt.media]
    tokenize_started = stream.started_at if times is None else times.started_at
    tokenize_ended = stream.started_at if times is None else times.ended_at
    return Finished(
        id=stream.request.request_id if stream.index == 0 else stream.request_id,
        model=stream.model,
        workers=live.workers,
        began_unix_ms=live.began_unix_ms - round(1000 * (stream.started_at - tokenize_started)),
        tokenize_ms=_ms(tokenize_ended - tokenize_started),
        route_ms=_ms(stream.started_at - tokenize_ended),
        first_ms=_ms(first - stream.started_at),
        rest_ms=_ms(now - first),
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        media=len(spans),
        cached_media=items_within(spans, stream.cached_tokens),
        encoder_tokens=sum(span.encoder_tokens or span.length for span in spans),
        output_tokens=stream.completion_tokens or len(stream.tokens),
        outcome=outcome,
        degraded=stream.degraded,
        migrations=stream.migrations,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
