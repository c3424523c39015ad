"""The few ranks worth offering among many: the cheapest by what this replica knows, chosen without looking at each.

What a rank costs is what stands booked on it plus what the prompt adds there, and the second is the same for all ranks
with the same overlap. So a thousand ranks take a sum each, and only the best become candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from random import Random

from services.router.kv_index.index import NO_OVERLAP, Overlap
from services.router.reservations.cost import MILLI, Load, Offer
from services.router.workers.worker import WorkerRank

MOST = 16  # as few as leave a choice: each costs a candidate, an offer and its part of the booking
EACH_BY_ITSELF = frozenset({"kv", "least_loaded"})  # policies that judge a rank without looking at the others


_NOTHING = (0.0, 0.0)


class LoadSnapshot:
    """What is booked on the ranks of one model: as last read, and what was booked here since."""

    def __init__(self) -> None:
        self._read: Mapping[WorkerRank, Load] | None = None
        self._booked: dict[WorkerRank, tuple[float, float]] = {}

    def booked(self, loads: Mapping[WorkerRank, Load]) -> Mapping[WorkerRank, tuple[float, float]]:
        """(prefill, decode) in blocks by rank; missing ones have nothing.

        Args:
            loads: as last read. Another object than before was read since, and knows of what was added here.
        """
        if self._read is not loads:
            self._read = loads
            self._booked = {slot: (load.prefill, load.decode) for slot, load in loads.items()}
        return self._booked

    def add(self, offers: Iterable[Offer]) -> None:
        """They were booked."""
        for offer in offers:
            prefill, decode = self._booked.get(offer.slot, _NOTHING)
            self._booked[offer.slot] = prefill + offer.book_prefill / MILLI, decode + offer.book_decode / MILLI


def nearest(
    slots: Sequence[WorkerRank],
    overlaps: Mapping[WorkerRank, Overlap],
    samples: Mapping[Overlap, Offer],
    booked: Mapping[WorkerRank, tuple[float, float]],
    scale: float,
    random: Random,
    most: int = MOST,
) -> list[WorkerRank]:
    """The `most` cheapest ranks; of equally cheap ones any.

    Args:
        samples: the offer of a rank with this overlap, for every overlap that occurs and NO_OVERLAP.
        booked: as LoadSnapshot.booked.
        scale: weight of prefill against decode load.
    """
    if len(slots) <= most:
        return list(slots)
    overlap_of, booked_on = overlaps.get, booked.get
    own = {overlap: (offer.uncached, offer.added) for overlap, offer in samples.items()}
    costs = []
    for slot in slots:
        uncached, added = own[overlap_of(slot, NO_OVERLAP)]
        prefill, decode = booked_on(slot, _NOTHING)
        ahead = prefill + uncached
        costs.append((scale * ahead if ahead > 0 else 0.0) + decode + added)
    last = sorted(costs)[most - 1]
    cheaper = [slot for slot, cost in zip(slots, costs, strict=True) if cost < last]
    level = [slot for slot, cost in zip(slots, costs, strict=True) if cost == last]
    return cheaper + random.sample(level, most - len(cheaper))


def occurring(slots: Sequence[WorkerRank], overlaps: Mapping[WorkerRank, Overlap]) -> set[Overlap]:
    """The overlaps of these ranks, NO_OVERLAP always among them."""
    return {*map(overlaps.get, slots, repeat(NO_OVERLAP)), NO_OVERLAP}
