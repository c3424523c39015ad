"""What keeps retries from making things worse: circuit breakers, budgets, and how long an answer usually takes."""

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
    """One peer's circuit breaker: after some failures in a row it is left alone, then tried with one request.

    While it stays broken the pauses double, up to a bound. Whoever is let through by `try_pass` must say how it went.

    Args:
        clock: seconds, for tests.

    Attributes:
        tripped: the peer hung, and has not answered since.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause_s = COOL_DOWN_S[0]
        self._open_until = 0.0
        self.tripped = False

    @property
    def closed(self) -> bool:
        """Requests may go there as they like."""
        return self._failures < FAILURES_TO_OPEN

    @property
    def passable(self) -> bool:
        """A request may go there now; with an open breaker, one that is due as a trial."""
        return self._failures < FAILURES_TO_OPEN or self._clock() >= self._open_until

    @property
    def retry_after_s(self) -> float:
        """How long until the next trial."""
        return 0.0 if self.closed else max(self._open_until - self._clock(), 0.0)

    def try_pass(self) -> None:
        """A request goes there; an open breaker lets no other one through until this one is answered or overdue."""
        if not self.closed:
            self._open_until = self._clock() + self._pause_s

    def succeeded(self) -> None:
        """An answer came."""
        self.tripped = False
        self._failures = 0
        self._pause_s = COOL_DOWN_S[0]

    def trip(self) -> None:
        """The peer hangs: it is left alone for the longest pause, then tried."""
        self.tripped = True
        self._failures = FAILURES_TO_OPEN
        self._pause_s = COOL_DOWN_S[1]
        self._open_until = self._clock() + self._pause_s

    def failed(self) -> bool:
        """No answer came; True when that opened the breaker."""
        self._failures += 1
        if self._failures < FAILURES_TO_OPEN:
            return False
        if self._failures > FAILURES_TO_OPEN:
            self._pause_s = min(self._pause_s * 2, COOL_DOWN_S[1])
        # Many callers that found it broken together must not come back together.
        self._open_until = self._clock() + self._pause_s * random.uniform(0.8, 1.2)
        return self._failures == FAILURES_TO_OPEN


class RetryBudget:
    """How many calls may be made a second time: a share of all calls, and a few to begin with."""

    def __init__(self, per_call: float, burst: float) -> None:
        self._per_call = per_call
        self._burst = burst
        self._left = burst

    def earn(self) -> None:
        """A call was made for the first time."""
        self._left = min(self._left + self._per_call, self._burst)

    def spend(self) -> bool:
        """Whether another one may be made now."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class LatencyQuantile:
    """How long an answer takes at most in 95 of 100 calls, followed without keeping samples.

    Args:
        floor_s: never less than this.
        guess_s: before anything was seen.
    """

    def __init__(self, floor_s: float, guess_s: float) -> None:
        self._floor_s = floor_s
        self._estimate_s = guess_s

    @property
    def seconds(self) -> float:
        """The estimate now."""
        return self._estimate_s

    def saw(self, seconds: float) -> None:
        """One more answer. Each moves the estimate by a few percent; it rests where 5 of 100 are slower."""
        share = QUANTILE if seconds > self._estimate_s else QUANTILE - 1
        moved = self._estimate_s * (1 + QUANTILE_STEP * share)
        self._estimate_s = min(max(moved, self._floor_s), SLOWEST_GUESS_S)
