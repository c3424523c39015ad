"""A worker in virtual time: steps of an engine that prefills in chunks and decodes one token of every request.

A step takes what the mock engine's model of an accelerator says. While prompts are computed, every step is an event;
without prompts, all steps until the first request ends are one. Prefixes are not cached.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from services.worker.engines.mock.timing import ModelledTiming
from sluice.cli.sizing.trace import TracedRequest


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What a worker can do at once: requests, tokens of a step, tokens of KV cache; `speed` divides its step times."""

    max_sequences: int = 256
    max_batched_tokens: int = 8_192
    cache_tokens: int = 1_048_576
    speed: float = 1.0


@dataclass(slots=True)
class VirtualRequest:
    """A request on its way; times are virtual, and 0 until they are known."""

    request: TracedRequest
    first_s: float = 0.0
    end_s: float = 0.0
    prefill_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.prefill_left = self.request.prompt_tokens

    @property
    def tokens(self) -> int:
        """KV cache that it has in the end, in tokens."""
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_s - self.request.at_s

    @property
    def inter_token_s(self) -> float:
        """Mean seconds between two tokens; 0 for an answer of one."""
        tokens = self.request.output_tokens
        return (self.end_s - self.first_s) / (tokens - 1) if tokens > 1 else 0.0


class VirtualWorker:
    """One worker. `next_s` is when it has to be advanced; infinite if it has no work.

    Attributes:
        started_s: when it was started; it receives requests from `ready_s` on.
        busy_s: seconds of completed steps.
        draining: receives no more requests, and is gone when it has none.
    """

    def __init__(self, shape: WorkerShape, started_s: float, ready_s: float) -> None:
        self.started_s, self.ready_s = started_s, ready_s
        self.draining = False
        self.busy_s = 0.0
        self.next_s = math.inf
        self.reserved_tokens = 0
        self.prefill_tokens = 0
        self._shape = shape
        self._timing = ModelledTiming(shape.speed)
        self._prefills: deque[VirtualRequest] = deque()
        self._decodes: list[tuple[int, int, VirtualRequest]] = []  # by the step at which they end
        self._order = count()
        self._steps = 0
        self._held = 0  # tokens in the KV cache
        self._begun_s = 0.0  # of the steps that run
        self._running = 0  # steps until next_s
        self._step_s = 0.0
        self._chunk = 0

    @property
    def requests(self) -> int:
        """Requests reserved on it."""
        return len(self._prefills) + len(self._decodes)

    @property
    def waiting(self) -> int:
        """Requests of which no prompt token has been computed and that are not in the step which runs."""
        begun = self._chunk
        for number, flight in enumerate(self._prefills):
            if begun <= 0:
                return len(self._prefills) - number
            begun -= flight.prefill_left
        return 0

    def has_room(self, flight: VirtualRequest) -> bool:
        """Returns whether the request fits."""
        fits = self.reserved_tokens + flight.tokens <= self._shape.cache_tokens
        return fits and self.requests < self._shape.max_sequences

    def busy_until(self, now_s: float) -> float:
        """Returns the seconds it has been busy, with the part of the steps that run."""
        return self.busy_s + (max(now_s - self._begun_s, 0.0) if self._running else 0.0)

    def submit(self, flight: VirtualRequest, now_s: float) -> None:
        """Takes a request; it is part of the next step that begins."""
        self.reserved_tokens += flight.tokens
        self.prefill_tokens += flight.request.prompt_tokens
        self._prefills.append(flight)
        if not self._running:
            self._begin(now_s)
        elif self._running > 1:  # decode steps: the one that runs is the last without the prompt
            done = min(max(math.ceil((now_s - self._begun_s) / self._step_s), 1), self._running)
            self._running, self.next_s = done, self._begun_s + done * self._step_s

    def advance(self) -> list[VirtualRequest]:
        """Completes the steps that end at `next_s`; returns the requests that have ended."""
        now_s = self.next_s
        self.busy_s += now_s - self._begun_s
        self._steps += self._running
        self._held += self._running * len(self._decodes)
        self._running = 0
        ended: list[VirtualRequest] = []
        while self._decodes and self._decodes[0][0] <= self._steps:
            ended.append(heapq.heappop(self._decodes)[2])
        self._end_chunk(now_s, ended)
        for flight in ended:
            flight.end_s = now_s
            self.reserved_tokens -= flight.tokens
            self._held -= flight.tokens
        self._begin(now_s)
        return ended

    def _end_chunk(self, now_s: float, ended: list[VirtualRequest]) -> None:
        left = self._chunk
        self._held += left
        self.prefill_tokens -= left
        self._chunk = 0
        while left:
            flight = self._prefills[0]
            part = min(left, flight.prefill_left)
            flight.prefill_left -= part
            left -= part
            if flight.prefill_left:
                return
            self._prefills.popleft()
            flight.first_s = now_s
            self._held += 1
            if flight.request.output_tokens == 1:
                ended.append(flight)
            else:
                last = self._steps + flight.request.output_tokens - 1
                heapq.heappush(self._decodes, (last, next(self._order), flight))

    def _begin(self, now_s: float) -> None:
        if not self.requests:
            self.next_s = math.inf
            return
        self._chunk = min(self.prefill_tokens, self._shape.max_batched_tokens)
        use = min(self._held / self._shape.cache_tokens, 1.0)
        self._step_s = self._timing.step_s(self._chunk, len(self._decodes), use)
        self._running = 1 if self._chunk else self._decodes[0][0] - self._steps
        self._begun_s, self.next_s = now_s, now_s + self._running * self._step_s
