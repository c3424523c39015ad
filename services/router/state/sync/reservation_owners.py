"""Owners of reservations: callers whose open stream keeps the lease of their reservations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.router.metrics import Metrics
from services.router.state.store.base import Store, StoreUnavailable
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.synchronizer import IndexSynchronizer

RENEWALS_PER_LEASE = 5
OWNER_KEEPALIVE_MS = 2_000
"""How long an owner's connection may be silent before it is pinged. With the time that the ping has (5 s), a lease and
a fifth of it, the reservations of an owner that was stopped end within 15 s."""


class Owners:
    """Renews the leases of owners with a stream to this replica, and clears reservations whose owner's lease expired.

    A lease outlives its stream, so that an owner that reconnects to any replica in time keeps its reservations. Nothing
    is cleared while the store is unavailable, because owners may be renewing at other replicas.
    """

    def __init__(
        self, store: Store, health: StoreHealth, synchronizer: IndexSynchronizer, metrics: Metrics, lease_ms: int
    ) -> None:
        self._store = store
        self._health = health
        self._synchronizer = synchronizer
        self._metrics = metrics
        self._lease_ms = lease_ms
        self._streams: Counter[str] = Counter()

    @asynccontextmanager
    async def stream(self, owner: str) -> AsyncIterator[None]:
        """Keeps an owner's lease while the context is open; an empty name has none."""
        if not owner:
            yield
            return
        self._streams[owner] += 1
        try:
            if self._health.available:
                await self._try_renew([owner])
            yield
        finally:
            self._streams[owner] -= 1
            if not self._streams[owner]:
                del self._streams[owner]

    async def renew(self) -> None:
        """Renews the leases of all streams; raises StoreUnavailable if the store cannot be reached."""
        await self._renew(list(self._streams))

    async def tend(self) -> None:
        """Renews leases and clears reservations until cancelled."""
        while True:
            await self._health.wait()
            await self._try_renew(list(self._streams), clear=self._health.available_for_s > self._lease_ms / 1000)
            await asyncio.sleep(self._lease_ms / 1000 / RENEWALS_PER_LEASE)

    async def _try_renew(self, owners: list[str], clear: bool = False) -> None:
        try:
            await self._renew(owners)
            if clear:
                await self._clear()
        except StoreUnavailable as error:
            self._health.mark_unavailable(error)

    async def _renew(self, owners: list[str]) -> None:
        if owners:
            for view in self._synchronizer.views:
                await self._store.renew_owners(view.model, owners, self._lease_ms)

    async def _clear(self) -> None:
        for view in self._synchronizer.views:
            while cleared := await self._store.sweep_owners(view.model):
                self._metrics.expired.add(cleared, {"why": "owner_gone"})
