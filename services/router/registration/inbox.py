"""A bounded inbox between the reader of a stream and the one who handles what was read."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from services.common.errors import SluiceError

T = TypeVar("T")


class Inbox(Generic[T]):
    """Takes items one by one, gives out all there are. The reader waits while `limit` items are inside."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._ended = False
        self._error: SluiceError | None = None

    async def put(self, item: T) -> None:
        """Adds an item; waits for room."""
        await self._room.wait()
        self._items.append(item)
        if len(self._items) >= self._limit:
            self._room.clear()
        self._news.set()

    def end(self, error: SluiceError | None = None) -> None:
        """Nothing more will come. With an error, what is inside is not worth handling any more."""
        self._ended = True
        self._error = self._error or error
        self._news.set()

    async def take(self, timeout_s: float) -> list[T]:
        """Everything inside, after waiting for something; empty at the end.

        Raises:
            SluiceError: as `end` was told.
            TimeoutError: nothing came in time.
        """
        if not self._items and not self._ended:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        if self._error is not None:
            raise self._error
        items = list(self._items)
        self._items.clear()
        if not self._ended:
            self._news.clear()
        self._room.set()
        return items
