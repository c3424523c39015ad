"""Remembers the last changes of reservations that the store acknowledged, to repeat them after a fail-over.

Redis acknowledges a change before its replica has it. A replica that becomes master may therefore lack the last ones:
reservations of running requests, and ends of requests, whose load would then stay until it expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.router.state.reservations.cost import Offer
from services.router.state.reservations.table import Reservation, ReservationParams, ReservedRank

RECENT_S = 5.0  # replicas lag by milliseconds; this is what a master may accept while it is cut off from them
MAX_RECENT = 20_000
"""Recent changes, of each kind and model, repeated to a new Redis master; the oldest is forgotten."""

T = TypeVar("T")


class RecentChanges:
    """The last acknowledged changes of one model.

    Args:
        now_s: returns seconds of a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        # By request id, oldest first.
        self._reserved: dict[str, tuple[float, Reservation]] = {}
        self._marked: dict[str, float] = {}
        self._freed: dict[str, float] = {}

    def reserved(self, offers: Sequence[Offer], terms: ReservationParams, choice: ReservedRank) -> None:
        """Records a reservation; those that were made before, and choices without one, are none."""
        if choice.repeated or not terms.request_id:
            return
        offer = {offer.slot: offer for offer in offers}[choice.slot]
        self.forget([terms.request_id])
        now = self._drop_old(self._reserved, lambda entry: entry[0])
        self._reserved[terms.request_id] = now, Reservation.of(offer, terms, choice.expires_unix_ms)

    def marked(self, request_ids: Sequence[str]) -> None:
        """Records computed prompts."""
        now = self._drop_old(self._marked, lambda at: at)
        for request_id in request_ids:
            self._marked[request_id] = now

    def freed(self, request_ids: Sequence[str]) -> None:
        """Records ended requests."""
        self.forget(request_ids)
        now = self._drop_old(self._freed, lambda at: at)
        for request_id in request_ids:
            self._freed[request_id] = now

    def forget(self, request_ids: Sequence[str]) -> None:
        """Forgets requests: those that another replica frees, or that are reserved again."""
        entries: dict[str, Any]
        for request_id in request_ids:
            for entries in (self._reserved, self._marked, self._freed):
                if request_id in entries:
                    del entries[request_id]

    def drop_worker(self, worker_id: str) -> None:
        """Forgets the reservations of a removed worker."""
        for request_id, (_, reservation) in list(self._reserved.items()):
            if reservation.slot.worker_id == worker_id:
                del self._reserved[request_id]

    @property
    def reservations(self) -> list[Reservation]:
        """Reservations of requests that have not ended."""
        return [reservation for _, reservation in self._reserved.values()]

    @property
    def marked_ids(self) -> list[str]:
        """Ids of requests with computed prompts that have not ended."""
        return list(self._marked)

    @property
    def freed_ids(self) -> list[str]:
        """Ids of ended requests."""
        return list(self._freed)

    def _drop_old(self, entries: dict[str, T], at: Callable[[T], float]) -> float:
        """Drops what is too old when something is added: nothing is while the store is unavailable."""
        now = self._now_s()
        while entries:
            oldest = next(iter(entries))
            if len(entries) < MAX_RECENT and at(entries[oldest]) >= now - RECENT_S:
                break
            del entries[oldest]
        return now
