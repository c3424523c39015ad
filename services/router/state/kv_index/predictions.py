"""Predicted cache content: blocks that ranks are expected to hold because requests were routed to them.

Predictions are separate from reported blocks. For engines without KV events they are the only routing information; for
others they bridge the time between a decision and its event, so that a burst of requests with a new prefix is routed to
one rank.

A prediction is the span of a prompt's blocks that was new to the chosen rank. Hashes are chained, so a prompt with the
span's first block at the same index shares the whole prefix before it. Finding the predictions for a prompt therefore
costs one lookup per distinct start index and one bisection per span found, whatever the length of the prompt.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.router.state.kv_index.index import NO_OVERLAP, Overlap
from services.router.state.workers.worker import WorkerRank


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes of predictions in seconds, and their maximum number of blocks per rank.

    Attributes:
        silent_s: lifetime on ranks that report no KV events.
        bridge_s: lifetime on other ranks once the prompt is computed.
        computing_s: longest time for which a prompt counts as not computed yet.
    """

    no_events_s: float = 120.0
    bridge_s: float = 2.0
    computing_s: float = 60.0
    most_blocks: int = 100_000


@dataclass(slots=True)
class _Span:
    request_id: str
    slot: WorkerRank
    start: int
    hashes: array[int]
    until: float
    computing_until: float
    no_kv_events: bool

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)

    def depth(self, hashes: Sequence[int]) -> int:
        """Returns how many leading blocks of a prompt that contains the first block of this span are covered by it."""
        start, hashes_here = self.start, self.hashes
        low, high = (
            0,
            min(len(hashes_here), len(hashes) - start),
        )  # block `low` is shared; block `high` is not, or is the end
        while high - low > 1:
            middle = (low + high) // 2
            if hashes_here[middle] == hashes[start + middle]:
                low = middle
            else:
                high = middle
        return start + high


