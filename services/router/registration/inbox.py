"""Bounded queue between the reader of a stream and the handler of its messages."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from services.common.errors import SluiceError

T = TypeVar("T")


class Inbox(Generic[T]):
    """Queue that accepts single items and returns all queued items at once; `put` waits while it has `limit` items."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[T] = deque()
        self._ready = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()
        self._ended = False
        self._error: SluiceError | None = None

    async def put(self, item: T) -> None:
        """Adds an item, after waiting for space."""
        await self._space.wait()
        self._items.append(item)
        if len(self._items) >= self._limit:
            self._space.clear()
        self._ready.set()

    def end(self, error: SluiceError | None = None) -> None:
        """Closes the inbox. With an error, `take` raises that instead of returning the queued items."""
        self._ended = True
        self._error = self._error or error
        self._ready.set()

    async def take(self, timeout_s: float) -> list[T]:
        """Waits for items and returns all of them; returns an empty list after the end.

        Raises:
            SluiceError: the error passed to `end`.
            TimeoutError: no item arrived in time.
        """
        if not self._items and not self._ended:
            await asyncio.wait_for(self._ready.wait(), timeout_s)
        if self._error is not None:
            raise self._error
        items = list(self._items)
        self._items.clear()
        if not self._ended:
            self._ready.clear()
        self._space.set()
        return items
