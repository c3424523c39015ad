"""Limits the rate of messages and block hashes from a worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.common.errors import ErrorKind, SluiceError
from services.router.workers.worker import Worker

WINDOW_S = 10.0
MOST_MESSAGES = 50_000  # per window and rank; a Sluice worker sends at most 200 per second
LEAST_HASHES = 1_000_000  # allowed per window and rank, however small the cache is
MOST_TURNOVERS = 20  # of the complete cache per window


class FloodGuard:
    """Counts the messages of one worker in fixed windows.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, worker: Worker, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker_id = worker.worker_id
        self._most_messages = MOST_MESSAGES * worker.ranks
        self._most_hashes = max(LEAST_HASHES, MOST_TURNOVERS * worker.total_blocks) * worker.ranks
        self._clock = clock
        self._until = 0.0
        self._messages = 0
        self._hashes = 0

    def count(self, messages: int, hashes: int) -> None:
        """Counts received messages.

        Raises:
            SluiceError: OVERLOADED if a limit is exceeded; the caller must disconnect the worker.
        """
        now = self._clock()
        if now >= self._until:
            self._until = now + WINDOW_S
            self._messages = self._hashes = 0
        self._messages += messages
        self._hashes += hashes
        if self._messages > self._most_messages or self._hashes > self._most_hashes:
            raise SluiceError(
                ErrorKind.OVERLOADED,
                f"Worker {self._worker_id} sent too much: {self._messages} messages with {self._hashes} block hashes "
                f"in {WINDOW_S:g} s; the limits are {self._most_messages} and {self._most_hashes}.",
                code="flood",
                retry_after_ms=int(WINDOW_S * 1000),
            )
