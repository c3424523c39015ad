"""Reservation table: requests reserved on ranks, and the resulting load of each rank."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import NamedTuple

from services.common.base.errors import ErrorKind, SluiceError
from services.router.state.reservations.cost import MILLI, NO_LOAD, PREFILL_LOAD_SCALE, Load, Offer, choose
from services.router.state.workers.worker import WorkerRank


class Owner(NamedTuple):
    """Owner of reservations and the length of its lease; reserving and renewing both prolong the lease."""

    name: str
    lease_ms: int


NO_DEADLINE = 1 << 53  # Unix milliseconds that are never reached; Lua counts in doubles


LONGER_MS = 1_000


class QueueOrder(NamedTuple):
    """What the requests of several queues are ordered by: priority, then deadline; lower is served first.

    Of equal ones, the first of a queue that has waited LONGER_MS longer is served first: it would otherwise depend on
    which replica learns of a free place.
    """

    priority: int = 0
    deadline_unix_ms: int = NO_DEADLINE
    waited_ms: int = 0


FIRST_COME = QueueOrder()


class BusyReason(Enum):
    """Why a request was rejected while all workers were busy."""

    SATURATED = "saturated"  # it could not wait, or the queue was full
    EXPIRED = "expired"  # it waited as long as it could
    DISPLACED = "displaced"  # the queue was full, and a request that precedes it arrived


class AllBusy(SluiceError):
    """Every offered rank is at its limits, or a request that precedes this one waits at another replica."""

    def __init__(self, retry_after_ms: int = 1000, reason: BusyReason = BusyReason.SATURATED) -> None:
        super().__init__(
            ErrorKind.OVERLOADED,
            "Every worker that may run this request is over its busy thresholds; retry later.",
            code="overloaded",
            retry_after_ms=retry_after_ms,
        )
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ReservationParams:
    """How to choose among offers, and what to reserve.

    Attributes:
        request_id: empty: choose without a reservation.
        allowed: workers to which the caller restricts the choice; None: any. An earlier reservation of the request on
            another worker is replaced.
        output: share of the reserved decode load that stands for expected output, thousandths of a block.
        owner: whose lease keeps the reservation; None: it only expires.
        order: compared with the first requests of the queues of other replicas.
    """

    request_id: str
    ttl_ms: int
    prefill_load_scale: float = PREFILL_LOAD_SCALE
    temperature: float = 0.0
    allowed: frozenset[str] | None = None
    output: int = 0
    owner: Owner | None = None
    order: QueueOrder = FIRST_COME


@dataclass(frozen=True, slots=True)
class ReservedRank:
    """The chosen rank. `expires_unix_ms` is 0 without a reservation; `repeated`: the request was reserved before."""

    slot: WorkerRank
    expires_unix_ms: int = 0
    repeated: bool = False


@dataclass(slots=True)
class Reservation:
    """Load reserved for one request, thousandths of a block.

    Prefill drops to 0 when the prompt is computed; decode grows once the output exceeds the expected `output`.
    """

    request_id: str
    slot: WorkerRank
    prefill: int
    decode: int
    expires_unix_ms: int
    output: int = 0
    owner: Owner | None = None
    booked_unix_ms: int = 0

    @classmethod
    def of(cls, offer: Offer, params: ReservationParams, expires_unix_ms: int) -> Reservation:
        """Returns the reservation of an offer."""
        load = offer.book_prefill, offer.book_decode
        return cls(params.request_id, offer.slot, *load, expires_unix_ms, params.output, params.owner)


class ReservationTable:
    """Reservations of one model, idempotent by request id; each one expires.

    Args:
        now_ms: returns Unix milliseconds.
    """

    def __init__(self, now_ms: Callable[[], int], random: Random) -> None:
        self._now_ms = now_ms
        self._random = random
        self._reservations: dict[str, Reservation] = {}
        self._expiries: list[tuple[int, str]] = []
        self._prefill: dict[WorkerRank, int] = {}
        self._decode: dict[WorkerRank, int] = {}
        self._requests: dict[WorkerRank, int] = {}
        self._owned: dict[str, set[str]] = {}
        self._owner_leases: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def reservations(self) -> list[Reservation]:
        """All active reservations."""
        return list(self._reservations.values())

    def holds(self, request_id: str) -> bool:
        """Returns whether a request has a reservation."""
        return request_id in self._reservations

    def load(self, slot: WorkerRank) -> Load:
        """Returns the load reserved on a rank."""
        requests = self._requests.get(slot)
        if requests is None:
            return NO_LOAD
        return Load(self._prefill[slot] / MILLI, self._decode[slot] / MILLI, requests)

    @property
    def loads(self) -> dict[WorkerRank, Load]:
        """Loads of the ranks that have reservations."""
        return {slot: self.load(slot) for slot in self._requests}

    def select(self, offers: Sequence[Offer], terms: ReservationParams) -> ReservedRank:
        """Chooses one of the offers (at least one) and reserves it, in one step.

        A request that has a reservation receives the same one, unless `terms.allowed` excludes its worker.

        Raises:
            AllBusy: every offer is at its limits.
        """
        self.expire()
        earlier = self._reservations.get(terms.request_id) if terms.request_id else None
        if earlier is not None:
            if terms.allowed is None or earlier.slot.worker_id in terms.allowed:
                return ReservedRank(earlier.slot, earlier.expires_unix_ms, repeated=True)
            self._forget(earlier)
        offers = [offer for offer in offers if not offer.busy(self.load(offer.slot))]
        if not offers:
            raise AllBusy
        if len(groups := {offer.group for offer in offers}) > 1:
            first = min(groups)
            offers = [offer for offer in offers if offer.group == first]
        costs = [offer.cost(self.load(offer.slot), terms.prefill_load_scale) for offer in offers]
        offer = offers[choose(costs, [offer.held for offer in offers], terms.temperature, self._random)]
        if not terms.request_id:
            return ReservedRank(offer.slot)
        expires = self._now_ms() + terms.ttl_ms
        self.put(Reservation.of(offer, terms, expires))
        return ReservedRank(offer.slot, expires)

    def put(self, reservation: Reservation) -> None:
        """Adds a reservation."""
        slot = reservation.slot
        reservation.booked_unix_ms = self._now_ms()
        self._reservations[reservation.request_id] = reservation
        heapq.heappush(self._expiries, (reservation.expires_unix_ms, reservation.request_id))
        self._prefill[slot] = self._prefill.get(slot, 0) + reservation.prefill
        self._decode[slot] = self._decode.get(slot, 0) + reservation.decode
        self._requests[slot] = self._requests.get(slot, 0) + 1
        if (owner := reservation.owner) is not None:
            self._owned.setdefault(owner.name, set()).add(reservation.request_id)
            self.renew_owners([owner.name], owner.lease_ms)

    def put_later(self, reservation: Reservation) -> None:
        """Adds a reservation, unless its request has one on the same rank, or one that expires later."""
        earlier = self._reservations.get(reservation.request_id)
        if earlier is not None:
            if earlier.slot == reservation.slot or earlier.expires_unix_ms >= reservation.expires_unix_ms:
                return
            self._forget(earlier)
        self.put(reservation)

    def mark_prefill_complete(self, request_ids: Iterable[str]) -> list[str]:
        """Releases prefill load; returns the ids without reservations. Idempotent."""
        unknown = []
        for request_id in request_ids:
            reservation = self._reservations.get(request_id)
            if reservation is None:
                unknown.append(request_id)
            else:
                self._prefill[reservation.slot] -= reservation.prefill
                reservation.prefill = 0
        return unknown

    def progress(self, outputs: Mapping[str, int]) -> list[str]:
        """Reserves load for output beyond the expected length; returns the ids without reservations.

        Args:
            outputs: total output in thousandths of a block by request id. Repeated or late reports change nothing.
        """
        unknown = []
        for request_id, output in outputs.items():
            reservation = self._reservations.get(request_id)
            if reservation is None:
                unknown.append(request_id)
            elif (growth := output - reservation.output) > 0:
                self._decode[reservation.slot] += growth
                reservation.decode += growth
                reservation.output = output
        return unknown

    def free(self, request_ids: Iterable[str]) -> list[str]:
        """Releases all load; returns the ids without reservations."""
        unknown = []
        for request_id in request_ids:
            reservation = self._reservations.get(request_id)
            if reservation is None:
                unknown.append(request_id)
            else:
                self._forget(reservation)
        return unknown

    def drop_worker(self, worker_id: str) -> None:
        """Drops the reservations of a removed worker."""
        for reservation in self.reservations:
            if reservation.slot.worker_id == worker_id:
                self._forget(reservation)

    def renew_owners(self, owners: Iterable[str], lease_ms: int) -> None:
        """Prolongs the leases of owners that have reservations."""
        until = self._now_ms() + lease_ms
        for owner in owners:
            if owner in self._owned:
                self._owner_leases[owner] = max(until, self._owner_leases.get(owner, 0))

    def drop_owners(self) -> int:
        """Drops the reservations of owners whose lease expired; returns their number."""
        now, count = self._now_ms(), len(self._reservations)
        for owner in [owner for owner, until in self._owner_leases.items() if until <= now]:
            for request_id in list(self._owned[owner]):
                self._forget(self._reservations[request_id])
        return count - len(self._reservations)

    def correct(self, slot: WorkerRank, most: int, age_ms: int, computed: bool) -> tuple[int, int]:
        """Reconciles old reservations of a rank with its reported load; see Store.correct."""
        before = self._now_ms() - age_ms
        old = [each for each in self._reservations.values() if each.slot == slot and each.booked_unix_ms <= before]
        old.sort(key=lambda each: each.booked_unix_ms)
        surplus = max(len(old) - most, 0)
        waiting = [each.request_id for each in old[surplus:] if each.prefill] if computed else []
        self.free([each.request_id for each in old[:surplus]])
        self.mark_prefill_complete(waiting)
        return surplus, len(waiting)

    def expire(self) -> int:
        """Drops expired reservations; returns their number."""
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
        if reservation.owner is not None:
            owned = self._owned[reservation.owner.name]
            owned.discard(reservation.request_id)
            if not owned:
                del self._owned[reservation.owner.name], self._owner_leases[reservation.owner.name]
        if self._requests[slot] == 1:
            del self._requests[slot], self._prefill[slot], self._decode[slot]
        else:
            self._requests[slot] -= 1
            self._prefill[slot] -= reservation.prefill
            self._decode[slot] -= reservation.decode
        if len(self._expiries) > 64 and len(self._expiries) > 2 * len(self._reservations):
            # Freed requests leave their entry in the heap; without compaction it would hold the traffic of a whole TTL.
            self._expiries = [(each.expires_unix_ms, each.request_id) for each in self._reservations.values()]
            heapq.heapify(self._expiries)
