"""The link to the store: is it there, and what happens when it returns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential, wait_random

from services.router.store.base import Store, StoreUnavailable

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
STEADY_S = 5.0  # a store that is lost sooner answers, but does not work


class Link:
    """Knows whether the store answers. Whoever finds out that it does not says so with `lost`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._there = asyncio.Event()
        self._away = asyncio.Event()
        self._since = 0.0
        self._lost_at = 0.0
        self._returns = 0

    @property
    def there(self) -> bool:
        """Whether the store answered last."""
        return self._there.is_set()

    @property
    def there_for_s(self) -> float:
        """How long it has been there without a break; 0 while it is away."""
        return time.monotonic() - self._since if self.there else 0.0

    @property
    def away_for_s(self) -> float:
        """How long it has been away since it was there last; 0 while it is there."""
        return 0.0 if self.there else time.monotonic() - self._lost_at

    def lost(self, error: StoreUnavailable) -> None:
        """The store did not answer."""
        if self.there:
            self._lost_at = time.monotonic()
            log.warning("the store is away; routing from the view and a local load book: %s", error.message)
        self._there.clear()
        self._away.set()

    async def wait(self) -> int:
        """Waits until the store is there; its caller is a background task that has nothing else to do.

        Returns:
            For `unbroken`.
        """
        await self._there.wait()
        return self._returns

    def unbroken(self, since: int) -> bool:
        """Whether nobody found the store away since `wait` returned this."""
        return self.there and self._returns == since

    async def keep(self, recover: Callable[[], Awaitable[None]]) -> None:
        """Reaches the store, again whenever it is lost, and runs `recover` before anybody else uses it."""
        pause_s = 0.0
        while True:
            async for attempt in AsyncRetrying(
                wait=wait_exponential(multiplier=FIRST_RETRY_S, max=LAST_RETRY_S) + wait_random(0, FIRST_RETRY_S),
                retry=retry_if_exception_type(StoreUnavailable),
                before_sleep=_say,
            ):
                with attempt:
                    await self._store.ping()
                    await recover()
            self._away.clear()
            self._since = time.monotonic()
            self._returns += 1
            self._there.set()
            log.info("the store is there")
            await self._away.wait()
            unsteady = time.monotonic() - self._since < STEADY_S
            pause_s = min(max(2 * pause_s, FIRST_RETRY_S), LAST_RETRY_S) if unsteady else 0.0
            await asyncio.sleep(pause_s)


def _say(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    # Not once per attempt for hours: the first, then every tenth.
    if isinstance(error, StoreUnavailable) and state.attempt_number % 10 == 1:
        log.warning("%s Trying again.", error.message, extra={"attempt": state.attempt_number})
