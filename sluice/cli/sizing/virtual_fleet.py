"""A tier of workers in virtual time, which an autoscaler grows and shrinks while a trace of requests arrives.

A started worker receives requests after its start-up delay. A worker that is to go receives no more and is gone when
its last request has ended; one that is still starting is gone at once. Requests go to the worker with the fewest prompt
tokens to compute, and wait in order of arrival while no worker has room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.common.types.scaling import TierLoad
from sluice.cli.sizing.autoscalers import SYNC_S, Autoscaler, Fixed, Observed, WorkerBounds
from sluice.cli.sizing.trace import TracedRequest
from sluice.cli.sizing.virtual_worker import VirtualRequest, VirtualWorker, WorkerShape

READ_EVERY_S = 1.0
BLOCK_TOKENS = 16
HOUR_S = 3600.0


@dataclass(slots=True)
class FleetOutcome:
    """What became of a replay; times are virtual.

    Attributes:
        flights: all requests, in order of arrival.
        worker_hours: from the start of each worker until it is gone, or the last request has ended.
        started: workers that were started after the beginning.
        curve: at the end of each period of the autoscaler: seconds, workers that cost, requests that wait.
    """

    flights: list[VirtualRequest]
    worker_hours: float = 0.0
    started: int = 0
    curve: list[tuple[float, int, int]] = field(default_factory=list)


class VirtualFleet:
    """One replay of a trace."""

    def __init__(
        self,
        requests: Sequence[TracedRequest],
        autoscaler: Autoscaler,
        shape: WorkerShape,
        bounds: WorkerBounds,
        startup_s: float,
    ) -> None:
        self._flights = [VirtualRequest(request) for request in requests]
        self._autoscaler = autoscaler
        self._shape = shape
        self._startup_s = startup_s
        first = bounds.max_workers if isinstance(autoscaler, Fixed) else bounds.min_workers
        self._workers = [VirtualWorker(shape, 0.0, 0.0) for _ in range(first)]
        self._queue: deque[VirtualRequest] = deque()
        self._readings: list[TierLoad] = []
        self._busy_before: dict[VirtualWorker, float] = {}
        self._left = len(self._flights)
        self._now_s = 0.0
        self._outcome = FleetOutcome(self._flights)

    def run(self) -> FleetOutcome:
        """Returns what happened until the last request ended."""
        arrivals = deque(self._flights)
        read_s, sync_s = READ_EVERY_S, SYNC_S
        while self._left:
            arrival_s = arrivals[0].request.at_s if arrivals else math.inf
            worker = min(self._workers, key=lambda one: one.next_s)
            ready_s = min((one.ready_s for one in self._workers if one.ready_s > self._now_s), default=math.inf)
            self._now_s = min(worker.next_s, ready_s, arrival_s, read_s)
            if worker.next_s == self._now_s:
                self._left -= len(worker.advance())
                self._remove(lambda one: one.draining and not one.requests)
            elif arrival_s == self._now_s:
                self._queue.append(arrivals.popleft())
            elif read_s == self._now_s:
                self._readings.append(self._reading())
                if read_s == sync_s:
                    self._sync()
                    sync_s += SYNC_S
                read_s += READ_EVERY_S
            self._place()
        self._remove(lambda one: True)
        return self._outcome

    def _serving(self) -> list[VirtualWorker]:
        return [one for one in self._workers if one.ready_s <= self._now_s and not one.draining]

    def _place(self) -> None:
        while self._queue:
            flight = self._queue[0]
            candidates = [worker for worker in self._serving() if worker.has_room(flight)]
            if not candidates:
                return
            best = min(candidates, key=lambda worker: (worker.prefill_tokens, worker.requests))
            best.submit(self._queue.popleft(), self._now_s)

    def _reading(self) -> TierLoad:
        serving = self._serving()
        return TierLoad(
            workers=len(serving),
            starting=sum(one.ready_s > self._now_s for one in self._workers),
            requests=sum(one.requests for one in serving),
            waiting=len(self._queue),
            prefill_tokens=sum(one.prefill_tokens for one in serving),
            decode_blocks=sum(one.reserved_tokens for one in serving) / BLOCK_TOKENS,
            max_sequences=self._shape.max_sequences,
            max_batched_tokens=self._shape.max_batched_tokens,
            total_blocks=self._shape.cache_tokens / BLOCK_TOKENS,
        )

    def _sync(self) -> None:
        serving = self._serving()
        busy = {one: one.busy_until(self._now_s) for one in serving}
        used = sum(seconds - self._busy_before.get(one, 0.0) for one, seconds in busy.items())
        self._busy_before = busy
        waiting = len(self._queue) + sum(one.waiting for one in self._workers)
        observed = Observed(self._readings, used / SYNC_S, waiting)
        self._scale(self._autoscaler.workers(self._now_s, observed) - observed.present)
        self._readings = []
        self._outcome.curve.append((self._now_s, len(self._workers), waiting))

    def _scale(self, more: int) -> None:
        for _ in range(more):
            self._workers.append(VirtualWorker(self._shape, self._now_s, self._now_s + self._startup_s))
            self._outcome.started += 1
        # Those that start have nothing to lose, then those with the fewest requests.
        kept = [one for one in self._workers if not one.draining]
        kept.sort(key=lambda one: (one.ready_s <= self._now_s, one.requests, -one.started_s))
        for worker in kept[: max(-more, 0)]:
            worker.draining = True
        self._remove(lambda one: one.draining and not one.requests)

    def _remove(self, goes: Callable[[VirtualWorker], bool]) -> None:
        gone = [one for one in self._workers if goes(one)]
        self._workers = [one for one in self._workers if one not in gone]
        self._outcome.worker_hours += sum(self._now_s - one.started_s for one in gone) / HOUR_S
