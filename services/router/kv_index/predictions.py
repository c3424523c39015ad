"""What ranks are expected to hold, because requests were sent there; kept apart from what they reported.

For engines that report no KV events this is all there is to route by; for others it bridges the moment between a
decision and its event, so that a burst of requests with one new prefix stays together.

A prediction is the stretch of a prompt's blocks that was new where the prompt was sent. Hashes are chained, so a prompt
that has the stretch's first block at the same place has everything before it too: finding a rank's predictions costs a
look-up per distinct starting place and a bisection per stretch found, whatever the length of the prompt.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.router.kv_index.index import NO_OVERLAP, Overlap
from services.router.workers.worker import WorkerRank


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """How long predictions last, seconds, and how many blocks of them a rank has at most.

    `silent_s`: of ranks that report no events. `bridge_s`: of ranks that do, after the prompt is computed.
    `computing_s`: how long a prompt counts as waiting for that if nobody says anything.
    """

    silent_s: float = 120.0
    bridge_s: float = 2.0
    computing_s: float = 60.0
    most_blocks: int = 100_000


@dataclass(slots=True)
class _Stretch:
    request_id: str
    slot: WorkerRank
    start: int
    hashes: array[int]
    until: float
    computing_until: float
    silent: bool

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)

    def depth(self, hashes: Sequence[int]) -> int:
        """How far a prompt that has this stretch's first block goes along with it, in blocks of the prompt."""
        start, own = self.start, self.hashes
        low, high = 0, min(len(own), len(hashes) - start)  # `low` is shared, `high` is not or is the end
        while high - low > 1:
            middle = (low + high) // 2
            if own[middle] == hashes[start + middle]:
                low = middle
            else:
                high = middle
        return start + high


