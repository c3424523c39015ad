"""Which worker a session's last request went to."""

from __future__ import annotations

import time

from services.common.errors import invalid
from services.router.store.base import Store, StoreUnavailable
from services.router.store.local_affinity import LocalSessionAffinity
from services.router.store.store_health import Link
from services.router.workers.worker import WorkerRank

LONGEST_ID = 512


class SessionAffinity:
    """Sessions as all replicas remember them; while the store is away, as this one does."""

    def __init__(self, store: Store, link: Link, ttl_ms: int) -> None:
        self._store = store
        self._link = link
        self._ttl_ms = ttl_ms
        self._own = LocalSessionAffinity(lambda: time.monotonic_ns() // 1_000_000)

    async def find(self, model: str, session_id: str) -> WorkerRank | None:
        """The rank the session's last request went to; SluiceError(INVALID_ARGUMENT) for an id that is too long."""
        if len(session_id) > LONGEST_ID:
            raise invalid(
                f"A session_id of {len(session_id)} characters is longer than {LONGEST_ID}.", param="session_id"
            )
        if self._link.there:
            try:
                return await self._store.session(model, session_id)
            except StoreUnavailable as error:
                self._link.lost(error)
        return self._own.get(f"{model}\0{session_id}")

    async def remember(self, model: str, session_id: str, slot: WorkerRank, ttl_ms: int) -> None:
        """Remembers the rank for `ttl_ms`, or for the router's own time if that is 0."""
        ttl_ms = ttl_ms or self._ttl_ms
        if not self._store.embedded:
            self._own.put(f"{model}\0{session_id}", slot, ttl_ms)
        if self._link.there:
            try:
                await self._store.remember_session(model, session_id, slot, ttl_ms)
            except StoreUnavailable as error:
                self._link.lost(error)
