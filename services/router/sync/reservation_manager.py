"""Booking with a fallback: in the store while it is there, in a local book while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeAlias

from services.router.reservations.cost import NO_LOAD, Load, Offer
from services.router.reservations.table import AllBusy, Choice, ReservationParams, ReservationTable
from services.router.store.base import Store, StoreUnavailable
from services.router.store.memory import unix_ms
from services.router.store.store_health import Link
from services.router.workers.worker import WorkerRank

STORE_UNAVAILABLE = "store_unavailable"
SETTLED_AT_ONCE = 512
MOST_DEFERRED = 100_000  # ids of each kind and model; beyond it the reservations' expiry has to do

_Step: TypeAlias = Callable[[str, Sequence[str]], Awaitable[Any]]


class _Local:
    """What happened to one model's reservations while the store was away."""

    def __init__(self, random: Random) -> None:
        self.book = ReservationTable(unix_ms, random)
        self.marked: dict[str, None] = {}
        self.freed: dict[str, None] = {}

    @property
    def empty(self) -> bool:
        return not (len(self.book) or self.marked or self.freed)


class ReservationManager:
    """Chooses and books, marks and frees; never fails because the store is away."""

    def __init__(self, store: Store, link: Link, random: Random) -> None:
        self._store = store
        self._link = link
        self._random = random
        self._locals: dict[str, _Local] = {}
        self._settling = asyncio.Lock()

    async def select(
        self, model: str, offers: Sequence[Offer], terms: ReservationParams, seen: Mapping[WorkerRank, Load]
    ) -> tuple[Choice, str]:
        """Chooses an offer and books it.

        Args:
            seen: loads as last read from the store, for when it is away.

        Returns:
            The choice, and why a fallback was taken, or nothing.

        Raises:
            AllBusy: every offer is over its limits.
        """
        unheard: list[str] = []
        if self._link.there:
            try:
                choice = await self._store.select(model, offers, terms)
            except StoreUnavailable as error:
                self._link.lost(error)
                if terms.request_id and any(not offer.busy(NO_LOAD) for offer in offers):
                    unheard = [terms.request_id]
            else:
                if (known := self._locals.get(model)) is not None:
                    known.freed.pop(terms.request_id, None)
                return choice, ""
        local = self._local(model)
        based = [_based(offer, seen.get(offer.slot, NO_LOAD)) for offer in offers]
        try:
            choice = local.book.select(based, terms)
        except AllBusy:
            _defer(local.freed, unheard)  # it may have been booked there all the same
            raise
        local.freed.pop(terms.request_id, None)  # it was over, and is tried again
        return choice, STORE_UNAVAILABLE

    async def mark_prefill_complete(self, model: str, request_ids: Sequence[str]) -> int:
        """Gives prefill load back; returns how many ids were unknown."""
        if (local := self._locals.get(model)) is not None:
            request_ids = local.book.mark_prefill_complete(request_ids)
        if self._link.there and request_ids:
            try:
                return len(await self._store.mark_prefill_complete(model, request_ids))
            except StoreUnavailable as error:
                self._link.lost(error)
        if request_ids:
            _defer(self._local(model).marked, request_ids)
        return 0

    async def free(self, model: str, request_ids: Sequence[str]) -> int:
        """Gives all load back; returns how many ids were unknown."""
        request_ids = self.free_here(model, request_ids)
        if self._link.there and request_ids:
            try:
                return len(await self._store.free(model, request_ids))
            except StoreUnavailable as error:
                self._link.lost(error)
        if request_ids:
            _defer(self._local(model).freed, request_ids)
        return 0

    def free_here(self, model: str, request_ids: Sequence[str]) -> Sequence[str]:
        """Gives back what is booked while the store is away; returns the ids that are not."""
        if (local := self._locals.get(model)) is None:
            return request_ids
        # The store may hold it too: a select that timed out may have happened.
        known = [each for each in request_ids if local.book.holds(each)]
        _defer(local.freed, known)
        return local.book.free(request_ids)

    async def progress(self, model: str, outputs: Mapping[str, int]) -> int:
        """Books output beyond what is booked for it; returns how many ids were unknown.

        Args:
            outputs: request id → thousandths of a block, all in all.
        """
        if (local := self._locals.get(model)) is not None:
            outputs = {each: outputs[each] for each in local.book.progress(outputs)}
        if self._link.there and outputs:
            try:
                return len(await self._store.progress(model, outputs))
            except StoreUnavailable as error:
                self._link.lost(error)
        return 0  # not kept for later: the next report says the same and more

    def drop_worker(self, model: str, worker_id: str) -> None:
        """Forgets local reservations of a worker that is gone."""
        if (local := self._locals.get(model)) is not None:
            local.book.drop_worker(worker_id)

    async def settle(self) -> None:
        """Tells the store what happened while it was away; StoreUnavailable when it is away again."""
        async with self._settling:  # a store that is lost once more is found again while somebody still tells it
            for model, local in list(self._locals.items()):
                local.book.expire()
                while not local.empty:
                    # Many at a time: more are booked here all the while, and this has to catch up with them.
                    some = local.book.reservations[:SETTLED_AT_ONCE]
                    await asyncio.gather(*(self._store.book(model, each) for each in some))
                    # Some were computed while they travelled, or booked there by a select that seemed to have failed.
                    local.marked |= {each.request_id: None for each in some if not each.prefill}
                    local.book.free([each.request_id for each in some])
                    await _replay(self._store.mark_prefill_complete, model, local.marked)
                    await _replay(self._store.free, model, local.freed)
                self._locals.pop(model)

    def _local(self, model: str) -> _Local:
        found = self._locals.get(model)
        if found is None:
            found = self._locals[model] = _Local(self._random)
        return found


def _based(offer: Offer, load: Load) -> Offer:
    """The offer for a book that does not know of a load."""
    limits = offer.limits and offer.limits.less(load)
    return offer._replace(uncached=offer.uncached + load.prefill, added=offer.added + load.decode, limits=limits)


def _defer(ids: dict[str, None], more: Sequence[str]) -> None:
    for each in more[: max(MOST_DEFERRED - len(ids), 0)]:
        ids[each] = None


async def _replay(step: _Step, model: str, ids: dict[str, None]) -> None:
    some = list(ids)
    if some:
        await step(model, some)
        for each in some:
            ids.pop(each, None)
