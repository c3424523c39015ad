"""Preselects the cheapest of many ranks, by the loads known to this replica.

The cost of a rank is its reserved load plus the load the prompt adds, which is equal for all ranks with equal overlap.
So each of a thousand ranks costs one addition, and only the cheapest become candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from random import Random

from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.reservations.cost import MILLI, Load, Offer
from services.router.state.workers.worker import WorkerRank

MOST = 16  # few, because each costs a candidate, an offer and a share of the reservation script


_NO_LOAD = (0.0, 0.0)


class LoadSnapshot:
    """Reserved loads of the ranks of one model: as last read, plus reservations made here since."""

    def __init__(self) -> None:
        self._read: Mapping[WorkerRank, Load] | None = None
        self._booked: dict[WorkerRank, tuple[float, float]] = {}
        self._added: dict[WorkerRank, int] = {}

    def booked(self, loads: Mapping[WorkerRank, Load]) -> Mapping[WorkerRank, tuple[float, float]]:
        """Returns (prefill, decode) in blocks by rank; omitted ranks have no load.

        Args:
            loads: as last read. A new object includes what was added here before.
        """
        if self._read is not loads:
            self._read = loads
            self._booked = {slot: (load.prefill, load.decode) for slot, load in loads.items()}
            self._added = {}
        return self._booked

    def added_requests(self, slot: WorkerRank) -> int:
        """Returns the number of requests reserved on a rank since the loads were read."""
        return self._added.get(slot, 0)

    def add(self, offers: Iterable[Offer]) -> None:
        """Adds the load of reserved offers."""
        for offer in offers:
            prefill, decode = self._booked.get(offer.slot, _NO_LOAD)
            self._booked[offer.slot] = prefill + offer.book_prefill / MILLI, decode + offer.book_decode / MILLI
            self._added[offer.slot] = self._added.get(offer.slot, 0) + 1


def preselect(
    slots: Sequence[WorkerRank],
    overlaps: Mapping[WorkerRank, Overlap],
    samples: Mapping[Overlap, Offer],
    booked: Mapping[WorkerRank, tuple[float, float]],
    scale: float,
    random: Random,
    most: int = MOST,
) -> list[WorkerRank]:
    """Returns the `most` cheapest ranks; ties are broken at random.

    Args:
        samples: an offer for each overlap that occurs, and for NO_OVERLAP.
        booked: as returned by LoadSnapshot.booked.
        scale: weight of prefill relative to decode load.
    """
    if len(slots) <= most:
        return list(slots)
    overlap_of, booked_on = overlaps.get, booked.get
    own = {overlap: (offer.uncached, offer.added) for overlap, offer in samples.items()}
    costs = []
    for slot in slots:
        uncached, added = own[overlap_of(slot, NO_OVERLAP)]
        prefill, decode = booked_on(slot, _NO_LOAD)
        ahead = prefill + uncached
        costs.append((scale * ahead if ahead > 0 else 0.0) + decode + added)
    last = sorted(costs)[most - 1]
    cheaper = [slot for slot, cost in zip(slots, costs, strict=True) if cost < last]
    tied = [slot for slot, cost in zip(slots, costs, strict=True) if cost == last]
    return cheaper + random.sample(tied, most - len(cheaper))


def distinct_overlaps(slots: Sequence[WorkerRank], overlaps: Mapping[WorkerRank, Overlap]) -> set[Overlap]:
    """Returns the distinct overlaps of these ranks, always including NO_OVERLAP."""
    return {*map(overlaps.get, slots, repeat(NO_OVERLAP)), NO_OVERLAP}
