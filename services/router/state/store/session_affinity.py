"""Session affinity: the rank of each session's last request, in the store or in the memory of one process."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from services.common.base.errors import invalid
from services.router.state.store.base import Store, StoreUnavailable
from services.router.state.store.store_health import StoreHealth
from services.router.state.workers.worker import WorkerRank

MAX_PINS = 100_000
"""Sessions whose worker the store in memory remembers; the least recently used is forgotten."""

MAX_ID_LENGTH = 512
"""Characters of a session's name in the store; a longer one is refused with INVALID_ARGUMENT."""


class SessionAffinity:
    """Maps sessions to ranks in the store; while that is unavailable, in this replica."""

    def __init__(self, store: Store, health: StoreHealth, ttl_ms: int) -> None:
        self._store = store
        self._health = health
        self._ttl_ms = ttl_ms
        self._own = LocalSessionAffinity(lambda: time.monotonic_ns() // 1_000_000)

    async def find(self, model: str, session_id: str) -> WorkerRank | None:
        """Returns the rank of the session's last request; raises SluiceError (INVALID_ARGUMENT) for an overlong id."""
        if len(session_id) > MAX_ID_LENGTH:
            raise invalid(
                f"session_id has {len(session_id)} characters; the maximum is {MAX_ID_LENGTH}.", param="session_id"
            )
        if self._health.available:
            try:
                return await self._store.session(model, session_id)
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
        return self._own.get(f"{model}\0{session_id}")

    async def remember(self, model: str, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        """Sets the rank of a session for `ttl_ms`, or for the router's default if that is 0."""
        ttl_ms = ttl_ms or self._ttl_ms
        if not self._store.embedded:
            self._own.put(f"{model}\0{session_id}", slot, ttl_ms)
        if self._health.available:
            try:
                await self._store.remember_session(model, session_id, slot, ttl_ms)
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)


class LocalSessionAffinity:
    """Maps sessions to the ranks of their last requests, each for its time to live.

    Args:
        now_ms: returns milliseconds of any clock.
    """

    def __init__(self, now_ms: Callable[[], int], most: int = MAX_PINS) -> None:
        self._now_ms = now_ms
        self._most = most
        self._pins: OrderedDict[str, tuple[WorkerRank, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, session_id: str) -> WorkerRank | None:
        """Returns the rank of a session; None if it is unknown or expired."""
        slot, until = self._pins.get(session_id, (None, 0))
        if slot is not None and until <= self._now_ms():
            del self._pins[session_id]
            return None
        return slot

    def put(self, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        """Sets the rank of a session."""
        self._pins[session_id] = (slot, self._now_ms() + ttl_ms)
        self._pins.move_to_end(session_id)
        if len(self._pins) > self._most:
            self._pins.popitem(last=False)
