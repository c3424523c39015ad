"""Owners: callers whose open stream is the lease of their reservations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.router.metrics import Metrics
from services.router.store.base import Store, StoreUnavailable
from services.router.store.store_health import Link
from services.router.sync.synchronizer import IndexSynchronizer

RENEWALS_PER_LEASE = 3


class Owners:
    """Renews the leases of owners with a stream at this replica, and clears what others' leases left behind.

    A lease outlives its stream, so that an owner who comes back at any replica in time loses nothing. While the store
    is away nothing is cleared: owners may be renewing at replicas this one cannot hear.
    """

    def __init__(self, store: Store, link: Link, keeper: IndexSynchronizer, metrics: Metrics, lease_ms: int) -> None:
        self._store = store
        self._link = link
        self._keeper = keeper
        self._metrics = metrics
        self._lease_ms = lease_ms
        self._streams: Counter[str] = Counter()

    @asynccontextmanager
    async def stream(self, owner: str) -> AsyncIterator[None]:
        """Holds an owner's lease while inside; an empty name is nobody."""
        if not owner:
            yield
            return
        self._streams[owner] += 1
        try:
            if self._link.there:
                await self._reaching([owner])
            yield
        finally:
            self._streams[owner] -= 1
            if not self._streams[owner]:
                del self._streams[owner]

    async def renew(self) -> None:
        """Renews every lease held here; StoreUnavailable when the store is away."""
        await self._renew(list(self._streams))

    async def tend(self) -> None:
        """Renews and clears until cancelled."""
        while True:
            await self._link.wait()
            await self._reaching(list(self._streams), clear=self._link.there_for_s > self._lease_ms / 1000)
            await asyncio.sleep(self._lease_ms / 1000 / RENEWALS_PER_LEASE)

    async def _reaching(self, owners: list[str], clear: bool = False) -> None:
        try:
            await self._renew(owners)
            if clear:
                await self._clear()
        except StoreUnavailable as error:
            self._link.lost(error)

    async def _renew(self, owners: list[str]) -> None:
        if owners:
            for view in self._keeper.views:
                await self._store.renew_owners(view.model, owners, self._lease_ms)

    async def _clear(self) -> None:
        for view in self._keeper.views:
            while cleared := await self._store.sweep_owners(view.model):
                self._metrics.expired.add(cleared, {"why": "owner_gone"})
