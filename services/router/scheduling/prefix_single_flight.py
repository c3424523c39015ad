"""Single flight by prefix: of concurrent requests with the same new prefix, one decides and the others wait for it.

Otherwise all of them would be matched before any reservation is made and spread over workers that compute the same
prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from services.router.state.kv_index.index import Overlap
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.worker import WorkerRank

MAX_WAIT_S = 1.0
"""Seconds, as the store's timeout, that a prompt waits for others with its new prefix; then it no longer waits."""
ROUNDS = 4  # a prompt may have to wait for several new prefixes in turn; after these it continues without waiting


class PrefixSingleFlight:
    """Decisions in progress by the first new block of their prompts."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], asyncio.Event] = {}

    @asynccontextmanager
    async def matched(
        self, view: ModelState, hashes: Sequence[int], wait: bool
    ) -> AsyncIterator[Mapping[WorkerRank, Overlap]]:
        """Returns the overlaps for a decision, made inside the context; equal prefixes wait for its end, up to a bound.

        Args:
            wait: False for a query without a reservation, which affects no other query.
        """
        overlaps = view.match(hashes)
        until = 0.0
        for _ in range(ROUNDS if wait else 0):
            covered = max((each.blocks + each.predicted for each in set(overlaps.values())), default=0)
            if covered >= len(hashes):
                break
            key = view.model, hashes[covered]
            first = self._under_way.get(key)
            if first is None:
                decided = self._under_way[key] = asyncio.Event()
                try:
                    yield overlaps
                finally:
                    del self._under_way[key]
                    decided.set()
                return
            now = time.monotonic()
            until = until or now + MAX_WAIT_S
            try:
                await asyncio.wait_for(first.wait(), until - now)
            except TimeoutError:
                break
            overlaps = view.match(hashes)
        yield overlaps