class Predictions:
    """Predicted blocks of the ranks of one model.

    Args:
        now_s: returns seconds of a monotonic clock.
    """

    def __init__(self, lifetimes: Lifetimes | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._lifetimes = lifetimes or Lifetimes()
        self._now_s = now_s
        self._anchors: dict[int, dict[WorkerRank, _Span]] = {}
        self._starts: defaultdict[int, int] = defaultdict(int)
        self._ranks: dict[WorkerRank, OrderedDict[int, _Span]] = {}  # by anchor, least recently used first
        self._blocks: defaultdict[WorkerRank, int] = defaultdict(int)
        self._requests: dict[str, _Span] = {}

    def __len__(self) -> int:
        return sum(self._starts.values())

    def blocks(self, slot: WorkerRank) -> int:
        """Returns the number of predicted blocks of a rank."""
        return self._blocks.get(slot, 0)

    def extend(self, observed: Mapping[WorkerRank, Overlap], hashes: Sequence[int]) -> Mapping[WorkerRank, Overlap]:
        """Returns the observed overlaps extended by predicted blocks."""
        if not self._starts:
            return observed
        now, found = self._now_s(), dict(observed)
        for span in sorted(self._touched(hashes, now), key=lambda span: span.start):
            overlap = found.get(span.slot, NO_OVERLAP)
            reached = overlap.blocks + overlap.predicted
            if span.start > reached:
                continue  # the prefix before this span was evicted
            further = span.depth(hashes) - reached
            if further > 0:
                computing = further if now < span.computing_until else 0
                found[span.slot] = overlap._replace(
                    predicted=overlap.predicted + further, computing=overlap.computing + computing
                )
        return found

    def add(
        self,
        slot: WorkerRank,
        hashes: Sequence[int],
        overlap: Overlap,
        request_id: str,
        no_kv_events: bool,
        capacity: int = 0,
    ) -> None:
        """Adds a prediction for a request that was routed to a rank.

        Args:
            overlap: of the request with the rank, including earlier predictions.
            silent: the rank reports no KV events.
            capacity: total blocks of the rank; 0 if unknown.
        """
        now = self._now_s()
        self._expire(slot, now)
        lifetimes = self._lifetimes
        until = now + (lifetimes.no_events_s if no_kv_events else lifetimes.computing_s)
        start = overlap.blocks + overlap.predicted
        most = min(capacity or lifetimes.most_blocks, lifetimes.most_blocks)
        new = array("Q", hashes[start : start + most])
        if new:
            self._add(_Span(request_id, slot, start, new, until, now + lifetimes.computing_s, no_kv_events))
        if no_kv_events:
            self._prolong(slot, hashes, until, now)
        rank = self._ranks.get(slot)
        while rank and self._blocks[slot] > most:
            self._drop(next(iter(rank.values())))

    def mark_computed(self, request_id: str) -> None:
        """Marks a request's prompt as computed: its blocks are no longer pending work and are reported soon."""
        span = self._requests.get(request_id)
        if span is None:
            return
        span.computing_until = 0.0
        if not span.no_kv_events:
            span.until = min(span.until, self._now_s() + self._lifetimes.bridge_s)
            self._ranks[span.slot].move_to_end(span.hashes[0], last=False)

    def end_request(self, request_id: str, ran: bool = True) -> None:
        """Ends a request; only ranks without KV events keep the prediction, as others have reported its blocks by now.

        Args:
            ran: False if the request ended before its prompt was computed.
        """
        span = self._requests.get(request_id)
        if span is None:
            return
        if ran and span.no_kv_events:
            span.computing_until = 0.0
        else:
            self._drop(span)

    def drop_confirmed(self, slot: WorkerRank, holds: Callable[[int], bool]) -> None:
        """Drops the predictions that a rank's KV events have confirmed."""
        for span in list(self._ranks.get(slot, {}).values()):
            if holds(span.hashes[-1]):
                self._drop(span)

    def drop_rank(self, slot: WorkerRank) -> None:
        """Drops all predictions of a rank that was removed or whose cache was cleared."""
        for span in list(self._ranks.get(slot, {}).values()):
            self._drop(span)

    def drop_expired(self) -> None:
        """Drops expired predictions."""
        now = self._now_s()
        for slot in list(self._ranks):
            self._expire(slot, now)

    def _touched(self, hashes: Sequence[int], now: float) -> Iterator[_Span]:
        for start in self._starts:
            if start < len(hashes) and (at := self._anchors.get(hashes[start])) is not None:
                yield from (span for span in at.values() if span.until > now)

    def _prolong(self, slot: WorkerRank, hashes: Sequence[int], until: float, now: float) -> None:
        """Prolongs the spans a prompt shares, later ones first, so that no span outlives the prefix before it."""
        own_spans = [span for span in self._touched(hashes, now) if span.slot == slot]
        for span in sorted(own_spans, key=lambda span: -span.start):
            span.until = until
            self._ranks[slot].move_to_end(span.hashes[0])

    def _add(self, span: _Span) -> None:
        anchor = span.hashes[0]
        if (before := self._anchors.get(anchor, {}).get(span.slot)) is not None:
            self._drop(before)
        self._anchors.setdefault(anchor, {})[span.slot] = span
        self._starts[span.start] += 1
        self._ranks.setdefault(span.slot, OrderedDict())[anchor] = span
        self._blocks[span.slot] += len(span.hashes)
        self._requests[span.request_id] = span

    def _drop(self, span: _Span) -> None:
        slot, anchor = span.slot, span.hashes[0]
        at, rank = self._anchors[anchor], self._ranks[slot]
        del at[slot], rank[anchor]
        if not at:
            del self._anchors[anchor]
        self._starts[span.start] -= 1
        if not self._starts[span.start]:
            del self._starts[span.start]
        self._blocks[slot] -= len(span.hashes)
        if not rank:
            del self._ranks[slot], self._blocks[slot]
        if self._requests.get(span.request_id) is span:
            del self._requests[span.request_id]

    def _expire(self, slot: WorkerRank, now: float) -> None:
        """Drops a rank's expired spans, which come first: all spans have equal lifetimes unless just computed."""
        rank = self._ranks.get(slot)
        while rank:
            first = next(iter(rank.values()))
            if first.until > now:
                return
            self._drop(first)
