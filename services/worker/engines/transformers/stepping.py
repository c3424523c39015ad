"""Runs requests one token at a time, in turns: for models that continuous batching does not support."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.common.base.shared_steps import shared_step
from services.worker.contract.generation import PositionLogprobs
from services.worker.engines.transformers.sizing import Plan
from services.worker.engines.transformers.step import Gauges, Listener, Step, StepRow
from services.worker.engines.transformers.step_errors import (
    is_device_lost,
    is_out_of_memory,
    row_failed,
    step_failed,
)

if TYPE_CHECKING:
    from services.worker.engines.transformers.batch_request import BatchRequest

HEADROOM = 128
"""Tokens that must be free for a request to begin beside others, so that it is not put back at once."""
PUBLISH_S = 0.02
"""Tokens of a round are reported at least this often, where a round takes longer."""
SMOOTHING = 0.1

log = logging.getLogger(__name__)


class TokenSequence(Protocol):
    """One sequence that a model computes."""

    def next(self) -> tuple[int, PositionLogprobs | None]:
        """Computes and samples the next token."""

    def forget(self) -> None:
        """Frees the cache; the next token computes the whole sequence again."""


Begin = Callable[["BatchRequest", list[int]], TokenSequence]


@dataclass(eq=False, slots=True)
class _Turn:
    """A request that waits or runs; changed by the stepping thread only, except for being dropped."""

    key: str
    batch_request: BatchRequest
    sequence: TokenSequence
    length: int
    limit: int
    generated: int = 0
    cached: bool = False


class Stepper:
    """Runs requests in a thread; each round computes one token of every running request, so that none starves.

    The caches of the running requests together hold at most the planned number of tokens. When they are full, the
    request that began last is put back: it frees its cache, and its sequence is computed again later.

    Args:
        begin: Makes the sequence of a request; called in the thread that adds it, so it must be fast.
        plan: Bounds on the running requests and their tokens.
        listener: Callbacks for tokens and for the thread's exit.
    """

    shares_prefixes = False

    def __init__(self, begin: Begin, plan: Plan, listener: Listener) -> None:
        self.gauges = Gauges()
        self.fatal_error: BaseException | None = None
        self._begin = begin
        self._plan = plan
        self._listener = listener
        self._changed = threading.Condition()
        self._waiting: dict[str, _Turn] = {}
        self._running: dict[str, _Turn] = {}
        self._closed = False
        self._between_rounds = threading.Lock()
        self._rows: list[StepRow] = []
        self._failed: list[tuple[str, Exception]] = []
        self._published_at = 0.0
        self._step_ms = 0.0
        self._thread = threading.Thread(target=self._run, name="transformers-steps", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def cache_tokens(self) -> int:
        """Maximum number of tokens of all running sequences together."""
        return self._plan.block_size * self._plan.total_blocks

    def start(self) -> None:
        """Starts the thread as a daemon thread."""
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Ends the thread after the current forward pass and waits for it, at most `limit_s` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(limit_s)

    def add(self, key: str, batch_request: BatchRequest, token_ids: list[int], limit: int) -> bool:
        """Queues a request; returns False when the thread has stopped."""
        turn = _Turn(key, batch_request, self._begin(batch_request, token_ids), len(token_ids), limit)
        with self._changed:
            if self._closed:
                return False
            self._waiting[key] = turn
            self._changed.notify()
        return True

    def drop(self, key: str) -> None:
        """Cancels a request before its next token; ignores unknown ones."""
        with self._changed:
            self._waiting.pop(key, None)
            self._running.pop(key, None)

    def release(self, key: str) -> None:
        """Does nothing: the thread forgets a request with its last token."""

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Holds the thread between two rounds."""
        with self._between_rounds:
            yield

    def forget_prefixes(self) -> None:
        """Does nothing: the caches of sequences are not shared."""

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:
            log.exception("a step failed")
            self.fatal_error = error
        finally:
            self._fail_rest()
            self._listener.on_end()

    @shared_step("transformers.turns")
    def _round(self) -> bool:
        """Computes one token of every running request; returns False when the thread shall end."""
        turns = self._next_round()
        with self._between_rounds:
            began_at = time.perf_counter()
            for turn in turns:
                self._advance(turn)
            self._publish()
        last_ms = (time.perf_counter() - began_at) * 1e3
        self._step_ms = self._step_ms + SMOOTHING * (last_ms - self._step_ms) if self._step_ms else last_ms
        return bool(turns)

    def _next_round(self) -> list[_Turn]:
        """Waits for requests and returns those of the next round, a new one last; empty when the thread shall end."""
        with self._changed:
            self._update_gauges()
            self._changed.wait_for(lambda: self._closed or self._running or self._waiting)
            if self._closed:
                return []
            self._put_back()
            turns = list(self._running.values())
            waiting = next(iter(self._waiting.values()), None)
            if waiting is not None and self._fits(waiting):
                del self._waiting[waiting.key]
                self._running[waiting.key] = waiting
                turns.append(waiting)
            self._update_gauges()
            return turns

    def _fits(self, turn: _Turn) -> bool:
        if not self._running:
            return True
        room = self.cache_tokens - self._tokens()
        return len(self._running) < self._plan.max_sequences and turn.length + HEADROOM <= room

    def _put_back(self) -> None:
        """Puts the requests that began last back to the front of the queue, until the others have room for a token."""
        while len(self._running) > 1 and self._tokens() + len(self._running) > self.cache_tokens:
            key, turn = self._running.popitem()
            turn.sequence.forget()
            turn.cached = False
            self._waiting = {key: turn, **self._waiting}

    def _advance(self, turn: _Turn) -> None:
        """Computes one token of a request unless it was dropped."""
        if self._running.get(turn.key) is not turn or self._closed:
            return
        if not turn.cached:
            self._publish()  # a whole prompt takes longer than a token
        sampler = turn.batch_request.sampler
        try:
            token_id, logprobs = turn.sequence.next()
            if sampler.error is not None:
                raise sampler.error
        except Exception as error:
            if is_device_lost(error):
                raise
            self._fail(turn, error)
            return
        turn.cached = True
        violation = sampler.constraint.error if sampler.constraint is not None else ""
        ended = turn.generated + 1 >= turn.limit or token_id in sampler.plan.stop_ids
        with self._changed:
            turn.generated += 1
            turn.length += 1
            if self._running.get(turn.key) is not turn:
                return
            if ended or violation:
                del self._running[turn.key]
        first = turn.generated == 1
        self._rows.append(StepRow(turn.key, token_id, 0 if first else None, logprobs, ended, violation))
        if time.perf_counter() - self._published_at > PUBLISH_S:
            self._publish()

    def _fail(self, turn: _Turn, error: Exception) -> None:
        """Ends a request that raised: each one is computed by itself, so it concerns no other."""
        log.error("a request failed in a step", extra={"key": turn.key}, exc_info=error)
        with self._changed:
            self._running.pop(turn.key, None)
        turn.sequence.forget()
        self._failed.append((turn.key, step_failed(error) if is_out_of_memory(error) else row_failed(error)))

    def _publish(self) -> None:
        rows, self._rows = self._rows, []
        failed, self._failed = self._failed, []
        if rows or failed:
            self._listener.on_step(Step(rows, failed=failed))
        self._published_at = time.perf_counter()

    def _fail_rest(self) -> None:
        with self._changed:
            self._closed = True
            reason = RuntimeError(str(self.fatal_error or "the engine has stopped"))
            failed = [*self._failed, *((key, reason) for key in (*self._running, *self._waiting))]
            self._running.clear()
            self._waiting.clear()
            self._update_gauges()
        if self._rows or failed:
            self._listener.on_step(Step(self._rows, failed=failed))

    def _tokens(self) -> int:
        return sum(turn.length for turn in self._running.values())

    def _update_gauges(self) -> None:
        """Replaces the gauges; the caller holds the lock."""
        uncached = [turn.length for turn in (*self._waiting.values(), *self._running.values()) if not turn.cached]
        self.gauges = Gauges(
            running=len(self._running),
            used_blocks=sum(-(-turn.length // self._plan.block_size) for turn in self._running.values()),
            prefill_tokens=sum(uncached),
            step_ms=self._step_ms,
        )
