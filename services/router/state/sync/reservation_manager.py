"""Makes reservations in the store, or in a local table while the store is unavailable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

from services.router.state.reservations.cost import NO_LOAD, Load, Offer
from services.router.state.reservations.table import (
    AllBusy,
    Reservation,
    ReservationParams,
    ReservationTable,
    ReservedRank,
)
from services.router.state.store.base import Store, StoreUnavailable
from services.router.state.store.memory import steady_unix_ms
from services.router.state.store.store_health import StoreHealth
from services.router.state.sync.recent_changes import RecentChanges
from services.router.state.workers.worker import WorkerRank

STORE_UNAVAILABLE = "store_unavailable"
REPLAY_BATCH = 512
MAX_DEFERRED = 100_000
"""Ids, of each kind and model, that wait for Redis; further reservations are left to expire."""

_Step: TypeAlias = Callable[[str, Sequence[str]], Awaitable[Any]]


class _Local:
    """Changes to the reservations of one model while the store is unavailable."""

    def __init__(self, random: Random) -> None:
        self.book = ReservationTable(steady_unix_ms, random)
        self.marked: dict[str, None] = {}
        self.freed: dict[str, None] = {}

    @property
    def empty(self) -> bool:
        return not (len(self.book) or self.marked or self.freed)


class ReservationManager:
    """Makes, marks and frees reservations; never fails because the store is unavailable."""

    def __init__(self, store: Store, health: StoreHealth, random: Random) -> None:
        self._store = store
        self._health = health
        self._random = random
        self._locals: dict[str, _Local] = {}
        self._recent: dict[str, RecentChanges] = {}
        self._replay_lock = asyncio.Lock()

    async def select(
        self, model: str, offers: Sequence[Offer], terms: ReservationParams, last_loads: Mapping[WorkerRank, Load]
    ) -> tuple[ReservedRank, str]:
        """Chooses an offer and reserves it.

        Args:
            last_loads: loads as last read from the store, used while it is unavailable.

        Returns:
            The choice, and the reason why the local table was used (empty: it was not).

        Raises:
            AllBusy: every offer is at its limits.
        """
        unconfirmed: list[str] = []
        if self._health.available:
            try:
                choice = await self._store.select(model, offers, terms)
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
                if terms.request_id and any(not offer.busy(NO_LOAD) for offer in offers):
                    unconfirmed = [terms.request_id]
            else:
                if (deferred := self._locals.get(model)) is not None:
                    deferred.freed.pop(terms.request_id, None)
                if (recent := self._recent_of(model)) is not None:
                    recent.reserved(offers, terms, choice)
                return choice, ""
        local = self._local(model)
        adjusted = [_adjusted(offer, last_loads.get(offer.slot, NO_LOAD)) for offer in offers]
        try:
            choice = local.book.select(adjusted, terms)
        except AllBusy:
            _defer(local.freed, unconfirmed)  # the store may have made the reservation before the connection failed
            raise
        local.freed.pop(terms.request_id, None)  # the request was freed before and is retried
        return choice, STORE_UNAVAILABLE

    async def mark_prefill_complete(self, model: str, request_ids: Sequence[str]) -> int:
        """Releases prefill load; returns the number of unknown ids."""
        if (local := self._locals.get(model)) is not None:
            request_ids = local.book.mark_prefill_complete(request_ids)
        return await self._finish(
            self._store.mark_prefill_complete, model, request_ids, RecentChanges.marked, lambda local: local.marked
        )

    def free(self, model: str, request_ids: Sequence[str]) -> Coroutine[Any, Any, int]:
        """Releases all load; returns the number of unknown ids."""
        request_ids = self.free_local(model, request_ids)
        return self._finish(self._store.free, model, request_ids, RecentChanges.freed, lambda local: local.freed)

    async def _finish(
        self,
        step: Callable[[str, Sequence[str]], Awaitable[list[str]]],
        model: str,
        request_ids: Sequence[str],
        record: Callable[[RecentChanges, Sequence[str]], None],
        deferred: Callable[[_Local], dict[str, None]],
    ) -> int:
        """Takes a step in the store, or defers it; returns the number of ids that the store does not know."""
        if self._health.available and request_ids:
            try:
                unknown = await step(model, request_ids)
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
            else:
                if (recent := self._recent_of(model)) is not None:
                    record(recent, _known(request_ids, unknown))
                return len(unknown)
        if request_ids:
            _defer(deferred(self._local(model)), request_ids)
        return 0

    def free_local(self, model: str, request_ids: Sequence[str]) -> Sequence[str]:
        """Frees local reservations; returns the ids that have none.

        They have ended, and are not booked again after a fail-over either.
        """
        if (recent := self._recent.get(model)) is not None:
            recent.forget(request_ids)
        if (local := self._locals.get(model)) is None:
            return request_ids
        # The store may have the reservation too: a select that timed out may have been executed.
        known = [each for each in request_ids if local.book.holds(each)]
        _defer(local.freed, known)
        return local.book.free(request_ids)

    async def progress(self, model: str, outputs: Mapping[str, int]) -> int:
        """Reserves load for output beyond the expected length; returns the number of unknown ids.

        Args:
            outputs: total output in thousandths of a block by request id.
        """
        if (local := self._locals.get(model)) is not None:
            outputs = {each: outputs[each] for each in local.book.progress(outputs)}
        if self._health.available and outputs:
            try:
                return len(await self._store.progress(model, outputs))
            except StoreUnavailable as error:
                self._health.mark_unavailable(error)
        return 0  # not deferred: the next report includes this one

    def drop_worker(self, model: str, worker_id: str) -> None:
        """Drops the local reservations of a removed worker."""
        if (local := self._locals.get(model)) is not None:
            local.book.drop_worker(worker_id)
        if (recent := self._recent.get(model)) is not None:
            recent.drop_worker(worker_id)

    async def replay(self) -> None:
        """Replays recent and local changes to a store that was unavailable; raises StoreUnavailable if it is again.

        It may be another server than before, which lacks the changes acknowledged last.
        """
        async with self._replay_lock:  # the store may fail and return again while an earlier replay still runs
            for model, recent in list(self._recent.items()):
                await self._book(model, recent.reservations)
                await self._store.mark_prefill_complete(model, recent.marked_ids)
                await self._store.free(model, recent.freed_ids)
        await self.replay_local()

    async def replay_local(self) -> None:
        """Replays local changes to the store; raises StoreUnavailable if it cannot be reached."""
        async with self._replay_lock:
            for model, local in list(self._locals.items()):
                local.book.expire()
                while not local.empty:
                    # In large batches: requests are reserved locally meanwhile, and the replay has to catch up.
                    batch = local.book.reservations[:REPLAY_BATCH]
                    await self._book(model, batch)
                    # Some prompts were computed meanwhile, or reserved in the store by a select that seemed to fail.
                    local.marked |= {each.request_id: None for each in batch if not each.prefill}
                    local.book.free([each.request_id for each in batch])
                    await _replay_step(self._store.mark_prefill_complete, model, local.marked)
                    await _replay_step(self._store.free, model, local.freed)
                self._locals.pop(model)

    async def _book(self, model: str, reservations: Sequence[Reservation]) -> None:
        for start in range(0, len(reservations), REPLAY_BATCH):
            batch = reservations[start : start + REPLAY_BATCH]
            await asyncio.gather(*(self._store.book(model, each) for each in batch))

    def _recent_of(self, model: str) -> RecentChanges | None:
        """Returns the record of a model's recent changes; None if the store loses none that it acknowledged."""
        if not self._store.may_lose_acknowledged:
            return None
        recent = self._recent.get(model)
        if recent is None:
            recent = self._recent[model] = RecentChanges()
        return recent

    def _local(self, model: str) -> _Local:
        found = self._locals.get(model)
        if found is None:
            found = self._locals[model] = _Local(self._random)
        return found


def _adjusted(offer: Offer, load: Load) -> Offer:
    """Returns the offer for a table that lacks this load."""
    limits = offer.limits and offer.limits.less(load)
    return offer._replace(uncached=offer.uncached + load.prefill, added=offer.added + load.decode, limits=limits)


def _known(request_ids: Sequence[str], unknown: Sequence[str]) -> Sequence[str]:
    missing = set(unknown)
    return [request_id for request_id in request_ids if request_id not in missing] if missing else request_ids


def _defer(ids: dict[str, None], more: Sequence[str]) -> None:
    for each in more[: max(MAX_DEFERRED - len(ids), 0)]:
        ids[each] = None


async def _replay_step(step: _Step, model: str, ids: dict[str, None]) -> None:
    batch = list(ids)
    if batch:
        await step(model, batch)
        for each in batch:
            ids.pop(each, None)
