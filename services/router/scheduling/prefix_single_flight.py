"""Single flight by prefix: of concurrent requests with the same new prefix, one decides and the others wait for it.

Otherwise all of them would be matched before any reservation is made and spread over workers that compute the same
prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from services.router.state.kv_index.index import Overlap
from services.router.state.sync.model_state import ModelState
from services.router.state.workers.worker import WorkerRank

MAX_WAIT_S = 1.0
"""Seconds, as the store's timeout, that a prompt waits for others with its new prefix; then it no longer waits."""
ROUNDS = 4  # a prompt may have to wait for several new prefixes in turn; after these it continues without waiting


class PrefixSingleFlight:
    """Decisions in progress by the first new block of their prompts."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], asyncio.Future[None]] = {}

    def matched(self, view: ModelState, hashes: Sequence[int], wait: bool) -> _Matched:
        """Returns the overlaps for a decision, made inside the context; equal prefixes wait for its end, up to a bound.

        Args:
            wait: False for a query without a reservation, which affects no other query.
        """
        return _Matched(self._under_way, view, hashes, wait)


class _Matched:
    """One decision; the context of `PrefixSingleFlight.matched`."""

    __slots__ = ("_hashes", "_key", "_under_way", "_view", "_wait")

    def __init__(
        self,
        under_way: dict[tuple[str, int], asyncio.Future[None]],
        view: ModelState,
        hashes: Sequence[int],
        wait: bool,
    ) -> None:
        self._under_way = under_way
        self._view = view
        self._hashes = hashes
        self._wait = wait
        self._key: tuple[str, int] | None = None

    async def __aenter__(self) -> Mapping[WorkerRank, Overlap]:
        overlaps = self._view.match(self._hashes)
        until = 0.0
        for _ in range(ROUNDS if self._wait else 0):
            covered = max(each.blocks + each.predicted for each in {*overlaps.values()}) if overlaps else 0
            if covered >= len(self._hashes):
                break
            key = self._view.model, self._hashes[covered]
            first = self._under_way.get(key)
            if first is None:
                self._key = key
                self._under_way[key] = asyncio.get_running_loop().create_future()
                break
            now = time.monotonic()
            until = until or now + MAX_WAIT_S
            _, late = await asyncio.wait((first,), timeout=until - now)
            if late:
                break
            overlaps = self._view.match(self._hashes)
        return overlaps

    async def __aexit__(self, *_: object) -> None:
        if self._key is not None:
            self._under_way.pop(self._key).set_result(None)
