"""Bounded change feed inside one process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice

from services.router.kv_index.events import Change
from services.router.store.base import FellBehind, Position

QUIET_S = 0.5


class Feed:
    """Numbered changes, at most the latest `limit`."""

    def __init__(self, limit: int) -> None:
        self._changes: deque[Change] = deque(maxlen=limit)
        self._last = 0
        self._appended = asyncio.Event()

    @property
    def position(self) -> Position:
        """Position after the last change."""
        return Position(self._last)

    def append(self, change: Change) -> None:
        """Appends a change and notifies followers."""
        self._changes.append(change)
        self._last += 1
        self._appended.set()
        self._appended = asyncio.Event()

    async def follow(self, position: Position) -> AsyncIterator[list[Change]]:
        """Implements Store.follow."""
        number = position.number
        while True:
            oldest = self._last - len(self._changes)
            if not oldest <= number <= self._last:
                raise FellBehind
            if number < self._last:
                changes = list(islice(self._changes, number - oldest, None))
                number = self._last
                yield changes
                continue
            try:
                await asyncio.wait_for(self._appended.wait(), QUIET_S)
            except TimeoutError:
                yield []
