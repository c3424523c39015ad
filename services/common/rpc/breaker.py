"""Keeps retries from amplifying failures: circuit breakers, retry budgets and a latency quantile."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic

FAILURES_TO_OPEN = 5
COOL_DOWN_S = (1.0, 30.0)
QUANTILE = 0.95
QUANTILE_STEP = 0.05
SLOWEST_GUESS_S = 60.0


class Breaker:
    """The circuit breaker of one peer: opens after consecutive failures, then lets one trial request through at a time.

    While trials fail, the pause doubles up to a limit. Every `try_pass` must be followed by `succeeded` or `failed`.

    Args:
        clock: returns seconds; replaced in tests.

    Attributes:
        tripped: whether the peer hung and has not responded since.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = COOL_DOWN_S[0]
        self._open_until = 0.0
        self.tripped = False

    @property
    def closed(self) -> bool:
        """Whether requests may be sent without restriction."""
        return self._failures < FAILURES_TO_OPEN

    @property
    def passable(self) -> bool:
        """Whether a request may be sent now; with an open breaker, as a trial that is due."""
        return self._failures < FAILURES_TO_OPEN or self._clock() >= self._open_until

    @property
    def retry_after_s(self) -> float:
        """Seconds until the next trial."""
        return 0.0 if self.closed else max(self._open_until - self._clock(), 0.0)

    def try_pass(self) -> None:
        """Registers a request; an open breaker admits no other until this one completes or is overdue."""
        if self._failures >= FAILURES_TO_OPEN:
            self._open_until = self._clock() + self._pause_s

    def succeeded(self) -> None:
        """Closes the breaker after a response."""
        self.tripped = False
        self._failures = 0
        self._pause_s = COOL_DOWN_S[0]

    def trip(self) -> None:
        """Opens the breaker for the longest pause because the peer hangs."""
        self.tripped = True
        self._failures = FAILURES_TO_OPEN
        self._pause_s = COOL_DOWN_S[1]
        self._open_until = self._clock() + self._pause_s

    def failed(self) -> bool:
        """Counts a failure; returns True when it opened the breaker."""
        self._failures += 1
        if self._failures < FAILURES_TO_OPEN:
            return False
        if self._failures > FAILURES_TO_OPEN:
            self._pause_s = min(self._pause_s * 2, COOL_DOWN_S[1])
        # Jitter: callers that failed together must not retry together.
        self._open_until = self._clock() + self._pause_s * random.uniform(0.8, 1.2)
        return self._failures == FAILURES_TO_OPEN


class RetryBudget:
    """Limits retries and hedges to a share of all calls, plus an initial burst."""

    def __init__(self, per_call: float, burst: float) -> None:
        self._per_call = per_call
        self._burst = burst
        self._balance = burst

    def earn(self) -> None:
        """Credits a first attempt."""
        self._balance = min(self._balance + self._per_call, self._burst)

    def spend(self) -> bool:
        """Takes one retry from the budget; returns False when it is exhausted."""
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


class LatencyQuantile:
    """Estimates the 95th percentile of response times without storing samples.

    Args:
        floor_s: lower bound of the estimate.
        guess_s: initial estimate.
    """

    def __init__(self, floor_s: float, guess_s: float) -> None:
        self._floor_s = floor_s
        self._estimate_s = guess_s

    @property
    def seconds(self) -> float:
        """The current estimate."""
        return self._estimate_s

    def saw(self, seconds: float) -> None:
        """Records a response time.

        Each moves the estimate by a few percent; it converges where 5 of 100 responses are slower.
        """
        share = QUANTILE if seconds > self._estimate_s else QUANTILE - 1
        adjusted = self._estimate_s * (1 + QUANTILE_STEP * share)
        self._estimate_s = min(max(adjusted, self._floor_s), SLOWEST_GUESS_S)
