"""A bounded feed of changes inside one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

from services.router.kv_index.events import Change
from services.router.store.base import FellBehind, Position

QUIET_S = 0.5


class Feed:
    """Numbered changes; the oldest are forgotten beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self._changes: deque[Change] = deque(maxlen=limit)
        self._last = 0
        self._news = asyncio.Event()

    @property
    def position(self) -> Position:
        """After the last change."""
        return Position(self._last)

    def append(self, change: Change) -> None:
        """Adds a change and wakes the followers."""
        self._changes.append(change)
        self._last += 1
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, position: Position) -> AsyncIterator[list[Change]]:
        """As Store.follow."""
        seen = position.number
        while True:
            oldest = self._last - len(self._changes)
            if not oldest <= seen <= self._last:
                raise FellBehind
            if seen < self._last:
                changes = list(islice(self._changes, seen - oldest, None))
                seen = self._last
                yield changes
                continue
            try:
                await asyncio.wait_for(self._news.wait(), QUIET_S)
            except TimeoutError:
                yield []
