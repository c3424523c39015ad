"""Tracks whether the store is available, and recovers when it returns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential, wait_random

from services.router.state.store.base import Store, StoreUnavailable

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
STEADY_S = 5.0  # a store that fails sooner responds to pings but does not work


class StoreHealth:
    """Availability of the store; callers report failures with `mark_unavailable`.

    Attributes:
        available: whether the store is available.
    """

    def __init__(self, store: Store) -> None:
        self.available = False
        self._store = store
        self._available = asyncio.Event()
        self._unavailable = asyncio.Event()
        self._available_since = 0.0
        self._unavailable_since = 0.0
        self._returns = 0

    @property
    def available_for_s(self) -> float:
        """Seconds since the store became available; 0 while it is unavailable."""
        return time.monotonic() - self._available_since if self.available else 0.0

    @property
    def unavailable_for_s(self) -> float:
        """Seconds since the store became unavailable; 0 while it is available."""
        return 0.0 if self.available else time.monotonic() - self._unavailable_since

    def mark_unavailable(self, error: StoreUnavailable) -> None:
        """Records a failed call to the store."""
        if self.available:
            self._unavailable_since = time.monotonic()
            log.warning("store unavailable; routing with local state and local reservations: %s", error.message)
        self.available = False
        self._available.clear()
        self._unavailable.set()

    async def wait(self) -> int:
        """Waits until the store is available; for background tasks.

        Returns:
            A number for `uninterrupted`.
        """
        await self._available.wait()
        return self._returns

    def uninterrupted(self, since: int) -> bool:
        """Returns whether the store has been available since `wait` returned this number."""
        return self.available and self._returns == since

    async def keep(self, recover: Callable[[], Awaitable[None]]) -> None:
        """Connects to the store, again after every failure, and runs `recover` before the store counts as available."""
        pause_s = 0.0
        while True:
            async for attempt in AsyncRetrying(
                wait=wait_exponential(multiplier=FIRST_RETRY_S, max=LAST_RETRY_S) + wait_random(0, FIRST_RETRY_S),
                retry=retry_if_exception_type(StoreUnavailable),
                before_sleep=_log_retry,
            ):
                with attempt:
                    await self._store.ping()
                    await recover()
            self._unavailable.clear()
            self._available_since = time.monotonic()
            self._returns += 1
            self.available = True
            self._available.set()
            log.info("store available")
            await self._unavailable.wait()
            unsteady = time.monotonic() - self._available_since < STEADY_S
            pause_s = min(max(2 * pause_s, FIRST_RETRY_S), LAST_RETRY_S) if unsteady else 0.0
            await asyncio.sleep(pause_s)


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    # Log the first and then every tenth attempt.
    if isinstance(error, StoreUnavailable) and state.attempt_number % 10 == 1:
        log.warning("%s Retrying.", error.message, extra={"attempt": state.attempt_number})