class Predictions:
    """The expected blocks of one model's ranks.

    Args:
        now_s: seconds of any clock that does not go back.
    """

    def __init__(self, lifetimes: Lifetimes | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._lifetimes = lifetimes or Lifetimes()
        self._now_s = now_s
        self._anchors: dict[int, dict[WorkerRank, _Stretch]] = {}
        self._starts: Counter[int] = Counter()
        self._ranks: dict[WorkerRank, OrderedDict[int, _Stretch]] = {}  # by anchor, the longest unused first
        self._blocks: Counter[WorkerRank] = Counter()
        self._requests: dict[str, _Stretch] = {}

    def __len__(self) -> int:
        return self._starts.total()

    def blocks(self, slot: WorkerRank) -> int:
        """How many blocks a rank is expected to hold that it has not reported."""
        return self._blocks[slot]

    def added_to(self, observed: Mapping[WorkerRank, Overlap], hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        """Overlaps with what is expected beyond what is known."""
        if not self._starts:
            return observed
        now, found = self._now_s(), dict(observed)
        for stretch in sorted(self._touched(hashes, now), key=lambda stretch: stretch.start):
            overlap = found.get(stretch.slot, NO_OVERLAP)
            reached = overlap.blocks + overlap.predicted
            if stretch.start > reached:
                continue  # what it stood on is gone
            further = stretch.depth(hashes) - reached
            if further > 0:
                computing = further if now < stretch.computing_until else 0
                found[stretch.slot] = overlap._replace(
                    predicted=overlap.predicted + further, computing=overlap.computing + computing
                )
        return found

    def expect(
        self,
        slot: WorkerRank,
        hashes: Sequence[int],
        overlap: Overlap,
        request_id: str,
        silent: bool,
        capacity: int = 0,
    ) -> None:
        """A request was sent to a rank that will hold its blocks soon.

        Args:
            overlap: of the rank with it, what was expected before included.
            silent: the rank reports no events.
            capacity: blocks it has at all; 0 if that is not known.
        """
        now = self._now_s()
        self._expire(slot, now)
        lifetimes = self._lifetimes
        until = now + (lifetimes.silent_s if silent else lifetimes.computing_s)
        start = overlap.blocks + overlap.predicted
        most = min(capacity or lifetimes.most_blocks, lifetimes.most_blocks)
        new = array("Q", hashes[start : start + most])
        if new:
            self._add(_Stretch(request_id, slot, start, new, until, now + lifetimes.computing_s, silent))
        if silent:
            self._use(slot, hashes, until, now)
        rank = self._ranks.get(slot)
        while rank and self._blocks[slot] > most:
            self._drop(next(iter(rank.values())))

    def computed(self, request_id: str) -> None:
        """A request's prompt is computed: its blocks are not work ahead of anybody any more, and soon reported."""
        stretch = self._requests.get(request_id)
        if stretch is None:
            return
        stretch.computing_until = 0.0
        if not stretch.silent:
            stretch.until = min(stretch.until, self._now_s() + self._lifetimes.bridge_s)
            self._ranks[stretch.slot].move_to_end(stretch.hashes[0], last=False)

    def over(self, request_id: str, ran: bool = True) -> None:
        """A request has ended: what it left in a cache has been reported by now, where anything is.

        Args:
            ran: False when it ended before its prompt was computed.
        """
        stretch = self._requests.get(request_id)
        if stretch is None:
            return
        if ran and stretch.silent:
            stretch.computing_until = 0.0
        else:
            self._drop(stretch)

    def settle(self, slot: WorkerRank, holds: Callable[[int], bool]) -> None:
        """A rank reported events: what it holds now is known, and no prediction any more."""
        for stretch in list(self._ranks.get(slot, {}).values()):
            if holds(stretch.hashes[-1]):
                self._drop(stretch)

    def forget(self, slot: WorkerRank) -> None:
        """A rank is gone, or its cache is empty."""
        for stretch in list(self._ranks.get(slot, {}).values()):
            self._drop(stretch)

    def tidy(self) -> None:
        """Drops what has expired."""
        now = self._now_s()
        for slot in list(self._ranks):
            self._expire(slot, now)

    def _touched(self, hashes: Sequence[int], now: float) -> Iterator[_Stretch]:
        for start in self._starts:
            if start < len(hashes) and (at := self._anchors.get(hashes[start])) is not None:
                yield from (stretch for stretch in at.values() if stretch.until > now)

    def _use(self, slot: WorkerRank, hashes: Sequence[int], until: float, now: float) -> None:
        """Prolongs what a prompt goes along with, the beginning last, so that no end outlives what it stands on."""
        mine = [stretch for stretch in self._touched(hashes, now) if stretch.slot == slot]
        for stretch in sorted(mine, key=lambda stretch: -stretch.start):
            stretch.until = until
            self._ranks[slot].move_to_end(stretch.hashes[0])

    def _add(self, stretch: _Stretch) -> None:
        anchor = stretch.hashes[0]
        if (before := self._anchors.get(anchor, {}).get(stretch.slot)) is not None:
            self._drop(before)
        self._anchors.setdefault(anchor, {})[stretch.slot] = stretch
        self._starts[stretch.start] += 1
        self._ranks.setdefault(stretch.slot, OrderedDict())[anchor] = stretch
        self._blocks[stretch.slot] += len(stretch.hashes)
        self._requests[stretch.request_id] = stretch

    def _drop(self, stretch: _Stretch) -> None:
        slot, anchor = stretch.slot, stretch.hashes[0]
        at, rank = self._anchors[anchor], self._ranks[slot]
        del at[slot], rank[anchor]
        if not at:
            del self._anchors[anchor]
        self._starts[stretch.start] -= 1
        if not self._starts[stretch.start]:
            del self._starts[stretch.start]
        self._blocks[slot] -= len(stretch.hashes)
        if not rank:
            del self._ranks[slot], self._blocks[slot]
        if self._requests.get(stretch.request_id) is stretch:
            del self._requests[stretch.request_id]

    def _expire(self, slot: WorkerRank, now: float) -> None:
        """The first to expire come first: one rank's predictions all live equally long, but for those just computed."""
        rank = self._ranks.get(slot)
        while rank:
            first = next(iter(rank.values()))
            if first.until > now:
                return
            self._drop(first)
