"""What passes through this gateway, kept for the live view: running totals, requests under way, the last ones done.

Nothing here is touched by a token: a request costs a few assignments at its start and its end, and what flows in
between is read off the streams once a second.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

from services.gateway.streams.stream import GenerationStream

KEPT = 512
FRESH = 20
REASONS = 32

prompt_times: ContextVar[PromptTimes | None] = ContextVar("prompt_times", default=None)


@dataclass(slots=True)
class PromptTimes:
    """When preprocess was asked for a request's tokens and when it had answered, seconds of `perf_counter`."""

    asked: float
    answered: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice of a request that is over; the four stages follow each other without gaps.

    Attributes:
        id: of the answer, as the client has it; choices above the first have `-N` after it.
        workers: who computed it, in order; more than one after a migration or a handoff.
        tokenize_ms: template, ids and block hashes.
        route_ms: the router's decision, and the connection to the worker.
        first_ms: until the first text.
        rest_ms: from there to the end.
        outcome: "finished", "cancelled" or what failed.
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


@dataclass(slots=True)
class Totals:
    """Counted since the start of the process."""

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
    times: PromptTimes | None
    workers: tuple[str, ...]
    tokens: int = 0
    characters: int = 0


@dataclass(slots=True)
class OfWorker:
    """What one worker did for this gateway since the start."""

    requests: int = 0
    output_tokens: int = 0


@dataclass
class RequestHistory:
    """Everything is bounded: a gateway that runs for a year holds no more than after its first hour.

    Attributes:
        recent: the last requests done, oldest first.
        fresh: of them, the first few since `take_fresh`.
        degraded: fallbacks by reason since `take_degraded`.
        troubled: calls that failed, by service, since `take_troubled`.
    """

    totals: Totals = field(default_factory=Totals)
    workers: dict[str, OfWorker] = field(default_factory=dict)
    recent: deque[Finished] = field(default_factory=lambda: deque(maxlen=KEPT))
    fresh: list[Finished] = field(default_factory=list)
    degraded: Counter[str] = field(default_factory=Counter)
    troubled: Counter[str] = field(default_factory=Counter)
    _live: dict[int, _Live] = field(default_factory=dict)

    def began(self, stream: GenerationStream, worker_id: str) -> None:
        """A worker got a stream."""
        self.totals.requests += 1
        self.totals.prompt_tokens += stream.prompt_tokens
        self._of(worker_id).requests += 1
        self._live[stream.slot] = _Live(stream, int(time.time() * 1000), prompt_times.get(), (worker_id,))

    def over(self, stream: GenerationStream, outcome: str) -> None:
        """A stream came to its end; one that is over already, or was never seen to begin, stays as it is."""
        self._meter(stream.slot)
        live = self._live.pop(stream.slot, None)
        if live is None:
            return
        self.totals.ended += 1
        self.totals.failed += outcome not in ("finished", "cancelled")
        self.totals.cached_tokens += stream.cached_tokens
        for reason in (*stream.degraded, *(("migrated",) if stream.migrations else ())):
            if reason in self.degraded or len(self.degraded) < REASONS:
                self.degraded[reason] += 1
        done = _finished(live, outcome)
        self.recent.append(done)
        if len(self.fresh) < FRESH:
            self.fresh.append(done)

    def meter(self) -> None:
        """Reads off how far every stream under way has come."""
        for slot in self._live:
            self._meter(slot)

    def forget_workers(self, known: set[str]) -> None:
        """Drops the counts of workers that are no longer shown."""
        for worker_id in self.workers.keys() - known:
            del self.workers[worker_id]

    def take_fresh(self) -> list[Finished]:
        """What came to its end since the last call, at most FRESH of them."""
        fresh, self.fresh = self.fresh, []
        return fresh

    def take_degraded(self) -> Counter[str]:
        """Fallbacks since the last call."""
        taken, self.degraded = self.degraded, Counter()
        return taken

    def take_troubled(self) -> Counter[str]:
        """Failed calls since the last call."""
        taken, self.troubled = self.troubled, Counter()
        return taken

    def _of(self, worker_id: str) -> OfWorker:
        return self.workers.setdefault(worker_id, OfWorker())

    def _meter(self, slot: int) -> None:
        live = self._live.get(slot)
        if live is None:
            return
        stream = live.stream
        if stream.worker is not None and stream.worker.worker_id != live.workers[-1]:
            live.workers = (*live.workers, stream.worker.worker_id)
            self._of(live.workers[-1]).requests += 1
        tokens, characters = len(stream.tokens), stream.text_sent + stream.sent.reasoning
        self._of(live.workers[-1]).output_tokens += tokens - live.tokens
        self.totals.output_tokens += tokens - live.tokens
        self.totals.characters += characters - live.characters
        live.tokens, live.characters = tokens, characters


def _finished(live: _Live, outcome: str) -> Finished:
    stream, times, now = live.stream, live.times, perf_counter()
    first = stream.first_text_at or now
    asked = stream.started_at if times is None else times.asked
    answered = stream.started_at if times is None else times.answered
    return Finished(
        id=stream.request.request_id if stream.index == 0 else stream.request_id,
        model=stream.model,
        workers=live.workers,
        began_unix_ms=live.began_unix_ms - round(1000 * (stream.started_at - asked)),
        tokenize_ms=_ms(answered - asked),
        route_ms=_ms(stream.started_at - answered),
        first_ms=_ms(first - stream.started_at),
        rest_ms=_ms(now - first),
        prompt_tokens=stream.prompt_tokens,
        cached_tokens=stream.cached_tokens,
        output_tokens=stream.completion_tokens or len(stream.tokens),
        outcome=outcome,
        degraded=stream.degraded,
        migrations=stream.migrations,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
