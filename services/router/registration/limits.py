"""Limits of what one caller may register: names of models, and registrations in a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.common.base.budgets import Budget
from services.common.base.errors import ErrorKind, SluiceError, quoted
from services.router.state.workers.worker import Worker

MAX_MODELS = 128
"""Models of one caller's workers where no setting is given; one more is refused, budget `worker_models`."""
MODEL_MEMORY_S = 3_600.0
"""How long a name counts after its last registration: routers remember models without workers as long."""
CALLER_BURST, CALLER_PER_S = 4_096, 100.0
"""Registrations of one caller: a fleet that shares a token returns at once after an outage."""
WORKER_BURST, WORKER_PER_S = 30, 1.0
MAX_WORKERS_COUNTED = 8_192
"""Workers whose registrations are counted; the longest unseen is forgotten."""


@dataclass(slots=True)
class _Allowance:
    """What is left of a burst, at a time."""

    left: float
    at: float

    def take(self, burst: int, per_s: float, now: float) -> bool:
        """Takes one; returns False if none is left."""
        self.left = min(self.left + (now - self.at) * per_s, burst)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class RegistrationLimits:
    """Checks registrations by the authenticated caller, which may run many workers, and by worker.

    Args:
        max_models: limit for the model names of one caller, except of one whose identity names a single worker.
        clock: returns monotonic seconds.
    """

    def __init__(self, max_models: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_models = max_models
        self._clock = clock
        self._callers: dict[str, _Allowance] = {}
        self._workers: OrderedDict[tuple[str, str], _Allowance] = OrderedDict()
        self._names: dict[str, dict[str, float]] = {}  # by caller: when a model was last registered

    def check(self, worker: Worker, known: Iterable[Worker]) -> None:
        """Counts a registration.

        Args:
            known: all registered workers.

        Raises:
            SluiceError: OVERLOADED: `flood` for too many registrations, `budget_exceeded` for too many model names.
        """
        now = self._clock()
        self._check_pace(worker, now)
        names = self._names.setdefault(worker.caller, {})
        if worker.model not in names:
            for name in [name for name, at in names.items() if now - at > MODEL_MEMORY_S]:
                del names[name]
            served = {other.model for other in known if other.caller == worker.caller}
            if len(served | names.keys() | {worker.model}) > self._max_models.limit:
                raise self._max_models.refuse(
                    f"Caller {worker.caller or 'anonymous'} registers workers of {self._max_models.limit} models "
                    f"already, so it cannot add {quoted(worker.model)}",
                    param="registration.card.model",
                    kind=ErrorKind.OVERLOADED,
                    retry_after_ms=60_000,
                )
        names[worker.model] = now

    def _check_pace(self, worker: Worker, now: float) -> None:
        caller = self._callers.setdefault(worker.caller, _Allowance(CALLER_BURST, now))
        key = worker.caller, worker.worker_id
        own = self._workers.setdefault(key, _Allowance(WORKER_BURST, now))
        self._workers.move_to_end(key)
        if len(self._workers) > MAX_WORKERS_COUNTED:
            self._workers.popitem(last=False)
        if not own.take(WORKER_BURST, WORKER_PER_S, now):
            raise _flood(f"Worker {worker.worker_id}")
        if not caller.take(CALLER_BURST, CALLER_PER_S, now):
            raise _flood(f"Caller {worker.caller or 'anonymous'}")


def _flood(who: str) -> SluiceError:
    return SluiceError(
        ErrorKind.OVERLOADED,
        f"{who} registers too often; wait between two registrations.",
        code="flood",
        retry_after_ms=1_000,
        retryable=True,
    )
