"""Keeps a burst of requests with one new prefix together: the first decides, the others wait for that moment.

Without it all of them would match before any is booked, and spread over the workers although each computes the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from services.router.kv_index.index import Overlap
from services.router.sync.model_state import ModelState
from services.router.workers.worker import WorkerRank

PATIENCE_S = 1.0  # as long as the store may take; then the link is lost and nobody waits for it
ROUNDS = 4  # a prompt can branch off again and again; then it goes without waiting


class PrefixSingleFlight:
    """Decisions under way, by the first block that is new in their prompts."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], asyncio.Event] = {}

    @asynccontextmanager
    async def matched(
        self, view: ModelState, hashes: Sequence[int], wait: bool
    ) -> AsyncIterator[Mapping[WorkerRank, Overlap]]:
        """The overlaps to decide by; whoever has the same new block first waits until this is left, within a bound.

        Args:
            wait: False for a query that books nothing: nobody has to meet it.
        """
        overlaps = view.match(hashes)
        for _ in range(ROUNDS if wait else 0):
            covered = max((each.blocks + each.predicted for each in set(overlaps.values())), default=0)
            if covered >= len(hashes):
                break
            key = view.model, hashes[covered]
            first = self._under_way.get(key)
            if first is None:
                async with self._deciding(key):
                    yield overlaps
                return
            try:
                await asyncio.wait_for(first.wait(), PATIENCE_S)
            except TimeoutError:
                break
            overlaps = view.match(hashes)
        yield overlaps

    @asynccontextmanager
    async def _deciding(self, key: tuple[str, int]) -> AsyncIterator[None]:
        decided = self._under_way[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._under_way[key]
            decided.set()
