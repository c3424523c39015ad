"""The load book: which request is booked on which rank, and what that makes each rank's load."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from services.router.cost import MILLI, NO_LOAD, Load, Offer, choose
from services.router.workers import Slot


@dataclass(frozen=True, slots=True)
class Terms:
    """How to choose among offers and how long to hold the choice.

    `request_id` empty: choose, book nothing. `allowed`: workers the caller restricts the choice to; None for any. A
    reservation under the same request id that lies outside is given up for a new one.
    """

    request_id: str
    ttl_ms: int
    prefill_load_scale: float = 1.0
    temperature: float = 0.0
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen rank; `expires_unix_ms` is 0 when nothing was booked, `repeated` when it was booked before."""

    slot: Slot
    expires_unix_ms: int = 0
    repeated: bool = False


@dataclass(slots=True)
class Reservation:
    """Load booked for one request, thousandths of a block; prefill falls to 0 when the prompt is computed."""

    request_id: str
    slot: Slot
    prefill: int
    decode: int
    expires_unix_ms: int


class Book:
    """Reservations of one model; idempotent by request id; each expires.

    Args:
        now_ms: Unix milliseconds.
    """

    def __init__(self, now_ms: Callable[[], int], random: Random) -> None:
        self._now_ms = now_ms
        self._random = random
        self._reservations: dict[str, Reservation] = {}
        self._expiries: list[tuple[int, str]] = []
        self._prefill: dict[Slot, int] = {}
        self._decode: dict[Slot, int] = {}
        self._requests: dict[Slot, int] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def reservations(self) -> list[Reservation]:
        """All alive."""
        return list(self._reservations.values())

    def holds(self, request_id: str) -> bool:
        """Whether a request is booked."""
        return request_id in self._reservations

    def load(self, slot: Slot) -> Load:
        """What is booked on a rank."""
        requests = self._requests.get(slot)
        if requests is None:
            return NO_LOAD
        return Load(self._prefill[slot] / MILLI, self._decode[slot] / MILLI, requests)

    @property
    def loads(self) -> dict[Slot, Load]:
        """Ranks with anything booked."""
        return {slot: self.load(slot) for slot in self._requests}

    def select(self, offers: Sequence[Offer], terms: Terms) -> Choice:
        """Chooses one of the offers (at least one) and books it, in one step.

        A request id that is booked already gets its reservation again, unless that lies outside `terms.allowed`.
        """
        self.expire()
        earlier = self._reservations.get(terms.request_id) if terms.request_id else None
        if earlier is not None:
            if terms.allowed is None or earlier.slot.worker_id in terms.allowed:
                return Choice(earlier.slot, earlier.expires_unix_ms, repeated=True)
            self._forget(earlier)
        costs = [offer.cost(self.load(offer.slot), terms.prefill_load_scale) for offer in offers]
        offer = offers[choose(costs, [offer.held for offer in offers], terms.temperature, self._random)]
        if not terms.request_id:
            return Choice(offer.slot)
        expires = self._now_ms() + terms.ttl_ms
        self.put(Reservation(terms.request_id, offer.slot, offer.book_prefill, offer.book_decode, expires))
        return Choice(offer.slot, expires)

    def put(self, reservation: Reservation) -> None:
        """Books a reservation as it is."""
        slot = reservation.slot
        self._reservations[reservation.request_id] = reservation
        heapq.heappush(self._expiries, (reservation.expires_unix_ms, reservation.request_id))
        self._prefill[slot] = self._prefill.get(slot, 0) + reservation.prefill
        self._decode[slot] = self._decode.get(slot, 0) + reservation.decode
        self._requests[slot] = self._requests.get(slot, 0) + 1

    def mark_prefill_complete(self, request_ids: Iterable[str]) -> list[str]:
        """Gives prefill load back; returns the ids that are not booked. Marking twice is marking once."""
        unknown = []
        for request_id in request_ids:
            reservation = self._reservations.get(request_id)
            if reservation is None:
                unknown.append(request_id)
            else:
                self._prefill[reservation.slot] -= reservation.prefill
                reservation.prefill = 0
        return unknown

    def free(self, request_ids: Iterable[str]) -> list[str]:
        """Gives all load back; returns the ids that are not booked."""
        unknown = []
        for request_id in request_ids:
            reservation = self._reservations.get(request_id)
            if reservation is None:
                unknown.append(request_id)
            else:
                self._forget(reservation)
        return unknown

    def drop_worker(self, worker_id: str) -> None:
        """Forgets the reservations of a worker that is gone."""
        for reservation in self.reservations:
            if reservation.slot.worker_id == worker_id:
                self._forget(reservation)

    def expire(self) -> int:
        """Forgets what nobody freed in time; returns how many."""
        now, count = self._now_ms(), 0
        while self._expiries and self._expiries[0][0] <= now:
            expires, request_id = heapq.heappop(self._expiries)
            reservation = self._reservations.get(request_id)
            if reservation is not None and reservation.expires_unix_ms == expires:
                self._forget(reservation)
                count += 1
        return count

    def _forget(self, reservation: Reservation) -> None:
        slot = reservation.slot
        del self._reservations[reservation.request_id]
        if self._requests[slot] == 1:
            del self._requests[slot], self._prefill[slot], self._decode[slot]
        else:
            self._requests[slot] -= 1
            self._prefill[slot] -= reservation.prefill
            self._decode[slot] -= reservation.decode
        if len(self._expiries) > 64 and len(self._expiries) > 2 * len(self._reservations):
            # Freed requests leave their entry behind; without this, 600 s of traffic would pile up.
            self._expiries = [(each.expires_unix_ms, each.request_id) for each in self._reservations.values()]
            heapq.heapify(self._expiries)
